"""CacheBlend against a second path: a whole pass whose unchosen rows are overwritten in every layer."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.cache_utils import Cache, DynamicLayer

from coinrag_integrations.engine.hf_partial import blend
from coinrag_integrations.errors import UnsupportedModelError
from coinrag_integrations.evaluation.rivals import Kitchen
from tests.evaluation.rivals.parts import ANSWER, compose, logits, same, task_of
from tests.tiny import supported_model

FAMILIES = ["llama", "qwen3", "gemma3", "cohere", "gpt-neox", "smollm3", "llama-yarn"]


class _Merged(DynamicLayer):
    """Shows every row what it would see if only the chosen ones had been computed."""

    def __init__(self, cached: torch.Tensor, first: int, shared: dict, index: int) -> None:
        super().__init__()
        self.cached, self.first, self.shared, self.index = cached, first, shared, index
        self.is_initialized = True

    def update(self, key_states, value_states, *_, **__):
        stop = self.cached.shape[-2]
        fresh = torch.stack((key_states, value_states))  # [2, 1, H, T, D]
        if self.index == 1:
            change = fresh[1, 0, :, self.first : stop] - self.cached[1, 0, :, self.first :]
            order = change.square().sum((0, 2)).argsort(descending=True)
            self.shared["stale"] = self.first + order[self.shared["n"] :]
        if self.index >= 2:
            stale = self.shared["stale"]
            fresh[..., stale, :] = self.cached[..., stale, :]
        return fresh[0], fresh[1]

    def get_seq_length(self, *_, **__):
        return 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.3, 0.9])
def test_rows_that_are_not_chosen_keep_their_entries(family, ratio):
    kitchen = Kitchen(supported_model(family))
    model, task = kitchen.model, task_of(kitchen)
    ids = [i for chunk in task.chunks for i in chunk.token_ids]
    composed = compose(kitchen, "chunk-bos", task)
    n = composed.prefix.n_entries
    cached = composed.prefix.kv[..., :n, :].clone()
    shared = {"n": int(ratio * len(ids) + 1e-9)}
    layers = [_Merged(kv, len(task.head), shared, i) for i, kv in enumerate(cached)]
    name = (
        "cache" if "cache" in inspect.signature(model.hf.forward).parameters else "past_key_values"
    )
    whole = torch.tensor([[*task.head, *ids, *task.tail, *ANSWER]])
    with torch.no_grad():
        expected = model.hf(whole, use_cache=True, **{name: Cache(layers=layers)}).logits[0]
    found = logits(kitchen, f"cacheblend:{ratio}", task)
    same(found, expected[-len(ANSWER) - 1 : -1].float())
    assert shared["stale"].numel() == len(ids) - shared["n"]
    if ratio == 0 and all(window is None for window in model.layer_windows):
        assert (found - logits(kitchen, "chunk-bos", task)).abs().max() > 1e-4, "layers 0 and 1"


def test_the_more_is_computed_the_nearer_it_comes_to_full_prefill(model):
    kitchen = Kitchen(model)
    task = task_of(kitchen)
    full = logits(kitchen, "full", task)
    apart = [(logits(kitchen, f"cacheblend:{r}", task) - full).norm() for r in (0, 0.5, 1)]
    assert apart[0] > apart[1] > apart[2]


def test_models_without_a_list_of_layers_are_refused(model):
    broken = torch.nn.Module()
    broken.base_model = torch.nn.Module()
    with pytest.raises(UnsupportedModelError, match="no list"):
        blend(
            broken,
            torch.zeros(1, 1),
            torch.zeros(3, 2, 1, 2, 4, 16),
            None,
            {},
            n_cached=0,
            n_chosen=0,
            n=1,
        )
