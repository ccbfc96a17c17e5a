"""An extractor of slots learns, changes nothing else, and makes the slots that it was trained to make."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.c2kv import Extractor, SlotEncoder
from coinrag_integrations.engine.c2kv.extraction import placed
from coinrag_integrations.engine.c2kv.extractor import CONFIG_FILE
from coinrag_integrations.errors import BudgetError, ConfigError, ModelError
from coinrag_integrations.evaluation.rivals import Kitchen
from coinrag_integrations.training import ReaderConfig, Sampler, TrainingReport, train_reader
from coinrag_integrations.training.batches import losses
from coinrag_integrations.training.samples import Sample, Slots
from coinrag_integrations.training.slots import SlotLearner
from tests.evaluation.rivals.parts import compose
from tests.tiny import HashEmbedder, supported_model, tiny_model
from tests.training.parts import CONFIG, EXAMPLES

SLOTS = replace(
    CONFIG,
    kind="c2kv",
    context="chunks",
    ratios=(2, 4),
    learning_rate=0.02,
    n_examples=64,
    shuffle=1.0,
    kl_question=0.0,  # held out is the likelihood of answers alone
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def trained(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("c2kv")
    return folder, train_reader(model, EXAMPLES, HashEmbedder(), folder, SLOTS)


def sample_of(sampler: Sampler, i: int) -> Sample:
    return sampler.sample(EXAMPLES[i], Random(i))


def test_it_learns_and_leaves_the_model_alone(model: LoadedModel, trained):
    folder, report = trained
    assert report.held_out[report.best_step] < 0.95 * report.held_out[0]
    assert model.weights == tiny_model().weights
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.hf.parameters(), tiny_model().hf.parameters(), strict=True)
    )
    extractor = Extractor.load(folder, model)
    assert extractor.ratios == (2, 4)
    assert extractor.shared.abs().max() > 0
    card = (folder / "MODEL_CARD.md").read_text()
    assert "C2KV extractor for tiny" in card
    assert "in place of 2 or 4 tokens" in card


def test_what_was_saved_has_the_loss_that_was_held_out(model: LoadedModel, trained):
    """Merged into the weights and through the serving pass, not the one that learnt."""
    folder, report = trained
    encoder = SlotEncoder.of(model, Extractor.load(folder, model))
    sampler = Sampler.of(model, HashEmbedder(), SLOTS)
    held = [EXAMPLES[i] for i in Random(0).sample(range(60), 60)[:6]]
    found = []
    for i, it in enumerate(held):
        sample = sampler.sample(it, Random(i))
        slots = sample.kv
        assert isinstance(slots, Slots)
        made = encoder(slots.chunks, slots.ratio)
        kv = placed(model, torch.cat((slots.head, *made))[None], np.array([slots.turns]))
        with torch.no_grad():
            found.append(float(losses(model.hf, [sample], [kv], model.layer_windows)))
    assert sum(found) / 6 == pytest.approx(report.held_out[report.best_step], abs=1e-3)


def test_interrupted_it_goes_on_to_the_same(model: LoadedModel, trained, tmp_path: Path):
    def stop(report: TrainingReport) -> None:
        if report.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, SLOTS, on_progress=stop)
    report = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, SLOTS)
    assert report.held_out == trained[1].held_out
    assert Extractor.load(tmp_path, model).digest == Extractor.load(trained[0], model).digest


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2-mixed", "smollm3", "gpt-neox"])
def test_a_sample_is_what_is_served(family: str):
    """Rows, positions and slots are those of the method, for the same chunks in the same order."""
    model = supported_model(family)
    sampler = Sampler.of(model, HashEmbedder(), SLOTS)
    learner = SlotLearner(model, SLOTS, model)
    for i in (3, 12):
        sample = sample_of(sampler, i)
        slots = sample.kv
        assert isinstance(slots, Slots)
        task, kitchen = sampler.retrieve(EXAMPLES[i]), Kitchen(model)
        by_ids = {chunk.token_ids: chunk for chunk in task.chunks}
        task = replace(task, chunks=tuple(by_ids[ids] for ids in slots.chunks))
        prefix = compose(kitchen, f"c2kv:{slots.ratio}", task).prefix
        (plan,) = prefix.plans
        assert sample.rows == tuple(plan.positions().tolist())
        assert sample.at[0] == plan.n_rows == len(sample.rows)
        assert sample.ids[: len(task.tail)] == task.tail
        with torch.no_grad():
            found, whole = learner.composed(slots), learner.whole(slots)
        n = prefix.n_entries
        torch.testing.assert_close(found, prefix.kv[..., :n, :], rtol=1e-4, atol=1e-4)
        raw = compose(kitchen, "chunk", task).prefix
        expected = raw.kv[..., : raw.n_entries, :]
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)


def test_samples_vary_in_number_order_and_ratio_and_are_the_same_again(model: LoadedModel):
    sampler = Sampler.of(model, HashEmbedder(), SLOTS)
    found = [sample_of(sampler, i) for i in range(16)]
    assert {sample.kv.ratio for sample in found} == {2, 4}
    assert len({len(sample.kv.chunks) for sample in found}) > 1
    assert [s.kv.chunks for s in found] == [sample_of(sampler, i).kv.chunks for i in range(16)]
    short = Sampler.of(model, HashEmbedder(), replace(SLOTS, max_tokens=20))
    with pytest.raises(BudgetError, match="exceed 20"):
        sample_of(short, 0)


def test_gradients_reach_what_is_trained_and_nothing_else(model: LoadedModel):
    reader = tiny_model(seed=1)
    learner = SlotLearner(model, SLOTS, reader)
    sampler = Sampler.of(model, HashEmbedder(), SLOTS)
    samples = [sample_of(sampler, i) for i in (3, 7)]
    learner.objective(samples).sum().backward()
    assert learner.shared.grad.abs().max() > 0
    assert all(it.b.grad.abs().max() > 0 for it in list(learner.changes.values())[:-3])
    for other in (model, reader):
        assert not any(weight.requires_grad for weight in other.hf.parameters())


@pytest.mark.parametrize("name", ["kl", "kl_question"])
def test_the_objective_is_the_loss_and_the_distance_from_the_teacher(model: LoadedModel, name: str):
    sampler = Sampler.of(model, HashEmbedder(), SLOTS)
    samples = [sample_of(sampler, i) for i in (3, 7, 21)]
    plain, taught, twice = (
        SlotLearner(model, replace(SLOTS, **{"kl": 0.0, name: weight}), model)
        for weight in (0.0, 1.0, 2.0)
    )
    with torch.no_grad():
        loss, one, two = (it.objective(samples) for it in (plain, taught, twice))
        alone = torch.cat([taught.objective([sample]) for sample in samples])
        torch.testing.assert_close(loss, taught.losses(samples))
    assert ((one - loss) > 0).all()
    torch.testing.assert_close(two - one, one - loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-4)


def test_an_objective_without_weight_is_not_computed_and_the_others_are_as_they_were(
    model: LoadedModel,
):
    """Any of them may be the only one."""
    every = replace(SLOTS, ce=0.5, kl=1.0, kl_question=2.0, reconstruction=3.0)
    samples = [sample_of(Sampler.of(model, HashEmbedder(), SLOTS), i) for i in (3, 7)]
    weights = ("ce", "kl", "kl_question", "reconstruction")
    with torch.no_grad():
        terms = SlotLearner(model, every, model).terms(samples)
        assert set(terms) == set(weights)
        total = sum(getattr(every, name) * terms[name] for name in weights)
        whole = SlotLearner(model, every, model).objective(samples)
        torch.testing.assert_close(whole, total, rtol=1e-5, atol=1e-5)
        for name in weights:
            config = replace(every, **{**dict.fromkeys(weights, 0.0), name: 1.0})
            learner = SlotLearner(model, config, model)
            assert set(learner.terms(samples)) == {name}
            torch.testing.assert_close(
                learner.objective(samples), terms[name], rtol=1e-4, atol=1e-4
            )


def test_a_bf16_model_is_trained_and_read_by_its_reader(tmp_path: Path):
    model, reader = (tiny_model(dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
    reader = replace(reader, adapter="of a test")
    config = replace(SLOTS, n_examples=8, n_held_out=2, init="eos", at_once=2)
    report = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, config, reader=reader)
    assert report.step == 2
    extractor = Extractor.load(tmp_path, model)
    assert extractor.init == "eos"
    assert {a.dtype for a, _ in extractor.pairs.values()} == {torch.bfloat16}
    assert '"adapter": "of a test"' in (tmp_path / CONFIG_FILE).read_text()


def test_slots_need_whole_chunks_and_ratios():
    for wrong in ({"context": "spans"}, {"ratios": ()}, {"ratios": (0,)}):
        with pytest.raises(ConfigError):
            replace(SLOTS, **wrong)
    with pytest.raises(ConfigError, match="nothing is taught"):
        replace(SLOTS, ce=0.0, kl=0.0, kl_question=0.0)
    with pytest.raises(ConfigError, match="ce are of slots"):
        ReaderConfig(ce=0.5)
    for name in ("ce", "kl", "kl_question", "reconstruction", "overlap"):
        with pytest.raises(ConfigError, match=f"{name}=-1.0"):
            replace(SLOTS, **{name: -1.0})
    with pytest.raises(ConfigError, match="init is 'first'"):
        replace(SLOTS, init="first")
    recipe = ReaderConfig.slot_recipe((4, 8), 100)
    assert (recipe.kind, recipe.ratios, recipe.context) == ("c2kv", (4, 8), "chunks")


def test_kept_entries_train_the_same_extractor(model: LoadedModel, trained, tmp_path: Path):
    """Encoded once, read the second time; a file that cannot be trusted is encoded again."""
    cache = tmp_path / "cache"
    for turn in ("first", "second"):
        folder = tmp_path / turn
        train_reader(model, EXAMPLES, HashEmbedder(), folder, SLOTS, cache=cache)
        digest = Extractor.load(folder, model).digest
        assert digest == Extractor.load(trained[0], model).digest
        files = sorted(cache.rglob("*.safetensors"))
        assert files
        if turn == "first":
            written = {path: path.stat().st_mtime_ns for path in files}
            data = bytearray(files[0].read_bytes())
            data[-40] ^= 1
            files[0].write_bytes(data)
            written[files[0]] = 0
    again = {path for path in files if path.stat().st_mtime_ns != written[path]}
    assert again == {files[0]}


def test_a_ratio_that_is_drawn_more_often_is_named_once(model: LoadedModel, tmp_path: Path):
    config = replace(SLOTS, ratios=(4, 2, 4), n_examples=8)
    train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, config)
    assert Extractor.load(tmp_path, model).ratios == (2, 4)
    assert "in place of 2 or 4 tokens" in (tmp_path / "MODEL_CARD.md").read_text()


@pytest.mark.parametrize("copies", [False, True])
def test_a_training_starts_where_another_one_ended(
    model: LoadedModel, tmp_path: Path, copies: bool
):
    config = replace(SLOTS, copies=copies, n_examples=16)
    first = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path / "a", config)
    done = Extractor.load(tmp_path / "a", model)
    other = replace(config, alpha=4 * config.alpha, n_examples=8)
    second = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path / "b", other, start=done)
    assert json.loads((tmp_path / "b" / CONFIG_FILE).read_text())["start"] == done.digest
    assert first.held_out[first.best_step] < first.held_out[0]
    assert second.held_out[0] == pytest.approx(first.held_out[first.best_step], abs=1e-4)
    again = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path / "b", other, start=done)
    assert again.step == second.step
    with pytest.raises(ConfigError, match="from another start"):
        train_reader(model, EXAMPLES, HashEmbedder(), tmp_path / "b", other)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"rank": 3}, ModelError, "another rank"),
        ({"copies": True}, ModelError, "copies where"),
        ({"init": "mean"}, ModelError, "another init"),
        ({"kind": "lora"}, ConfigError, "leave it out"),
    ],
)
def test_a_start_that_is_another_kind_is_refused(
    model: LoadedModel, trained, tmp_path: Path, change: dict, error: type[Exception], says: str
):
    done = Extractor.load(trained[0], model)
    with pytest.raises(error, match=says):
        train_reader(
            model, EXAMPLES, HashEmbedder(), tmp_path, replace(SLOTS, **change), start=done
        )


def test_slots_that_see_tokens_before_their_blocks_are_served_as_they_are_trained(
    model: LoadedModel, tmp_path: Path
):
    config = replace(SLOTS, overlap=3, n_examples=16)
    learner = SlotLearner(model, config, model)
    learner.save(tmp_path, {})
    extractor = Extractor.load(tmp_path, model)
    assert extractor.overlap == 3
    slots = sample_of(Sampler.of(model, HashEmbedder(), config), 1).kv
    assert isinstance(slots, Slots)
    made = SlotEncoder.of(model, extractor)(slots.chunks, slots.ratio, slots.entries)
    served = placed(model, torch.cat((slots.head, *made))[None], np.array([slots.turns]))
    assert torch.allclose(learner.composed(slots), served, atol=1e-5)
