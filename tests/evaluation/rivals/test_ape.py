"""APE's attention in two parts: plain attention where both numbers are 1, and by plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from coinrag_integrations.engine.hf_partial import _two_parts, attention_apart
from coinrag_integrations.errors import UnsupportedModelError
from coinrag_integrations.evaluation.rivals import Kitchen
from coinrag_integrations.evaluation.rivals.task import Apart
from tests.evaluation.rivals.parts import compose, logits, plain, same, task_of
from tests.tiny import supported_model, tiny_model

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "cohere", "gpt-neox", "granite", "llama-yarn"]


@pytest.mark.parametrize("family", FAMILIES)
def test_with_both_at_one_it_is_plain_attention(family):
    kitchen = Kitchen(supported_model(family))
    task = task_of(kitchen)
    for name in ("chunk", "ape:1"):
        composed = compose(kitchen, name, task)
        rows = slice(len(task.head), composed.prefix.n_entries)
        apart = Apart(rows=rows, temperature=1.0, scale=1.0)
        found = logits(kitchen, replace(composed, apart=apart), task)
        same(found, logits(kitchen, replace(compose(kitchen, name, task), apart=None), task))


def test_one_chunk_with_both_at_one_is_full_prefill(model):
    kitchen = Kitchen(model)
    task = task_of(kitchen, n_chunks=1)
    same(logits(kitchen, "ape:1", task), plain(model, task, task.chunks[0].token_ids))
    assert (logits(kitchen, "ape", task) - logits(kitchen, "ape:1", task)).abs().max() > 1e-3


def test_contexts_stand_side_by_side(model):
    kitchen = Kitchen(model)
    task = task_of(kitchen)
    plan = compose(kitchen, "ape", task).prefix.plans[0]
    p, longest = len(task.head), max(map(len, task.chunks))
    assert plan.length == p + longest
    assert {segment.position for segment in plan.segments} == {p}
    shift = plan.n_rows - plan.length
    assert plan.positions()[p : p + 3].tolist() == [p + shift, p + shift + 1, p + shift + 2]


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_parts_are_joined_by_their_sums(mask):
    torch.manual_seed(0)
    m, n, d, rows, temperature, scale = 3, 7, 8, slice(2, 5), 0.8, 0.7
    query, key, value = torch.randn(1, 4, m, d), torch.randn(1, 2, n, d), torch.randn(1, 2, n, d)
    seen = torch.ones(m, n, dtype=torch.bool).tril(n - m)
    given = {
        "none": None,
        "bool": seen[None, None],
        "float": torch.zeros(m, n).masked_fill(~seen, torch.finfo().min)[None, None],
    }[mask]
    found, _ = _two_parts(rows, temperature, scale, torch.nn.Module(), query, key, value, given)
    for head in range(4):
        for i in range(m):
            parts = {True: [0.0, torch.zeros(d)], False: [0.0, torch.zeros(d)]}
            for j in range(n - m + i + 1):
                inside = rows.start <= j < rows.stop
                logit = float(query[0, head, i] @ key[0, head // 2, j]) / math.sqrt(d)
                weight = math.exp(logit / temperature if inside else logit)
                parts[inside][0] += weight
                parts[inside][1] = parts[inside][1] + weight * value[0, head // 2, j]
            power = {True: scale * temperature, False: 1.0}
            total = {k: s ** power[k] for k, (s, _) in parts.items()}
            expected = sum(total[k] * v / s for k, (s, v) in parts.items()) / sum(total.values())
            same(found[0, i, head], expected)


def test_a_part_without_rows_weighs_nothing():
    query, kv = torch.randn(1, 1, 2, 8), torch.randn(2, 1, 1, 5, 8)
    module = torch.nn.Module()
    empty, _ = _two_parts(slice(0, 0), 0.9, 0.9, module, query, *kv, None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *kv, attn_mask=torch.ones(2, 5, dtype=torch.bool).tril(3)
    )
    same(empty, expected.transpose(1, 2))


def test_the_models_own_attention_is_put_back(model):
    kitchen = Kitchen(model)
    task = task_of(kitchen)
    before = logits(kitchen, "chunk", task)
    with (
        pytest.raises(RuntimeError, match="stop"),
        attention_apart(model.hf, slice(0, 4), 0.5, 0.5),
    ):
        raise RuntimeError("stop")
    assert torch.equal(logits(kitchen, "chunk", task), before)


def test_models_with_another_attention_are_refused():
    model = tiny_model(attn_implementation="eager")
    kitchen = Kitchen(model)
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        logits(kitchen, "ape", task_of(kitchen))
