"""A reader adapter learns, is resumed exactly, and is served as it was trained."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from coinrag_integrations.engine import Engine, EngineConfig, LoadedModel, hf
from coinrag_integrations.engine.adapter import Adapter, with_adapter
from coinrag_integrations.engine.hf_training import logits_behind
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.training import Sampler, TrainingReport, mixed, train_reader
from tests.tiny import HashEmbedder, tiny_model
from tests.training.parts import CONFIG, EXAMPLES


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def trained(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("adapter")
    return folder, train_reader(model, EXAMPLES, HashEmbedder(), folder, CONFIG)


def test_it_learns_and_leaves_the_base_alone(model: LoadedModel, trained):
    folder, report = trained
    assert report.step == 24
    losses = report.held_out
    assert losses[report.best_step] < 0.8 * losses[0]
    assert model.weights == tiny_model().weights
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.hf.parameters(), tiny_model().hf.parameters(), strict=True)
    )
    assert Adapter.load(folder).base == (model.weights, "torch.float32")
    card = (folder / "MODEL_CARD.md").read_text()
    assert "Reader adapter for tiny" in card
    assert f"| {report.best_step} | {losses[report.best_step]:.3f} |" in card


def test_it_is_served_as_it_was_trained(model: LoadedModel, trained):
    folder, report = trained
    reader = with_adapter(model, Adapter.load(folder))
    sampler = Sampler.of(model, HashEmbedder(), CONFIG)
    held = [EXAMPLES[i] for i in Random(0).sample(range(60), 60)[:6]]
    losses = []
    for i, it in enumerate(held):
        sample = sampler.sample(it, Random(i))
        ids = torch.tensor([sample.ids])
        with torch.no_grad():
            logits = logits_behind(reader.hf, ids[:, :-1], sample.kv, sample.n_answer)
        losses.append(
            float(torch.nn.functional.cross_entropy(logits[0], ids[0, -sample.n_answer :]))
        )
    assert sum(losses) / 6 == pytest.approx(report.held_out[report.best_step], abs=1e-3)


def test_gradients_stay_behind_the_cached_part(model: LoadedModel):
    sample = Sampler.of(model, HashEmbedder(), CONFIG).sample(EXAMPLES[0], Random(0))
    before = sample.kv.clone()
    ids = torch.tensor([sample.ids])
    grads = model.hf.model.layers[0].self_attn.q_proj.weight
    grads.requires_grad_(True)
    try:
        logits_behind(model.hf, ids, sample.kv, 2).sum().backward()
        assert grads.grad is not None
    finally:
        grads.requires_grad_(False)
        grads.grad = None
    assert torch.equal(sample.kv, before)
    plain = hf.last_logits(
        model.hf,
        ids,
        hf.prefix_cache(torch.cat((sample.kv, torch.zeros_like(sample.kv)), 4), sample.kv.shape[4]),
        2,
    )
    with torch.no_grad():
        torch.testing.assert_close(logits_behind(model.hf, ids, sample.kv, 2), plain)


def test_an_interrupted_training_goes_on_to_the_same_weights(
    model: LoadedModel, trained, tmp_path: Path
):
    def stop(report: TrainingReport) -> None:
        if report.step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, CONFIG, on_progress=stop)
    report = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, CONFIG)
    assert report.held_out == trained[1].held_out
    assert Adapter.load(tmp_path).digest == Adapter.load(trained[0]).digest
    with pytest.raises(ConfigError, match="another config"):
        train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, replace(CONFIG, rank=2))


def test_the_twin_computes_the_same_tokens_as_text(model: LoadedModel):
    spans = Sampler.of(model, HashEmbedder(), replace(CONFIG, shuffle=0))
    text = Sampler.of(model, HashEmbedder(), replace(CONFIG, shuffle=0, context="text"))
    a, b = spans.sample(EXAMPLES[3], Random(0)), text.sample(EXAMPLES[3], Random(0))
    assert b.ids[-len(a.ids) :] == a.ids
    assert b.ids[: len(spans.kitchen.prompt.head)] == spans.kitchen.prompt.head
    assert a.kv.shape[4] + len(a.ids) == b.kv.shape[4] + len(b.ids)


def test_answers_come_from_the_adapter_and_kv_from_the_base(
    model: LoadedModel, trained, tmp_path: Path
):
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read")
    adapter = Adapter.load(trained[0])
    answers = {}
    for name, it in (("base", None), ("reader", adapter)):
        with Engine(model, tmp_path / name, config, adapter=it) as engine:
            chunks = engine.chunk(EXAMPLES[0].documents[0])
            for chunk, kv in engine.encode(chunks):
                engine.catalog.begin_document(chunk.document_id, "0" * 64, [chunk])
                engine.catalog.finish_document(chunk.document_id, "0" * 64)
                engine.store_chunk(chunk, kv)
            answers[name] = engine.answer(EXAMPLES[0].question, [c.ref() for c in chunks]).text
            digest = engine.fingerprint.digest
            stored = load_file(engine.store.path(chunks[0].chunk_id))["kv"]
        answers[f"{name} stored"] = (digest, stored.numpy().tobytes())
    assert answers["base"] != answers["reader"]
    assert answers["base stored"] == answers["reader stored"]


def test_examples_get_distractors_noise_and_another_order():
    config = replace(CONFIG, n_passages=5, noise=0.25)
    seen = list(itertools.islice(mixed(EXAMPLES, config), 240))
    assert seen == list(itertools.islice(mixed(EXAMPLES, config), 240))
    assert all(len(it.documents) == 5 for it in seen)
    helped = [any(d.document_id in it.supporting for d in it.documents) for it in seen]
    assert 0.65 < sum(helped) / 240 < 0.85
    first = [it.documents[0].document_id in it.supporting for it in seen]
    assert 0.05 < sum(first) / 240 < 0.35
    assert sorted(it.question for it in seen[:60]) == sorted(it.question for it in EXAMPLES)
    assert [it.question for it in seen[:60]] != [it.question for it in seen[60:120]]


def test_too_few_examples_are_refused(model: LoadedModel, tmp_path: Path):
    with pytest.raises(ConfigError, match="too few"):
        train_reader(model, EXAMPLES[:6], HashEmbedder(), tmp_path, CONFIG)
