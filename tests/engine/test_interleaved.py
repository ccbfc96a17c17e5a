"""Law: text anywhere between spans is computed as if the plan had been run gap by gap."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine import (
    Engine,
    EngineConfig,
    GenerationConfig,
    Text,
    generation,
    runner,
)
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.errors import BudgetError, ConfigError
from coinrag_integrations.types import SpanRef
from tests.tiny import SUPPORTED, fill, forward, placed, tiny_model

FEW = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
SIX = GenerationConfig(max_new_tokens=6)
texts = st.lists(st.integers(3, 511), max_size=6).map(lambda ids: Text(tuple(ids)))
spans = st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(1, 10))
questions = st.lists(st.integers(3, 511), min_size=1, max_size=6).map(tuple)


def gap_by_gap(engine: Engine, pieces: Sequence, answer: Sequence[int]) -> list[torch.Tensor]:
    """Logits before each token of `answer`, by the model's own passes, one piece after another."""
    model, past, at, logits = engine.model, transformers.DynamicCache(), 0, []
    for piece in [*pieces, *(Text((token,)) for token in answer[:-1])]:
        if isinstance(piece, SpanRef):
            chunk = engine.catalog.chunk(piece.chunk_id)
            entries = encode(model, [chunk.token_ids])[0][piece.start : piece.stop]
            kv = placed(model, entries, range(at, at + len(piece)))
            for layer, (keys, values) in enumerate(kv.unbind(0)):
                past.update(keys, values, layer)
        elif piece.ids:
            logits.append(forward(model.hf, piece.ids, past, at)[-1])
        at += len(piece)
    return logits[-len(answer) :]


def ours(engine: Engine, pieces: Sequence, monkeypatch) -> tuple[list[int], list[torch.Tensor]]:
    """The ids of the answer, and the logits before each of them."""
    seen: list[torch.Tensor] = []
    tokens: list[int] = []
    choose = generation._choose

    def spy(choosers, logits):
        seen.append(logits[0].clone())
        tokens.extend(choose(choosers, logits))
        return tokens[-1:]

    with monkeypatch.context() as patch:
        patch.setattr(generation, "_choose", spy)
        for _ in engine.stream_pieces(pieces, SIX):
            pass
    return tokens, seen


def check(engine: Engine, pieces: Sequence, monkeypatch) -> None:
    tokens, found = ours(engine, pieces, monkeypatch)
    for a, b in zip(found, gap_by_gap(engine, pieces, tokens), strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-5


@pytest.mark.parametrize("name", SUPPORTED)
def test_any_interleaving_equals_the_plan_run_gap_by_gap(name, engines, monkeypatch):
    engine, chunks = engines[name]

    @FEW
    @given(
        before=texts,
        parts=st.lists(st.one_of(texts, spans), min_size=1, max_size=6),
        question=questions,
    )
    def law(before, parts, question):
        pieces = [before]
        for part in parts:
            if isinstance(part, tuple):
                i, start, length = part
                part = SpanRef(chunks[i].chunk_id, start, min(start + length, len(chunks[i])))
            pieces.append(part)
        check(engine, [*pieces, Text(question)], monkeypatch)

    law()


@pytest.mark.parametrize("name", SUPPORTED)
def test_text_alone_is_a_plain_forward_pass(name, engines, monkeypatch):
    engine, _ = engines[name]
    ids = tuple(range(40, 90))
    tokens, found = ours(engine, [Text(ids[:20]), Text(()), Text(ids[20:])], monkeypatch)
    theirs = forward(engine.model.hf, [*ids, *tokens[:-1]])[len(ids) - 1 :]
    for a, b in zip(found, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral-windowed", "qwen2-mixed"])
def test_an_entry_outside_a_layers_window_is_invisible_to_it(name, engines, monkeypatch):
    """Plans far longer than the window of 24, with text in the middle of them."""
    engine, chunks = engines[name]
    pieces = [Text((5, 6)), chunks[0].ref(), Text((7, 8, 9)), chunks[1].ref(), Text((10, 11))]
    check(engine, [*pieces, chunks[2].ref(), Text((12, 13, 14))], monkeypatch)


def test_a_windowed_model_that_could_see_everything_would_answer_differently(engines, monkeypatch):
    engine, chunks = engines["mistral-windowed"]
    pieces = [chunks[0].ref(), chunks[1].ref(), Text((12, 13, 14))]
    _, found = ours(engine, pieces, monkeypatch)
    monkeypatch.setattr(
        runner,
        "visible",
        lambda rows, at, windows: {24: (at[:, :, None] >= rows[:, None])[:, None]},
    )
    _, all_seen = ours(engine, pieces, monkeypatch)
    assert (found[0] - all_seen[0]).abs().max() > 0.01 * found[0].abs().max()


def test_the_text_before_the_first_span_is_encoded_once(engines, monkeypatch):
    engine, chunks = engines["llama"]
    made = []
    cache = engine._prompts
    encode_head = cache.encode
    monkeypatch.setattr(cache, "encode", lambda ids: made.append(ids) or encode_head(ids))
    pieces = [Text((77, 78)), Text((79,)), chunks[0].ref(), Text((80, 81)), chunks[1].ref()]
    for question in ((5,), (6, 7), (5,)):
        stream = engine.stream_pieces([*pieces, Text(question)], SIX)
        list(stream)
        usage = stream.answer.usage
        assert usage.cached == 3 + len(chunks[0]) + len(chunks[1])
        assert usage.online == 2 + len(question)
    assert made == [(77, 78, 79)]


def test_the_same_spans_without_text_between_are_the_ordinary_answer(engines):
    engine, chunks = engines["llama"]
    refs = [chunk.ref() for chunk in chunks]
    tail = engine.prompt.tail("Who?")
    pieces = [Text(engine.prompt.head), *refs, Text(tail)]
    stream = engine.stream_pieces(pieces, SIX)
    list(stream)
    assert stream.answer.text == engine.answer("Who?", refs, SIX).text
    assert stream.answer.spans == tuple(refs)


@pytest.mark.parametrize("pieces", [[], [Text(())], [Text((1,)), SpanRef("a" * 32, 0, 1)]])
def test_there_must_be_text_to_go_on_after(engines, pieces):
    engine, _ = engines["llama"]
    with pytest.raises(ConfigError, match="the last piece must be text"):
        engine.stream_pieces(pieces)


def test_pieces_that_do_not_fit_are_refused(tmp_path):
    model = tiny_model(max_position_embeddings=64)
    with Engine(model, tmp_path, EngineConfig(chunk_tokens=32, coverage="all")) as engine:
        ref = fill(engine)[0].ref()
        with pytest.raises(BudgetError, match="budget of 64"):
            engine.stream_pieces([ref, Text((5,) * 40), Text((1,))], SIX)
        with pytest.raises(BudgetError, match="window of 64"):
            engine.stream_pieces([ref, Text((5,) * 25), Text((1, 2))], SIX)
        list(engine.stream_pieces([ref, Text((5,) * 25), Text((1,))], SIX))
