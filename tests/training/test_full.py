"""All weights are trained: the result is a model of its own, and old KV is not its."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coinrag_integrations.engine import Engine, EngineConfig, LoadedModel, load_model
from coinrag_integrations.errors import ConfigError, FingerprintMismatchError
from coinrag_integrations.training import ReaderConfig, TrainingReport, train_reader
from tests.tiny import HashEmbedder, fill, tiny_model
from tests.training.parts import CONFIG, EXAMPLES

FULL = replace(
    CONFIG,
    kind="full",
    through_cache=True,
    learning_rate=2e-3,
    n_examples=64,
    max_tokens=1024,
)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def trained(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    return folder, train_reader(model, EXAMPLES, HashEmbedder(), folder, FULL)


def test_it_learns_and_is_a_model_that_loads(model: LoadedModel, trained):
    folder, report = trained
    assert report.held_out[report.best_step] < 0.8 * report.held_out[0]
    assert model.weights == tiny_model().weights
    loaded = load_model(folder, dtype="float32", pack=False)
    assert loaded.layout == model.layout
    assert loaded.weights != model.weights
    assert loaded.tokenizer.encode("boat 3").ids == model.tokenizer.encode("boat 3").ids
    card = (folder / "MODEL_CARD.md").read_text()
    assert "Reading model for tiny" in card
    assert "with gradients" in card


def test_what_the_base_has_cached_is_refused(model: LoadedModel, trained, tmp_path: Path):
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read")
    with Engine(model, tmp_path, config) as engine:
        fill(engine)
    loaded = load_model(trained[0], dtype="float32", pack=False)
    with pytest.raises(FingerprintMismatchError, match="weights"):
        Engine(loaded, tmp_path, config)


def test_an_interrupted_training_goes_on_to_the_same_weights(
    model: LoadedModel, trained, tmp_path: Path
):
    def stop(report: TrainingReport) -> None:
        if report.step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, FULL, on_progress=stop)
    report = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, FULL)
    assert report.held_out == trained[1].held_out
    a, b = (load_model(it, dtype="float32", pack=False).weights for it in (tmp_path, trained[0]))
    assert a == b


@pytest.mark.parametrize(
    ("context", "through"), [("text", False), ("chunks", True), ("spans", False)]
)
def test_a_bf16_model_is_trained_in_fp32_and_written_in_bf16(
    context: str, through: bool, tmp_path: Path
):
    model = tiny_model(dtype=torch.bfloat16)
    config = replace(
        FULL, context=context, through_cache=through, n_examples=8, n_held_out=2, at_once=2
    )
    report = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, config)
    assert report.step == 2
    loaded = load_model(tmp_path, dtype="bfloat16", pack=False)
    assert loaded.layout.dtype == torch.bfloat16
    assert model.weights == tiny_model(dtype=torch.bfloat16).weights


def test_the_recipe_is_the_papers():
    config = ReaderConfig.paper_recipe()
    assert (config.kind, config.batch, config.learning_rate) == ("full", 16, 5e-6)
    assert (config.n_chunks, config.n_nuggets, config.noise) == (5, 10, 0.15)
    assert (config.max_tokens, config.n_examples, config.n_steps) == (1024, 277_280, 17_330)
    with pytest.raises(ConfigError, match="through_cache"):
        ReaderConfig(through_cache=True)
    with pytest.raises(ConfigError, match="kind is 'half'"):
        ReaderConfig(kind="half")
