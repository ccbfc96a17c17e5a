"""Link tokens learn, change nothing else, and belong to their model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.adapter import Adapter, with_adapter
from coinrag_integrations.engine.links import (
    CONFIG_FILE,
    line_breaks,
    link_ids,
    load_links,
    with_links,
)
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import ConfigError, ModelError
from coinrag_integrations.evaluation.rivals import Kitchen, likelihood_logits, say
from coinrag_integrations.training import ReaderConfig, TrainingReport, train_reader
from tests.evaluation.rivals.parts import ANSWER, compose, same, task_of
from tests.tiny import HashEmbedder, forward, supported_model, tiny_model
from tests.training.parts import CONFIG, EXAMPLES

LINKS = replace(CONFIG, kind="links", context="chunks", n_links=3, learning_rate=0.1)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def trained(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("links")
    return folder, train_reader(model, EXAMPLES, HashEmbedder(), folder, LINKS)


def logits(kitchen: Kitchen, method: str) -> torch.Tensor:
    task = task_of(kitchen)
    return likelihood_logits(kitchen.reader, compose(kitchen, method, task), task.tail, ANSWER)


def test_they_learn_and_leave_the_model_alone(model: LoadedModel, trained):
    folder, report = trained
    assert report.held_out[report.best_step] < 0.95 * report.held_out[0]
    assert model.weights == tiny_model().weights
    reader = load_links(folder, model)
    assert link_ids(reader) == (512, 513, 514)
    assert link_ids(model) == ()
    assert "Link tokens for tiny" in (folder / "MODEL_CARD.md").read_text()


@pytest.mark.parametrize("family", ["llama", "gemma3", "granite", "qwen2-mixed"])
@pytest.mark.parametrize("tied", [False, True])
def test_untrained_they_are_line_breaks(family: str, tied: bool):
    model = supported_model(family)
    if tied:
        config = type(model.hf.config)
        model = tiny_model(config, tie_word_embeddings=True, **_options(family))
    reader = with_links(model, line_breaks(model, 5))
    plain, linked = Kitchen(model), Kitchen(model, reader=reader)
    for method in ("kvlink", "kvlink:2", "kvlink:0", "chunk", "spans"):
        same(logits(linked, method), logits(plain, method))
    same(logits(linked, "kvlink:0"), logits(linked, "chunk"))
    ids = [3, 77, 12]
    assert torch.equal(forward(reader.hf, ids), forward(model.hf, ids))
    assert forward(reader.hf, ids).shape[-1] == 512


def _options(family: str) -> dict:
    from tests.tiny import SUPPORTED

    return SUPPORTED[family][1]


def test_trained_they_change_kvlink_and_nothing_else(model: LoadedModel, trained):
    plain = Kitchen(model)
    linked = Kitchen(model, reader=load_links(trained[0], model))
    assert not torch.allclose(logits(linked, "kvlink"), logits(plain, "kvlink:3"))
    for method in ("chunk", "spans", "text", "full", "kvlink:0"):
        assert torch.equal(logits(linked, method), logits(plain, method))
    task = task_of(linked)
    assert compose(linked, "kvlink", task).prefix.plans[0].n_online == 3 * len(task.chunks)
    watch = Stopwatch(linked.model.device)
    said = say(linked.reader, compose(linked, "kvlink", task), task.tail, watch, 6)
    assert max(said.tokens, default=0) < 512
    with pytest.raises(ConfigError, match="only 3 were trained"):
        compose(linked, "kvlink:5", task)


def test_interrupted_they_go_on_to_the_same(model: LoadedModel, trained, tmp_path: Path):
    def stop(report: TrainingReport) -> None:
        if report.step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, LINKS, on_progress=stop)
    report = train_reader(model, EXAMPLES, HashEmbedder(), tmp_path, LINKS)
    assert report.held_out == trained[1].held_out
    assert load_links(tmp_path, model).adapter == load_links(trained[0], model).adapter


def test_they_stand_beside_an_adapter(model: LoadedModel, trained, tmp_path: Path):
    adapter, beside = tmp_path / "adapter", tmp_path / "links"
    config = replace(CONFIG, n_examples=16)
    train_reader(model, EXAMPLES, HashEmbedder(), adapter, config)
    reader = with_adapter(model, Adapter.load(adapter))
    short = replace(LINKS, n_examples=16)
    train_reader(model, EXAMPLES, HashEmbedder(), beside, short, reader=reader)
    assert link_ids(load_links(beside, reader)) == (512, 513, 514)
    with pytest.raises(ModelError, match="use the model"):
        load_links(beside, model)
    with pytest.raises(ModelError, match="with its adapter"):
        load_links(trained[0], reader)


def test_another_model_and_broken_files_are_refused(trained, model: LoadedModel, tmp_path: Path):
    with pytest.raises(ModelError, match="other weights"):
        load_links(trained[0], tiny_model(seed=1))
    with pytest.raises(ModelError, match="no link tokens"):
        load_links(tmp_path, model)
    (tmp_path / CONFIG_FILE).write_text("{}")
    with pytest.raises(ModelError, match="no link tokens"):
        load_links(tmp_path, model)
    with pytest.raises(ModelError, match="cannot be added"):
        with_links(model, torch.zeros(2, 8))
    with pytest.raises(ModelError, match="cannot be added"):
        with_links(with_links(model, torch.zeros(2, 64)), torch.zeros(2, 64))


def test_links_need_whole_chunks():
    with pytest.raises(ConfigError, match="whole chunks"):
        ReaderConfig(kind="links")
    assert ReaderConfig.link_recipe(2).n_links == 2
