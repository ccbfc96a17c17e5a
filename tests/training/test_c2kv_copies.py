"""Whole copies of the projections: they begin as the model's, learn in fp32, and are served as trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.c2kv import Extractor, SlotEncoder
from coinrag_integrations.engine.c2kv.extractor import projections
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.training import ReaderConfig, Sampler, train_reader
from coinrag_integrations.training.samples import Sample
from coinrag_integrations.training.slots import SlotLearner
from tests.tiny import HashEmbedder, supported_model, tiny_model
from tests.training.parts import EXAMPLES
from tests.training.test_c2kv import SLOTS, sample_of

COPIES = replace(SLOTS, copies=True)
IDS = list(range(9, 40))


def samples_of(model: LoadedModel) -> list[Sample]:
    sampler = Sampler.of(model, HashEmbedder(), COPIES)
    return [sample_of(sampler, i) for i in (3, 7)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt-neox"])
def test_untrained_copies_make_the_slots_of_untrained_changes(family: str, tmp_path: Path):
    """To the bit: where they are learnt, and after they were saved."""
    model, made = supported_model(family), []
    (sample, _) = samples_of(model)
    for config in (SLOTS, COPIES):
        learner = SlotLearner(model, config, model)
        with torch.no_grad():
            learnt = learner.composed(sample.kv)
        folder = tmp_path / str(config.copies)
        folder.mkdir()
        learner.save(folder, {})
        encoder = SlotEncoder.of(model, Extractor.load(folder, model))
        made.append((learnt, encoder([IDS], 4)[0]))
    for changed, copied in zip(*made, strict=True):
        assert torch.equal(changed, copied)
    own = {
        f"{name}.{part}"
        for name, layer in projections(model).items()
        for part, _ in layer.named_parameters()
    }
    assert Extractor.load(folder, model).copies.keys() == own


def test_they_learn_and_leave_the_model_alone(tmp_path: Path):
    model = tiny_model()
    report = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, COPIES)
    assert report.held_out[report.best_step] < 0.95 * report.held_out[0]
    assert model.weights == tiny_model().weights
    for ours, theirs in zip(model.hf.parameters(), tiny_model().hf.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    extractor, own = Extractor.load(tmp_path, model), dict(model.hf.named_parameters())
    assert not extractor.pairs
    same = {name for name, it in extractor.copies.items() if torch.equal(it, own[name])}
    assert same == {"model.layers.2.self_attn.q_proj.weight"}  # nobody reads what slots see there
    assert "Whole copies of the projections" in (tmp_path / "MODEL_CARD.md").read_text()


def test_gradients_reach_copies_and_biases():
    model = supported_model("qwen2")
    learner = SlotLearner(model, COPIES, model)
    learner.objective(samples_of(model)).sum().backward()
    copies = list(learner.changes.items())[:-3]  # of the last layer, queries have none
    for name, copied in copies:
        for part, weight in copied.named_parameters():
            assert weight.grad.abs().max() > 0, (name, part)
    assert not any(weight.requires_grad for weight in model.hf.parameters())


def test_masters_are_fp32_and_take_steps_that_bf16_would_lose(tmp_path: Path):
    model = tiny_model(dtype=torch.bfloat16)
    learner = SlotLearner(model, COPIES, model)
    assert {weight.dtype for weight in learner.weights} == {torch.float32}
    copied, *_ = learner.changes.values()
    before = copied.weight.detach().clone()
    optimiser = torch.optim.SGD(learner.weights, lr=1e-4)
    for step in range(1, 41):
        copied.weight.grad = before.clone()  # a step is a ten-thousandth of each weight
        optimiser.step()
        assert not torch.equal(copied.weight, before)
        if step in (1, 40):
            assert torch.equal(copied.weight.bfloat16(), before.bfloat16()) == (step == 1)
    assert {weight.dtype for weight in learner.composed(samples_of(model)[0].kv)} == {
        torch.bfloat16
    }
    learner.save(tmp_path, {})
    copies = Extractor.load(tmp_path, model).copies
    assert {it.dtype for it in copies.values()} == {torch.bfloat16}


def test_copies_are_of_slots_and_have_a_rate_of_their_own():
    with pytest.raises(ConfigError, match="kind='c2kv'"):
        ReaderConfig(copies=True)
    whole, low = ReaderConfig.slot_recipe(copies=True), ReaderConfig.slot_recipe()
    assert (whole.copies, whole.learning_rate) == (True, 5e-5)
    assert (low.copies, low.learning_rate) == (False, 1e-3)
