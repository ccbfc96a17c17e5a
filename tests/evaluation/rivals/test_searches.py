"""Searches and numbers of nuggets: what a method works on, and what the papers took away."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from coinrag_integrations.engine.plan import arrange
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.codecs import rank_spans
from coinrag_integrations.evaluation.rivals import (
    ABLATIONS,
    METHODS,
    Kitchen,
    make_task,
    parse_method,
    swept,
)
from tests.evaluation.rivals.parts import EXAMPLE, chunks_of, compose, logits, same, task_of
from tests.tiny import HashEmbedder, placed


@dataclass(frozen=True)
class LastLetters:
    """A reranker: texts in the reverse of their order in the alphabet."""

    name: str = "last-letters"

    def score(self, question: str, texts: list[str]) -> list[float]:
        assert question.endswith("?")
        order = sorted(texts)
        return [order.index(text) / len(order) for text in texts]


@pytest.fixture(scope="module")
def kitchen(model) -> Kitchen:
    return Kitchen(model)


@pytest.mark.parametrize("n", [1, 3, 99])
@pytest.mark.parametrize("name", ["spans", "text", "isolated"])
def test_a_number_takes_so_many_nuggets(kitchen, name, n):
    several = task_of(kitchen, n_nuggets=n)
    other = task_of(kitchen, n_nuggets=5)
    found, expected = compose(kitchen, f"{name}:{n}", other), compose(kitchen, name, several)
    assert found.prefix.plans == expected.prefix.plans
    same(logits(kitchen, f"{name}:{n}", other), logits(kitchen, name, several))


def test_one_stage_takes_the_nearest_nuggets_of_all_chunks(kitchen):
    chunks = chunks_of(kitchen.model)
    for n in (1, 3, 7):
        task = task_of(kitchen, search="one-stage", n_chunks=1, n_nuggets=n)
        best = rank_spans(EXAMPLE.question, chunks, HashEmbedder())[:n]
        assert task.spans == tuple(arrange(best))
        assert {c.chunk_id for c in task.chunks} == {ref.chunk_id for ref in best}
        assert [ref for ref in task.ranked if ref in best] == best


def test_searches_agree_where_all_chunks_are_looked_at(kitchen):
    two = task_of(kitchen, search="two-stage", n_chunks=99)
    assert task_of(kitchen, search="one-stage").spans == two.spans
    narrow = task_of(kitchen, search="two-stage", n_chunks=1, n_nuggets=99)
    assert {ref.chunk_id for ref in narrow.spans} == {narrow.chunks[0].chunk_id}


def test_a_reranker_orders_chunks_and_then_nuggets(kitchen):
    chunks = chunks_of(kitchen.model)
    task = task_of(kitchen, search="reranked", n_chunks=2, n_nuggets=2, reranker=LastLetters())
    assert [c.text for c in task.chunks] == sorted((c.text for c in chunks), reverse=True)[:2]
    texts = {c.ref(n.span): n.text for c in chunks for n in c.nuggets}
    ranked = [texts[ref] for ref in task.ranked]
    assert ranked == sorted(ranked, reverse=True)
    assert task.spans == tuple(arrange(task.ranked[:2]))


def test_a_reranker_takes_chunks_without_nuggets_too(kitchen):
    chunks = [replace(chunk, nuggets=()) for chunk in chunks_of(kitchen.model)]
    task = make_task(
        EXAMPLE.question,
        chunks,
        kitchen.prompt,
        HashEmbedder(),
        n_chunks=3,
        n_nuggets=1,
        search="reranked",
        reranker=LastLetters(),
    )
    assert set(task.spans) == {chunk.ref() for chunk in task.chunks}
    with pytest.raises(ConfigError, match="needs a reranker"):
        task_of(kitchen, search="reranked")


def test_unaligned_keys_stay_where_they_were_in_their_chunks(kitchen):
    task = task_of(kitchen)
    composed = compose(kitchen, "spans-unaligned", task)
    row = len(task.head)
    for ref in task.spans:
        entries = kitchen.entries(task.chunk_of(ref))[ref.start : ref.stop]
        expected = placed(kitchen.model, entries, range(ref.start, ref.stop))
        same(composed.prefix.kv[..., row : row + len(ref), :], expected)
        row += len(ref)
    assert composed.prefix.plans[0].length == row, "the question stands behind all of them"
    assert any(ref.start for ref in task.spans)


def test_unaligned_whole_chunks_are_naive_ones(kitchen):
    task = task_of(kitchen)
    whole = replace(task, spans=tuple(chunk.ref() for chunk in task.chunks))
    same(logits(kitchen, "spans-unaligned", whole), logits(kitchen, "naive", task))


def test_ablations_are_methods_of_their_own():
    assert [(m.search, m.is_adapted) for m in ABLATIONS.values()] == [
        ("one-stage", True),
        ("two-stage", True),
        ("two-stage", False),
    ]
    assert all(parse_method(name) is method for name, method in ABLATIONS.items())
    assert not set(ABLATIONS) & set(METHODS)


def test_a_sweep_tries_several_numbers_of_each_method_that_has_one():
    names = swept(["full", "spans", "cacheblend", "spans:5"])
    assert names == [
        *("full", "spans", "spans:2", "spans:5", "spans:10", "spans:20"),
        *("cacheblend", "cacheblend:0.05", "cacheblend:0.16", "cacheblend:0.3"),
    ]
    everything = swept(list(METHODS))
    assert len(set(everything)) == len(everything)
    for name in everything:
        parse_method(name)
    assert swept(["legolink:7"]) == ["legolink:7"]


def test_nearest_is_the_arranged_best(kitchen):
    task = task_of(kitchen, n_nuggets=4)
    assert task.nearest() == task.spans == task.nearest(4)
    counts = [sum(map(len, task.nearest(n))) for n in range(1, 9)]
    assert counts == sorted(counts)
