"""Laws: where a rival computes everything, or keeps everything, it is the method it comes from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig, Text
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.evaluation.rivals import METHODS, Kitchen, likelihood_logits, say
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig, SpanIndex, open_client
from tests.evaluation.rivals.parts import (
    EXAMPLE,
    chunk_ids,
    compose,
    logits,
    plain,
    same,
    task_of,
)
from tests.tiny import HashEmbedder, placed, supported_model

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "smollm3", "cohere", "gpt-neox", "llama-yarn"]
NUMBERED = [
    *("cacheblend:0.3", "legolink:4", "ape", "kvlink"),
    *("evict", "strided", "meanpool", "truncated"),
]


@pytest.fixture(scope="module")
def kitchen(model) -> Kitchen:
    return Kitchen(model)


@pytest.fixture(scope="module")
def task(kitchen):
    return task_of(kitchen)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral-windowed", "qwen2-mixed"])
@pytest.mark.parametrize("method", ["full", "prefix", "cacheblend:1", "legolink:48", "legolink:99"])
def test_what_computes_everything_is_full_prefill(family, method):
    kitchen = Kitchen(supported_model(family))
    task = task_of(kitchen)
    assert len(task.chunks) == 4
    same(logits(kitchen, method, task), plain(kitchen.model, task, chunk_ids(task)))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_chunk_that_has_seen_the_prompt_is_full_prefill(family):
    kitchen = Kitchen(supported_model(family))
    task = task_of(kitchen, n_chunks=1)
    same(logits(kitchen, "chunk-after-prompt", task), plain(kitchen.model, task, chunk_ids(task)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "method", ["strided:1", "meanpool:1", "evict:1", "truncated:1", "kvlink:0"]
)
def test_what_keeps_everything_is_the_chunks_themselves(family, method):
    kitchen = Kitchen(supported_model(family))
    task = task_of(kitchen)
    same(logits(kitchen, method, task), logits(kitchen, "chunk", task))


@pytest.mark.parametrize("method", ["naive", "chunk", "chunk-bos", "chunk-after-prompt", "ape:1"])
def test_methods_differ_where_several_chunks_are_joined(kitchen, task, method):
    others = {"full", "naive", "chunk", "chunk-bos", "chunk-after-prompt", "ape:1"} - {method}
    found = logits(kitchen, method, task)
    for other in sorted(others):
        assert (found - logits(kitchen, other, task)).abs().max() > 1e-2, other


@pytest.mark.parametrize("method", [*METHODS, *NUMBERED])
def test_every_method_gives_finite_logits_and_an_answer(kitchen, task, method):
    assert logits(kitchen, method, task).isfinite().all()
    watch = Stopwatch(kitchen.model.device)
    said = say(kitchen.model, compose(kitchen, method, task), task.tail, watch, 6)
    assert 0 < len(said.tokens) <= 6
    assert watch.timings().ttft_ms > 0


@pytest.mark.parametrize("family", ["llama", "mistral-windowed", "gemma3", "smollm3", "gpt-neox"])
@pytest.mark.parametrize("method", [*METHODS, *NUMBERED])
def test_the_likelihood_and_the_answer_are_of_the_same_distribution(family, method):
    """What is said, token by token, is what one pass over all of it finds likeliest."""
    model = supported_model(family)
    kitchen = Kitchen(model)
    task, watch = task_of(kitchen), Stopwatch(model.device)
    tokens = say(model, compose(kitchen, method, task), task.tail, watch, 4).tokens
    behind = likelihood_logits(model, compose(kitchen, method, task), task.tail, (*tokens, 7))
    assert behind.isfinite().all()
    assert behind.argmax(-1)[: len(tokens)].tolist() == list(tokens)


def test_entries_and_bytes_are_counted(kitchen, task):
    sizes = [len(chunk) for chunk in task.chunks]
    n_chunks, n_spans = sum(sizes), sum(map(len, task.spans))
    blocks = sum(-(-size // 4) for size in sizes)
    row = kitchen.model.layout.bytes_per_entry
    mixed = sizes[0] + sum(-(-size // 4) for size in sizes[1:])
    repaired = n_chunks - sum(min(16, size) for size in sizes)
    expected = {
        "none": (0, 0),
        "full": (n_chunks, 0),
        "prefix": (n_chunks, 0),
        "text": (n_spans, 0),
        "spans": (n_spans, n_spans),
        "isolated": (n_spans, n_spans),
        "legolink": (n_chunks, repaired),
        "kvlink": (n_chunks + 5 * len(sizes), n_chunks),
        "evict": (blocks, blocks),
        "strided": (blocks, blocks),
        "meanpool": (blocks, blocks),
        "truncated": (blocks, blocks),
        "c2kv": (blocks, blocks),
        "c2kv-untrained": (blocks, blocks),
        "hybrid": (mixed, mixed),
    }
    for name in METHODS:
        composed = compose(kitchen, name, task)
        n_context, n_read = expected.get(name, (n_chunks, n_chunks))
        assert (composed.n_context, composed.bytes_read) == (n_context, n_read * row), name


def test_naive_chunks_stand_where_they_were_encoded(kitchen, task):
    composed = compose(kitchen, "naive", task)
    n = len(task.head)
    for chunk in task.chunks:
        stop = n + len(chunk)
        expected = placed(kitchen.model, kitchen.entries(chunk), range(len(chunk)))
        same(composed.prefix.kv[..., n:stop, :], expected)
        n = stop
    assert composed.prefix.plans[0].length == n, "the question stands behind all of them"


def test_fewer_entries_keep_their_places_in_the_text(kitchen, task):
    """Four tokens become their last, or their mean, at the place of the last; the tail by itself."""
    n = len(task.head)
    shift = sum(len(c) for c in task.chunks) - sum(-(-len(c) // 4) for c in task.chunks)
    for method in ("strided", "meanpool"):
        kv = compose(kitchen, method, task).prefix.kv
        row = start = n
        for chunk in task.chunks:
            entries = kitchen.entries(chunk)
            for first in range(0, len(chunk), 4):
                block = entries[first : first + 4]
                one = block[-1:] if method == "strided" else block.mean(0, keepdim=True)
                at = start + min(first + 4, len(chunk)) - 1 - shift
                same(kv[..., row : row + 1, :], placed(kitchen.model, one, [at]))
                row += 1
            start += len(chunk)


def test_a_text_that_is_cut_short_is_its_beginning(kitchen, task):
    kv, row = compose(kitchen, "truncated", task).prefix.kv, len(task.head)
    for chunk in task.chunks:
        n = -(-len(chunk) // 4)
        expected = placed(kitchen.model, kitchen.entries(chunk)[:n], range(row, row + n))
        same(kv[..., row : row + n, :], expected)
        row += n


def test_evicted_entries_are_those_most_like_the_mean_key(kitchen, task):
    """By head, with plain loops, of keys as the model itself caches them."""
    composed = compose(kitchen, "evict", task)
    (chunk, *_) = task.chunks
    n = -(-len(chunk) // 4)
    keys = placed(kitchen.model, kitchen.entries(chunk), range(len(chunk)))[:, 0, 0]  # [L, H, T, D]
    values = kitchen.entries(chunk)[:, :, 1]
    rows = slice(len(task.head), len(task.head) + n)
    for layer in range(keys.shape[0]):
        for head in range(keys.shape[1]):
            mine = keys[layer, head]
            anchor = (mine / mine.norm(dim=-1, keepdim=True)).mean(0)
            alike = (mine @ anchor) / mine.norm(dim=-1) / anchor.norm()
            kept = np.sort(alike.argsort()[:n].numpy())
            found = composed.prefix.kv[layer, 1, 0, head, rows]
            same(found, values[kept, layer, head])


# -- the engine's own answers --------------------------------------------------------------------


@pytest.fixture
def rag(model, tmp_path):
    config = EngineConfig(chunk_tokens=48, coverage="all", load="read")
    with Engine(model, tmp_path / "store", config) as engine:
        rag = CoinRAG(engine, SpanIndex(open_client(None), HashEmbedder(), "rivals"))
        rag.add(EXAMPLE.documents)
        yield rag


def test_retrieval_and_answers_are_those_of_the_engine(rag, kitchen):
    found = rag.index.search(EXAMPLE.question, RetrievalConfig(n_chunks=3, n_nuggets=4))
    chunks = [span.ref for span in rag.index.search_chunks(EXAMPLE.question, 3)]
    refs = [span.ref for span in found]
    task = task_of(kitchen, n_chunks=3, n_nuggets=4)
    assert [chunk.ref() for chunk in task.chunks] == chunks
    assert rag.engine.plan(refs).refs == task.spans

    greedy = GenerationConfig(max_new_tokens=8)
    engine, question = rag.engine, EXAMPLE.question
    for method, stream in (
        ("spans", engine.stream(question, refs, greedy)),
        ("chunk", engine.stream(question, chunks, greedy)),
        ("full", engine.stream_full(question, [ref.chunk_id for ref in chunks], greedy)),
    ):
        watch = Stopwatch(kitchen.model.device)
        said = say(kitchen.model, compose(kitchen, method, task), task.tail, watch, 8)
        assert said.text == first_line(stream), method
    for method, wanted in (("spans", refs), ("chunk", chunks)):
        prefix, _ = engine.compose(wanted)
        ours = compose(kitchen, method, task).prefix
        assert ours.plans == prefix.plans
        n = prefix.n_entries
        same(ours.kv[..., :n, :], prefix.kv[..., :n, :])


def test_text_is_the_prefill_of_the_spans_words(rag, kitchen):
    task = task_of(kitchen)
    words = [i for ref in task.spans for i in task.ids_of(ref)]
    same(logits(kitchen, "text", task), plain(kitchen.model, task, words))
    pieces = [Text(task.head), Text(tuple(words)), Text(task.tail)]
    stream = rag.engine.stream_pieces(pieces, GenerationConfig(max_new_tokens=8))
    watch = Stopwatch(kitchen.model.device)
    said = say(kitchen.model, compose(kitchen, "text", task), task.tail, watch, 8)
    assert said.text == first_line(stream)


def test_isolated_nuggets_are_encoded_alone(kitchen, task):
    kv = compose(kitchen, "isolated", task).prefix.kv
    row = len(task.head)
    for ref in task.spans:
        stop = row + len(ref)
        entries = kitchen.encode(task.ids_of(ref))
        same(kv[..., row:stop, :], placed(kitchen.model, entries, range(row, stop)))
        row = stop


def test_the_question_alone_stands_behind_the_prompt(kitchen, task):
    same(logits(kitchen, "none", task), plain(kitchen.model, task, []))


def test_bos_is_seen_and_dropped(kitchen, task):
    (chunk, *_) = task.chunks
    with_bos = kitchen.encode((1, *chunk.token_ids))[1:]
    same(kitchen.entries(chunk, "bos"), with_bos)
    assert kitchen.bos == 1
    assert (kitchen.entries(chunk) - with_bos).abs().max() > 1e-2


def test_links_see_the_chunks_before_them_and_chunks_see_none(kitchen, task):
    """Against a forward pass with a mask of who sees whom, position by position."""
    (line_break, *_) = kitchen.model.tokenizer.encode("\n").ids
    ids, group = list(task.head), [0] * len(task.head)
    for number, chunk in enumerate(task.chunks, 1):
        ids += [*chunk.token_ids, line_break, line_break]
        group += [number] * len(chunk) + [0, 0]
    ids += [*task.tail, 40, 41, 42, 43]
    groups = torch.tensor(group + [0] * (len(ids) - len(group)))
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    seen = causal & ((groups[:, None] == 0) | (groups[:, None] == groups[None, :]))
    with torch.no_grad():
        whole = kitchen.model.hf(torch.tensor([ids]), attention_mask=seen[None, None]).logits[0]
    same(logits(kitchen, "kvlink:2", task), whole[-5:-1].float())


def first_line(stream) -> str:
    text = "".join(stream)
    return (text.strip().splitlines() or [""])[0].strip()
