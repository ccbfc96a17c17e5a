"""A chunk said again behind its slots: what is seen, what learns, and what it costs when it is off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.training import ReaderConfig, Sampler, train_reader
from coinrag_integrations.training.reconstruction import reconstruction
from coinrag_integrations.training.samples import Sample
from coinrag_integrations.training.slots import SlotLearner
from tests.tiny import HashEmbedder, dynamic_cache, forward, supported_model, tiny_model
from tests.training.parts import EXAMPLES
from tests.training.test_c2kv import SLOTS, sample_of

AGAIN = replace(SLOTS, reconstruction=0.5)


def samples_of(model: LoadedModel, *numbers: int) -> list[Sample]:
    sampler = Sampler.of(model, HashEmbedder(), SLOTS)
    return [sample_of(sampler, i) for i in numbers]


def again(learner: SlotLearner, samples: list[Sample]) -> torch.Tensor:
    kvs = [learner.composed(sample.kv) for sample in samples]
    return reconstruction(learner.reader.hf, samples, kvs, learner.base.layer_windows)


@pytest.mark.parametrize("family", ["llama", "qwen2", "smollm3", "gpt-neox"])
def test_it_is_what_the_model_says_behind_the_head_and_the_chunks_own_slots(family: str):
    """By the model's own pass, for every sample alone, with nothing of other chunks in sight."""
    model = supported_model(family)
    learner, samples = SlotLearner(model, AGAIN, model), samples_of(model, 3, 7, 12)
    assert max(len(sample.kv.chunks) for sample in samples) > 1
    with torch.no_grad():
        found = again(learner, samples)
    for sample, loss in zip(samples, found, strict=True):
        one = sample.kv
        ids = one.chunks[0]
        only = replace(one, chunks=one.chunks[:1], entries=one.entries[:1])
        n = len(one.head) + -(-len(ids) // one.ratio)
        with torch.no_grad():
            kv = learner.composed(replace(only, turns=one.turns[:n]))
        logits = forward(model.hf, ids, dynamic_cache(kv), one.turns[n - 1] + 1)
        expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


def test_gradients_flow_to_slots_and_nowhere_else():
    model, reader = tiny_model(), tiny_model(seed=1)
    learner = SlotLearner(model, AGAIN, reader)
    again(learner, samples_of(model, 3, 7)).sum().backward()
    assert learner.shared.grad.abs().max() > 0
    assert all(it.b.grad.abs().max() > 0 for it in list(learner.changes.values())[:-3])
    for other in (model, reader):
        assert not any(weight.requires_grad for weight in other.hf.parameters())


def test_slots_of_other_chunks_do_not_matter():
    model = tiny_model()
    learner = SlotLearner(model, AGAIN, model)
    (sample,) = samples_of(model, 12)
    assert len(sample.kv.chunks) > 1
    kv = learner.composed(sample.kv).detach().requires_grad_(True)
    reconstruction(model.hf, [sample], [kv], model.layer_windows).sum().backward()
    n = len(sample.kv.head) + -(-len(sample.kv.chunks[0]) // sample.kv.ratio)
    moved = kv.grad.abs().amax((0, 1, 2, 3, 5))
    assert (moved[:n] > 0).all()
    assert (moved[n:] == 0).all()


def test_it_is_added_with_its_weight_and_costs_a_pass_only_then():
    model = tiny_model()
    learner, samples = SlotLearner(model, AGAIN, model), samples_of(model, 3, 7)
    passes, found = [], []
    model.hf.register_forward_hook(lambda *_: passes.append(1))
    for weight, n_passes in ((0.0, 2), (0.5, 3)):  # the reader and its teacher, and once again
        learner.config = replace(SLOTS, reconstruction=weight)
        passes.clear()
        with torch.no_grad():
            found.append(learner.objective(samples))
        assert len(passes) == n_passes
    with torch.no_grad():
        extra = 0.5 * again(learner, samples)
    torch.testing.assert_close(found[0] + extra, found[1], rtol=1e-5, atol=1e-5)
    assert (extra > 0.1).all()


def test_a_few_steps_lower_it():
    model = tiny_model()
    learner, samples = SlotLearner(model, AGAIN, model), samples_of(model, 3, 7)
    optimiser = torch.optim.Adam(learner.weights, lr=5e-3)
    found = []
    for _ in range(12):
        loss = again(learner, samples).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(float(loss.detach()))
    assert found[-1] < 0.9 * found[0]


def test_chunks_of_one_token_have_nothing_to_be_said_again():
    model = tiny_model()
    learner, (sample, other) = SlotLearner(model, AGAIN, model), samples_of(model, 3, 7)
    n = len(sample.kv.head) + 1
    one = replace(
        sample.kv,
        chunks=(sample.kv.chunks[0][:1],),
        entries=(sample.kv.entries[0][:1],),
        turns=tuple(range(n)),
    )
    short = replace(sample, kv=one, rows=tuple(range(n)))
    with torch.no_grad():
        both, alone = again(learner, [short, other]), again(learner, [short])
        torch.testing.assert_close(both[1:], again(learner, [other]), rtol=1e-4, atol=1e-4)
    assert both[0] == alone == 0


def test_it_is_trained_and_noted(tmp_path: Path):
    model = tiny_model()
    config = replace(AGAIN, n_examples=8, n_held_out=2)
    report = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, config)
    assert np.isfinite(report.loss)
    assert "behind its slots: with weight 0.5" in (tmp_path / "MODEL_CARD.md").read_text()
    with pytest.raises(ConfigError, match="kind='c2kv'"):
        ReaderConfig(reconstruction=0.1)
    assert ReaderConfig.slot_recipe().reconstruction == 0
