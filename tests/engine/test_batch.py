"""Law: questions asked together, behind prefixes of any length, get the answers they get alone."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.errors import BudgetError, ChunkNotFoundError, ConfigError
from coinrag_integrations.types import SpanRef
from tests.tiny import SUPPORTED

FEW = settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow])
words = st.sampled_from(["Who?", "When was it built, and by whom?", "x", "Where is it " * 4])
spans = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 30)), max_size=4)


def refs_of(chunks, parts) -> list[SpanRef]:
    return [
        SpanRef(chunks[i].chunk_id, start, min(start + length, len(chunks[i])))
        for i, start, length in parts
    ]


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_batch_gets_the_answers_of_one_by_one(name, engines):
    engine, chunks = engines[name]

    @FEW
    @given(
        asked=st.lists(st.tuples(words, spans), min_size=1, max_size=5),
        n_new=st.integers(1, 9),
    )
    def law(asked, n_new):
        generation = GenerationConfig(max_new_tokens=n_new)
        questions = [(question, refs_of(chunks, parts)) for question, parts in asked]
        together = engine.answer_batch(questions, generation)
        for answer, (question, refs) in zip(together, questions, strict=True):
            alone = engine.answer(question, refs, generation)
            assert answer.text == alone.text
            assert answer.finish_reason == alone.finish_reason
            assert answer.spans == alone.spans
            assert answer.usage == alone.usage
            assert answer.timings.bytes_read == alone.timings.bytes_read

    law()


@pytest.mark.parametrize(
    "generation",
    [
        GenerationConfig(max_new_tokens=12, temperature=3.0, seed=5),
        GenerationConfig(max_new_tokens=12, temperature=1.0, top_k=3, seed=1),
        GenerationConfig(max_new_tokens=40, stop=("e", "q")),
    ],
    ids=["hot", "top-k", "stop"],
)
def test_sampling_and_stops_are_those_of_each_question_alone(engines, generation):
    engine, chunks = engines["llama"]
    refs = [chunk.ref() for chunk in chunks]
    questions = [("Who?", refs[:1]), ("When was it?", refs), ("Where?", [])]
    together = engine.answer_batch(questions, generation)
    alone = [engine.answer(question, refs, generation) for question, refs in questions]
    assert [a.text for a in together] == [a.text for a in alone]
    assert [a.finish_reason for a in together] == [a.finish_reason for a in alone]
    assert [a.usage for a in together] == [a.usage for a in alone]


def test_no_questions_get_no_answers(engines):
    assert engines["llama"][0].answer_batch([]) == []


def test_a_missing_chunk_is_recomputed_for_the_question_that_needs_it(engines):
    engine, chunks = engines["qwen2"]
    questions = [("Who?", [chunks[0].ref()]), ("When?", [chunks[1].ref(), chunks[2].ref()])]
    before = [a.text for a in engine.answer_batch(questions)]
    engine.store.delete(chunks[1].chunk_id)
    after = engine.answer_batch(questions)
    assert [a.text for a in after] == before
    assert [a.recomputed for a in after] == [(), (chunks[1].ref(),)]
    entries = [len(chunks[0]), len(chunks[2])]
    per_entry = engine.model.layout.bytes_per_entry
    assert [a.timings.bytes_read for a in after] == [n * per_entry for n in entries]


def test_one_bad_question_refuses_the_batch_before_anything_is_computed(engines):
    engine, chunks = engines["llama"]
    good = ("Who?", [chunks[0].ref()])
    with pytest.raises(ConfigError, match="empty"):
        engine.answer_batch([good, (" ", [])])
    with pytest.raises(BudgetError):
        engine.answer_batch([good, ("why " * 5000, [])])
    with pytest.raises(ChunkNotFoundError):
        engine.answer_batch([good, ("Who?", [SpanRef("0" * 32, 0, 3)])])
