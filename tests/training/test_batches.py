"""Losses of several samples in one pass, and of entries that are composed in the graph."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.links import line_breaks, with_links
from coinrag_integrations.evaluation.rivals.spans import spans
from coinrag_integrations.training import Sample, Sampler
from coinrag_integrations.training.batches import composed, losses
from coinrag_integrations.training.samples import Source
from tests.tiny import HashEmbedder, supported_model
from tests.training.parts import CONFIG, EXAMPLES

FAMILIES = ["llama", "gemma2", "qwen2-mixed", "mistral-windowed", "cohere"]


def samples_of(model: LoadedModel, reader: LoadedModel | None = None, **options) -> list[Sample]:
    sampler = Sampler.of(model, HashEmbedder(), replace(CONFIG, **options), reader=reader)
    found = []
    for i in (3, 12, 25, 41):
        wanted = replace(EXAMPLES[i], question=EXAMPLES[i].question + " In short?" * (i % 3))
        found.append(sampler.sample(wanted, Random(i)))
    assert len({len(sample) for sample in found}) > 1
    return found


def gradients(model: LoadedModel, samples: list[Sample], size: int) -> list[torch.Tensor]:
    """The losses of samples, so many at once, and the gradients of their sum."""
    weights = list(model.hf.parameters())
    for weight in weights:
        weight.requires_grad_(True)
        weight.grad = None
    found = []
    for first in range(0, len(samples), size):
        part = samples[first : first + size]
        kvs = [composed(model, s.kv) if isinstance(s.kv, Source) else s.kv for s in part]
        each = losses(model.hf, part, kvs, model.layer_windows)
        each.sum().backward()
        found.append(each.detach())
    grads = [w.grad.clone() for w in weights if w.grad is not None]
    for weight in weights:
        weight.requires_grad_(False)
        weight.grad = None
    return [torch.cat(found), *grads]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("context", ["spans", "text", "chunks"])
def test_a_pass_over_several_is_each_alone(family: str, context: str):
    model = supported_model(family)
    samples = samples_of(model, context=context)
    one, all_of_them = gradients(model, samples, 1), gradients(model, samples, 4)
    for a, b in zip(one, all_of_them, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_links_between_chunks_are_seen_from_behind_them_alone():
    model = supported_model("llama")
    reader = with_links(model, line_breaks(model, 2))
    samples = samples_of(model, reader, kind="links", context="chunks", n_links=2)
    assert not any(sample.is_plain for sample in samples)
    one, all_of_them = gradients(reader, samples, 1), gradients(reader, samples, 4)
    for a, b in zip(one, all_of_them, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for sample in samples:
        assert sorted((*sample.rows, *sample.at)) == list(range(len(sample)))


@pytest.mark.parametrize("family", [*FAMILIES, "smollm3", "llama-yarn", "phi4-mini"])
def test_what_is_composed_in_the_graph_is_what_is_served(family: str):
    model = supported_model(family)
    config = replace(CONFIG, shuffle=0.0)
    sampler = Sampler.of(model, HashEmbedder(), replace(config, kind="full"))
    sample = sampler.sample(EXAMPLES[7], Random(0))
    prefix = spans(sampler.kitchen, sampler.retrieve(EXAMPLES[7])).prefix
    assert isinstance(sample.kv, Source)
    with torch.no_grad():
        found = composed(model, sample.kv)
    assert len(sample.kv) == prefix.n_entries
    torch.testing.assert_close(found, prefix.kv[..., : prefix.n_entries, :], rtol=1e-4, atol=1e-4)


def test_gradients_flow_through_what_was_encoded():
    model = supported_model("llama")
    (sample, *_) = samples_of(model, kind="full")
    through = gradients(model, [sample], 1)
    with torch.no_grad():
        kv = composed(model, sample.kv)
    behind = gradients(model, [replace(sample, kv=kv)], 1)
    torch.testing.assert_close(through[0], behind[0])
    assert not all(torch.allclose(a, b) for a, b in zip(through, behind, strict=True))
