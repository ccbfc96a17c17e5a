"""Slots of chunks in one prefix: where they stand, in which order, and which extractor makes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coinrag_integrations.engine.c2kv import Extractor, SlotEncoder
from coinrag_integrations.errors import ModelError
from coinrag_integrations.evaluation.compare import compare
from coinrag_integrations.evaluation.rivals import Kitchen
from coinrag_integrations.types import Chunk
from tests.engine.c2kv.parts import trained
from tests.evaluation.rivals.parts import EXAMPLE, compose, logits, same, task_of
from tests.evaluation.test_compare import CONFIG, lines
from tests.tiny import HashEmbedder, placed, supported_model, tiny_model


@pytest.fixture(scope="module")
def kitchen() -> Kitchen:
    return Kitchen(supported_model("llama"))


def long_chunk(template: Chunk, n_tokens: int, seed: int) -> Chunk:
    ids = tuple(3 + (seed * i) % 500 for i in range(n_tokens))
    return replace(
        template,
        chunk_id=f"long-{seed}",
        token_ids=ids,
        offsets=tuple((i, i + 1) for i in range(n_tokens)),
        text="x" * n_tokens,
        nuggets=(),
    )


def test_positions_count_the_original_lengths(kitchen: Kitchen):
    """A document of 400 tokens has its slots at 3, 7, … 399; the next one's first stands at 403."""
    task = task_of(kitchen)
    first, second = (long_chunk(task.chunks[0], n, seed) for n, seed in ((400, 7), (50, 11)))
    task = replace(task, chunks=(first, second))
    prefix = compose(kitchen, "c2kv:4", task).prefix
    (plan,) = prefix.plans
    n_head, shift = len(task.head), plan.length - plan.n_rows
    assert plan.length == n_head + 450
    assert plan.n_entries == n_head + 100 + 13
    at = [*range(3, 400, 4), *range(403, 450, 4), 449]
    made = kitchen.slots([first.token_ids, second.token_ids], 4)
    expected = placed(kitchen.model, torch.cat(made), [n_head + it - shift for it in at])
    same(prefix.kv[..., n_head : plan.n_entries, :], expected)


def test_any_order_reuses_the_same_entries(kitchen: Kitchen):
    task = task_of(kitchen)
    a, b = task.chunks[:2]
    made = {}
    for order in ((a, b), (b, a)):
        prefix = compose(kitchen, "c2kv", replace(task, chunks=order)).prefix
        n, start, row = len(task.head), len(task.head), len(task.head)
        shift = prefix.plans[0].length - prefix.plans[0].n_rows
        for chunk in order:
            slots = kitchen.offline((chunk.chunk_id, "c2kv", 4), lambda: pytest.fail("made anew"))
            assert made.setdefault(chunk.chunk_id, slots) is slots
            at = [start - shift + min(i + 3, len(chunk) - 1) for i in range(0, len(chunk), 4)]
            found = prefix.kv[..., row : row + len(slots), :]
            same(found, placed(kitchen.model, slots, at))
            start, row = start + len(chunk), row + len(slots)
        assert row - n == sum(-(-len(chunk) // 4) for chunk in order)


def test_a_hybrid_is_the_best_chunk_raw_and_the_rest_in_slots(kitchen: Kitchen):
    task = task_of(kitchen)
    one = replace(task, chunks=task.chunks[:1])
    same(logits(kitchen, "hybrid", one), logits(kitchen, "chunk", one))
    n, first = len(task.head), task.chunks[0]
    prefix = compose(kitchen, "hybrid:8", task).prefix
    shift = prefix.plans[0].length - prefix.plans[0].n_rows
    raw = placed(kitchen.model, kitchen.entries(first), range(n - shift, n - shift + len(first)))
    same(prefix.kv[..., n : n + len(first), :], raw)
    none = replace(task, chunks=())
    for method in ("hybrid", "c2kv"):
        same(logits(kitchen, method, none), logits(kitchen, "none", none))


def test_the_kitchens_extractor_makes_the_slots():
    model = supported_model("qwen3")
    plain, own = Kitchen(model), Kitchen(model, extractor=trained(model))
    task = task_of(plain)
    for method in ("c2kv", "hybrid"):
        assert (logits(plain, method, task) - logits(own, method, task)).abs().max() > 1e-2
    for method in ("chunk", "strided", "spans", "c2kv-untrained"):
        assert torch.equal(logits(plain, method, task), logits(own, method, task))
    same(logits(own, "c2kv-untrained", task), logits(plain, "c2kv", task))
    chunk = task.chunks[0]
    made = SlotEncoder.of(model, trained(model))([chunk.token_ids], 4)[0]
    same(own.offline((chunk.chunk_id, "c2kv", 4), lambda: pytest.fail("made anew")), made)
    with pytest.raises(ModelError, match="other weights"):
        Kitchen(tiny_model(seed=1), extractor=trained(model))


def test_results_depend_on_the_extractor_only_if_there_is_one(tmp_path):
    model = tiny_model()

    def measure(extractor: Extractor | None):
        data, methods = {"a": (EXAMPLE,)}, ("chunk", "c2kv")
        options = {"extractor": extractor}
        return compare(model, data, methods, HashEmbedder(), tmp_path, CONFIG, **options)["a"]

    before, after = measure(None), measure(trained(model))
    assert len({row["settings"] for row in lines(tmp_path)}) == 2
    assert before["chunk"][0].nll == pytest.approx(after["chunk"][0].nll, abs=1e-6)
    assert before["c2kv"][0].nll != pytest.approx(after["c2kv"][0].nll, abs=1e-3)
    measure(trained(model))
    assert len(lines(tmp_path)) == 4
