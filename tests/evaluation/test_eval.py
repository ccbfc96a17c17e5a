"""`coinrag eval`, run for real on a tiny model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coinrag_integrations.evaluation.rivals import METHODS
from tests.tiny import save_tiny, save_tiny_reranker

PASSAGES = [
    {
        "title": "Organ",
        "text": "The tidal organ was built by Bastien Roule.",
        "is_supporting": True,
    },
    {"title": "Pier", "text": "The keeper of the pier writes down each note."},
]


def row(question: str) -> str:
    return json.dumps({"question": question, "answers": ["Bastien Roule"], "passages": PASSAGES})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "eval").mkdir(parents=True)
    (tmp_path / "data" / "one.jsonl").write_text("\n".join(map(row, ("Who built it?", "Who?"))))
    (tmp_path / "data" / "eval" / "two.jsonl").write_text(row("Who plays?"))
    return tmp_path / "data"


def test_the_object_holds_what_was_promised(run, tiny, data, tmp_path):
    out = tmp_path / "out"
    options = ("--model", tiny, "--out", out, "--data-folder", data, "--seed", 3)
    names = ("--data", "one,two", "--methods", "full,spans", "--methods", "cacheblend:0.3")
    it = run("eval", *options, *names)
    assert it.code == 0, it.text
    assert list(it.value["data"]) == ["one", "two"]
    assert [m["n"] for m in it.value["data"]["one"].values()] == [2, 2, 2]
    for methods in it.value["data"].values():
        assert list(methods) == ["full", "spans", "cacheblend:0.3"]
        for method in methods.values():
            assert set(method) == {
                *("n", "f1", "f1_ci", "nll", "empty", "entries", "bytes_read", "ttft_ms")
            }
            low, high = method["f1_ci"]
            assert low <= method["f1"] <= high
            assert set(method["ttft_ms"]) == {"p50", "mean", "p99"}
    assert it.value["reference"] == "full"
    assert list(it.value["paired_f1"]["two"]) == ["spans", "cacheblend:0.3"]
    assert json.loads((out / "report.json").read_text()) == it.value
    table = (out / "report.md").read_text()
    assert "## one, n = 2" in table
    assert table.count("| spans |") == 3, "two data sets and both together"
    assert "cacheblend:0.3" in it.text

    again = run("eval", *options, *names)
    assert again.value == it.value, "nothing was measured again"
    fewer = run("eval", *options, "--data", "one", "--limit", 1, "--methods", "spans")
    assert fewer.value["data"]["one"]["spans"]["n"] == 1
    assert fewer.value["reference"] is None


def test_paths_and_the_demo_are_data_too(run, tiny, data, tmp_path):
    options = ("--model", tiny, "--out", tmp_path / "out", "--no-plots", "--limit", 1)
    it = run("eval", *options, "--data", data / "one.jsonl", "--data", "demo", "--methods", "none")
    assert (it.code, list(it.value["data"])) == (0, ["one", "demo"])


def test_the_folder_may_come_from_the_environment(run, tiny, data, tmp_path, monkeypatch):
    monkeypatch.setenv("COINRAG_DATA", str(data))
    options = ("--model", tiny, "--out", tmp_path / "out", "--no-plots")
    it = run("eval", *options, "--data", "two")
    assert it.code == 0
    assert list(it.value["data"]["two"]) == list(METHODS), "all methods by default"


def test_an_adapter_reads_what_is_cached(run, tiny, data, tmp_path):
    """Of the query projection alone: it changes answers, and a broken one is an error."""
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    adapter.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    matrices = {f"{name}A.weight": torch.ones(2, 64), f"{name}B.weight": torch.ones(64, 2)}
    save_file(matrices, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    options = ("--model", tiny, "--out", out, "--data-folder", data, "--data", "two", "--no-plots")
    methods = ("--methods", "full,spans,cacheblend")
    plain, read = (run("eval", *options, *methods, *a).value for a in ((), ("--adapter", adapter)))
    for method in ("full", "spans", "cacheblend"):
        before, after = (value["data"]["two"][method] for value in (plain, read))
        assert before["nll"] != after["nll"]
        assert before["entries"] == after["entries"]
    (adapter / "adapter_config.json").unlink()
    assert run("eval", *options, "--adapter", adapter).value["error"]["type"] == "ModelError"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "three"), "only: one, two"),
        (("--data", "one,one"), "two data sets are called 'one'"),
        (("--methods", "spams"), "method 'spams' is not known"),
        (("--methods", "legolink:x"), "not a whole number"),
        (("--embedder", "ada"), "embedder 'ada'"),
    ],
)
def test_bad_input_is_one_clear_error(run, tiny, data, tmp_path, options, message):
    basis = ("--model", tiny, "--out", tmp_path / "out", "--data-folder", data)
    it = run("eval", *basis, *options)
    assert (it.code, it.value["error"]["type"]) == (1, "ConfigError")
    assert message in it.value["error"]["message"]
    assert "Traceback" not in it.text


def test_names_need_a_folder(run, tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("COINRAG_DATA", raising=False)
    it = run("eval", "--model", tiny, "--out", tmp_path, "--data", "hotpotqa")
    assert it.value["error"]["type"] == "ConfigError"
    assert "COINRAG_DATA" in it.value["error"]["message"]
    missing = run("eval", "--model", tiny, "--out", tmp_path, "--data", tmp_path / "no.jsonl")
    assert missing.value["error"]["type"] == "DocumentError"


def test_sweeps_ablations_and_a_reranker_add_methods(run, tiny, data, tmp_path):
    reranker = save_tiny_reranker(tmp_path / "reranker")
    options = ("--model", tiny, "--out", tmp_path / "out", "--no-plots", "--limit", 1)
    more = ("--sweep", "--ablations", "--reranker", reranker)
    it = run("eval", *options, "--data", data / "one.jsonl", "--methods", "full,spans", *more)
    assert it.code == 0, it.text
    assert list(it.value["data"]["one"]) == [
        *("full", "spans", "spans:2", "spans:5", "spans:10", "spans:20"),
        *("isolated", "spans-one-stage", "spans-unaligned", "spans-unadapted", "spans-reranked"),
    ]
    named = ("--methods", "spans,isolated", "--ablations")
    it = run("eval", *options, "--data", data / "one.jsonl", *named)
    assert list(it.value["data"]["one"])[:2] == ["spans", "isolated"], "each once"
