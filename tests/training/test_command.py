"""`coinrag train`, for each thing that can be trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coinrag_integrations import settings
from coinrag_integrations.engine import load_model
from coinrag_integrations.engine.adapter import Adapter
from coinrag_integrations.engine.c2kv import Extractor
from coinrag_integrations.engine.links import link_ids, load_links
from tests.commands import runner
from tests.tiny import HashEmbedder, save_tiny
from tests.training.parts import EXAMPLES


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = []
    for it in EXAMPLES:
        passages = [
            {"text": d.text, "is_supporting": d.document_id in it.supporting} for d in it.documents
        ]
        lines.append({"question": it.question, "answers": it.answers, "passages": passages})
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("reader", ["--examples", "8", "--context", "chunks"]),
        ("model", ["--batch", "6", "--learning-rate", "0.002"]),  # of 60 examples, 48 are held out
        ("links", ["--examples", "8", "--links", "2"]),
        ("c2kv", ["--examples", "8", "--ratios", "2,4", "--init", "eos"]),
        (
            "c2kv",
            [
                "--examples=8",
                "--ratios=2,4",
                "--copies",
                "--learning-rate=0.01",
                "--reconstruction=0.1",
            ],
        ),
    ],
)
def test_train(
    what: str,
    options: list[str],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(settings, "make_embedder", lambda _: HashEmbedder())
    model, folder = save_tiny(tmp_path / "model"), tmp_path / "out"
    run = runner(monkeypatch, capsys)
    result = run("train", what, data, "--model", model, "--output", folder, *options)
    assert result.code == 0, result.text
    assert result.value["step"] == {"model": 2}.get(what, 1)
    assert (folder / "MODEL_CARD.md").exists()
    base = load_model(model)
    if what == "reader":
        assert Adapter.load(folder).base is not None
    elif what == "model":
        assert load_model(folder).weights != base.weights
    elif what == "c2kv":
        assert Extractor.load(folder, base).ratios == (2, 4)
        assert _measured(run, folder, model, data, what, "c2kv:2,hybrid") == {"c2kv:2", "hybrid"}
    else:
        assert len(link_ids(load_links(folder, base))) == 2
        assert _measured(run, folder, model, data, what, "kvlink:2") == {"kvlink:2"}


def _measured(run, folder: Path, model: Path, data: Path, what: str, methods: str) -> set[str]:
    """Which of some methods (and `chunk`) answer otherwise with what was trained."""
    values = []
    for name, more in (("untrained", ()), ("trained", (f"--{what}", folder))):
        out = ("--out", folder.parent / name, "--methods", f"chunk,{methods}")
        options = ("--model", model, "--data", data, "--limit", 1, "--no-plots")
        it = run("eval", *options, *out, *more)
        assert it.code == 0, it.text
        values.append(it.value["data"]["questions"])
    return {name for name, it in values[0].items() if it["nll"] != values[1][name]["nll"]}
