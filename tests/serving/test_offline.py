"""vLLM's own engine in this process, in fp32, on the demo model: the same answers as our engine's.

Needs vLLM, which has an environment of its own: `make serving`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest

from coinrag_integrations.demo.data import demo_documents, demo_questions
from coinrag_integrations.demo.model import ensure_demo_model
from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig, Text, load_model
from coinrag_integrations.engine.plan import begin_alike
from coinrag_integrations.serving.launch import transfer_config
from coinrag_integrations.serving.writing import PrefixWriter, Written
from coinrag_integrations.types import Chunk, Scope, Span, SpanRef
from tests.tiny import fill

pytestmark = [
    pytest.mark.demo,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make serving"),
]

N_TOKENS = 10
BLOCK = 128  # tokens, vLLM's own on a CPU


@dataclass
class Side:
    """Our engine over a store, and what it would send to a server."""

    engine: Engine
    chunks: list[Chunk]
    writer: PrefixWriter

    def pieces(self, question: str, *refs: SpanRef):
        return [Text(self.engine.prompt.head), *refs, Text(self.engine.prompt.tail(question))]

    def own(self, pieces) -> str:
        stream = self.engine.stream_pieces(pieces, GenerationConfig(max_new_tokens=N_TOKENS))
        for _ in stream:
            pass
        return stream.answer.text


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def sides(store) -> Iterator[dict[str, Side]]:
    """Two tenants with the same documents."""
    # vLLM 0.32 looks into every module that is loaded, and cannot look into Numba's.
    config = EngineConfig(chunk_tokens=64, coverage="all", load="read", kernels="torch", c2kv=(4,))
    model = load_model(ensure_demo_model(), dtype="float32", pack=False)
    made = {}
    for tenant in ("one", "two"):
        engine = Engine(model, store, config, scope=Scope(tenant=tenant))
        text = "\n\n".join(it.text for it in list(demo_documents())[:4])
        chunks = fill(engine, text)[:8]
        made[tenant] = Side(engine, chunks, PrefixWriter.of(engine))
    yield made
    for side in made.values():
        side.engine.close()


@pytest.fixture(scope="module")
def llm(store, sides):
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        str(ensure_demo_model()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**transfer_config(store)),
    )


@pytest.fixture(autouse=True)
def _nothing_cached(llm):
    llm.reset_prefix_cache()


def ask(llm, written: list[Written], stop_ids, **options):
    from vllm import SamplingParams

    prompts, params = [], []
    for it in written:
        prompt = {"prompt_token_ids": list(it.prompt)}
        prompts.append(prompt if it.salt is None else {**prompt, "cache_salt": it.salt})
        extra = None if it.params is None else {"kv_transfer_params": it.params}
        params.append(
            SamplingParams(
                temperature=0,
                max_tokens=N_TOKENS,
                stop_token_ids=sorted(stop_ids),
                extra_args=extra,
                **options,
            )
        )
    return llm.generate(prompts, params, use_tqdm=False)


def text_of(output) -> str:
    assert output.outputs[0].finish_reason in ("stop", "length")
    return output.outputs[0].text.strip()


def cases(side: Side) -> list:
    """Spans, whole chunks, slots, and mixes of them, for two questions."""
    made = []
    for i, question in enumerate([it.question for it in demo_questions()][:2]):
        a, b, c = side.chunks[i : i + 3]
        slots = SpanRef(a.chunk_id, 0, len(a), 4)
        made += [
            side.pieces(question, a.ref(Span(5, 30)), b.ref(Span(3, 20)), c.ref(Span(0, 9))),
            side.pieces(question, a.ref(), b.ref()),
            side.pieces(question, slots, SpanRef(b.chunk_id, 0, len(b), 4)),
            side.pieces(question, slots, b.ref(Span(3, 20)), c.ref()),
        ]
    return made


@pytest.fixture(scope="module")
def expected(sides):
    side = sides["one"]
    return [(side.writer.write(pieces), side.own(pieces)) for pieces in cases(side)]


def stop_ids(sides):
    return sides["one"].engine.model.stop_ids


def test_answers_are_those_of_our_engine(llm, sides, expected):
    for written, text in expected:
        (output,) = ask(llm, [written], stop_ids(sides))
        assert text_of(output) == text
        assert output.num_cached_tokens == written.n_entries
        assert output.kv_transfer_params == {"coinrag": {"n_entries": written.n_entries}}


def test_sixteen_at_once_do_not_disturb_each_other(llm, sides, expected):
    both = [*expected, *expected]
    outputs = ask(llm, [written for written, _ in both], stop_ids(sides))
    assert [text_of(it) for it in outputs] == [text for _, text in both]


def test_what_is_cached_under_a_salt_is_used_again(llm, sides, expected):
    written = [it for it, _ in expected]
    ask(llm, written, stop_ids(sides))
    outputs = ask(llm, written, stop_ids(sides))
    assert [text_of(it) for it in outputs] == [text for _, text in expected]


def loaded(llm) -> int:
    """Rows that were read from the store and written into blocks, so far."""
    (rows,) = (it.value for it in llm.get_metrics() if it.name == "vllm:coinrag_rows")
    return rows


def test_the_next_turn_finds_the_blocks_of_spans_that_come_again(llm, sides):
    side, (first, second) = sides["one"], [it.question for it in demo_questions()][2:4]
    a, b, c, d = (it.ref() for it in side.chunks[:4])
    turns = [
        side.pieces(first, a, b, c),
        side.pieces(second, *begin_alike([d, b, a], [a, b, c])),  # another span instead of c
        side.pieces(second, *begin_alike([d, b, a], [a, b, c])),  # the same once more
        side.pieces(second, b, a, d),  # in another order, all of it stands elsewhere
    ]
    shared = []
    for pieces in turns:
        written, before = side.writer.write(pieces), loaded(llm)
        (output,) = ask(llm, [written], stop_ids(sides))
        assert text_of(output) == side.own(pieces)
        assert output.num_cached_tokens == written.n_entries
        shared.append(written.n_entries - (loaded(llm) - before))
    assert shared == [0, BLOCK, BLOCK, 0]


def test_a_conversation_that_goes_on_finds_all_of_its_blocks(llm, sides):
    side, (first, second) = sides["one"], [it.question for it in demo_questions()][2:4]
    refs = [it.ref() for it in side.chunks[:4]]
    turn = side.pieces(first, *refs)
    (answer,) = ask(llm, [side.writer.write(turn)], stop_ids(sides))
    said = (*turn[-1].ids, *answer.outputs[0].token_ids, *side.engine.prompt.tail(second))
    later, before = side.writer.write([*turn[:-1], Text(said)]), loaded(llm)
    (output,) = ask(llm, [later], stop_ids(sides))
    assert text_of(output) == side.own([*turn[:-1], Text(said)])
    assert loaded(llm) - before == later.n_entries % BLOCK
    assert later.n_entries > 2 * BLOCK


def test_spans_of_equal_tokens_share_nothing(llm, sides, store):
    """Their KV differs, as each has been read behind its own chunk's beginning."""
    side = sides["one"]
    same = " ".join(["The organ of the pier plays at noon, and at no other time of the day."] * 12)
    chunks = [
        next(it for it in fill(side.engine, f"{before} {same}", before))
        for before in ("Under the sea,", "In the long winter of the year of the flood,")
    ]
    refs, tokens = [], None
    for chunk in chunks:
        ids = side.engine.model.tokenizer.encode(" The organ of the pier plays at noon").ids
        at = next(i for i in range(len(chunk)) if chunk.token_ids[i : i + len(ids)] == ids)
        refs.append(chunk.ref(Span(at, at + 40)))
        tokens = tokens or chunk.token_ids[at : at + 40]
        assert chunk.token_ids[at : at + 40] == tokens
    whole = side.chunks[0].ref()
    pairs = [side.pieces("When?", whole, ref, ref) for ref in refs]
    written = [side.writer.write([*it[:2], it[2], side.chunks[1].ref(), it[-1]]) for it in pairs]
    assert written[0].prompt == written[1].prompt
    expected = [side.own([*it[:3], side.chunks[1].ref(), it[-1]]) for it in pairs]
    counts = [loaded(llm)]
    for it, own in zip(written, expected, strict=True):
        (output,) = ask(llm, [it], stop_ids(sides))
        assert text_of(output) == own
        counts.append(loaded(llm))
    assert counts[2] - counts[1] == counts[1] - counts[0] == written[0].n_entries


def test_plain_text_of_the_same_tokens_shares_nothing(llm, sides, expected):
    written, _ = expected[1]
    plain = replace(written, params=None, salt=None)
    (alone,) = ask(llm, [plain], stop_ids(sides))
    assert alone.num_cached_tokens == 0
    (composed,) = ask(llm, [written], stop_ids(sides))
    (after,) = ask(llm, [replace(plain, prompt=(*plain.prompt, 1))], stop_ids(sides))
    assert text_of(composed) == expected[1][1]
    assert after.num_cached_tokens % 128 == 0  # its own text's blocks, not ours
    assert composed.num_cached_tokens == written.n_entries


def test_tenants_with_equal_texts_share_nothing(llm, sides):
    pieces = {name: cases(side)[1] for name, side in sides.items()}
    one, two = (sides[name].writer.write(pieces[name]) for name in ("one", "two"))
    assert one.prompt == two.prompt
    assert one.salt != two.salt
    (output,) = ask(llm, [one], stop_ids(sides))
    assert text_of(output) == sides["one"].own(pieces["one"])
    # Nothing of the first is there for the second, be it as text, as its own, or with the other's name.
    (text,) = ask(llm, [replace(two, params=None, salt=None)], stop_ids(sides))
    assert text.num_cached_tokens == 0
    stolen = replace(two, params=one.params)
    (refused,) = ask(llm, [stolen], stop_ids(sides))
    assert refused.outputs[0].finish_reason == "error"
    (own,) = ask(llm, [two], stop_ids(sides))
    assert own.num_cached_tokens == two.n_entries
    assert text_of(own) == sides["two"].own(pieces["two"])


def test_bad_requests_fail_alone(llm, sides, expected):
    (good, text), other = expected[0], expected[1][0]
    bad = [
        replace(good, salt=None),
        replace(good, salt=other.salt),
        replace(good, params=None),
        replace(good, params={"path": "/etc/passwd"}),
        replace(good, params={**good.params, "handles": [[0.0, 1.0]]}),
        replace(good, params={**good.params, "n_head": 10_000}),
        replace(good, params={**good.params, "tenant": "three"}),
        replace(good, params=other.params),
        replace(good, prompt=good.prompt[: good.n_entries]),
        replace(good, prompt=good.prompt[:3]),
        replace(good, prompt=(5,)),
    ]
    outputs = ask(llm, [bad[0], good, *bad[1:], good], stop_ids(sides))
    reasons = [it.outputs[0].finish_reason for it in outputs]
    assert reasons == ["error", reasons[1], *["error"] * 10, reasons[1]]
    assert text_of(outputs[1]) == text_of(outputs[-1]) == text


@pytest.mark.parametrize("option", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_what_would_read_the_prefix_as_text_is_refused(llm, sides, expected, option):
    written, text = expected[0]
    (output,) = ask(llm, [written], stop_ids(sides), **option)
    assert output.outputs[0].finish_reason == "error"
    (after,) = ask(llm, [written], stop_ids(sides))
    assert text_of(after) == text


def test_a_file_that_is_gone_or_damaged_fails_its_requests_alone(llm, sides, expected):
    side = sides["one"]
    path = side.engine.store.path(side.chunks[0].chunk_id)
    content = path.read_bytes()
    written = [it for it, _ in expected]
    touched = [
        any(ref.chunk_id == path.stem and ref.ratio == 1 for ref in it.refs) for it in written
    ]
    assert any(touched)
    assert not all(touched)
    for damage in (None, content[:-1], b""):
        llm.reset_prefix_cache()
        path.unlink(missing_ok=True)
        if damage is not None:
            path.write_bytes(damage)
        outputs = ask(llm, written, stop_ids(sides))
        for output, is_touched, (_, text) in zip(outputs, touched, expected, strict=True):
            if is_touched:
                assert output.outputs[0].finish_reason == "error"
            else:
                assert text_of(output) == text
    path.write_bytes(content)
    outputs = ask(llm, written, stop_ids(sides))
    assert [text_of(it) for it in outputs] == [text for _, text in expected]
