"""`coinrag eval errors`, behind a `coinrag eval` on a tiny model folder."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from coinrag_integrations.evaluation.errors.classes import ERRORS
from coinrag_integrations.evaluation.errors.evidence import EVIDENCE
from tests.evaluation.errors.passages import GOLD, chunk, evidence, measured, write
from tests.evaluation.test_eval import row
from tests.tiny import save_tiny

LOADED = chunk("[[Bastien Roule built it.]] [[Ida Merle paid for it.]]")


@pytest.fixture
def browser(monkeypatch) -> list[str]:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", shown.append)
    return shown


@pytest.fixture
def out(tmp_path) -> Path:
    write(tmp_path, [evidence(LOADED)], [measured("Ida Merle"), measured(GOLD, method="full")])
    return tmp_path


def test_what_was_measured_can_be_looked_at(run, tmp_path, browser):
    model, out = save_tiny(tmp_path / "model"), tmp_path / "out"
    (tmp_path / "one.jsonl").write_text("\n".join(map(row, ("Who built it?", "Who?"))))
    options = ("--model", model, "--data", tmp_path / "one.jsonl", "--out", out, "--no-plots")
    methods = ("--methods", "spans,full,none,spans-one-stage")
    assert run("eval", *options, *methods).code == 0
    kept = (out / EVIDENCE).read_bytes()
    assert len(kept.splitlines()) == 2 * 2, "one a question and search"
    it = run("eval", "errors", "--out", out)
    assert (it.code, it.value["n_without"], it.value["n_others"]) == (0, 0, 0)
    counts = it.value["data"]["one"]
    assert list(counts) == ["spans", "full", "none", "spans-one-stage"]
    assert all(sum(by_class.values()) == 2 for by_class in counts.values())
    assert Path(it.value["page"]) == out / "errors.html"
    assert (out / "errors.html").read_text().count('class="question"') == 4
    assert browser == [], "nobody is at a terminal"

    (out / EVIDENCE).unlink()  # as an older version left it
    older = run("eval", "errors", "--out", out).value["error"]
    assert older["type"] == "ConfigError"
    assert "run the same coinrag eval again" in older["message"]
    results = (out / "results.jsonl").read_bytes()
    assert run("eval", *options, *methods).code == 0
    assert sorted((out / EVIDENCE).read_bytes().splitlines()) == sorted(kept.splitlines())
    assert (out / "results.jsonl").read_bytes() == results, "nothing was measured again"


def test_the_object_and_the_table_hold_counts(run, out, browser):
    it = run("eval", "errors", "--out", out, "--methods", "spans", "--data", "x")
    assert it.value == {
        "page": str(out / "errors.html"),
        "settings": "s",
        "n_others": 0,
        "n_without": 0,
        "data": {"x": {"spans": {error: int(error == "distracted") for error in ERRORS}}},
    }
    for words in ("x: answers by class", "tracted", "grounded", "page: "):
        assert words in it.text


def test_the_page_goes_where_it_is_wanted(run, out, browser):
    page = out / "pages" / "a b.html"
    page.parent.mkdir()
    assert run("eval", "errors", "--out", out, "--page", page, "--open").code == 0
    assert browser == [page.as_uri()]
    assert not (out / "errors.html").exists()


def test_what_is_left_out_is_said(run, out, browser):
    with (out / "results.jsonl").open("a") as file:
        for more in (measured("a", settings="t"), measured("b", example="2")):
            file.write(json.dumps(more) + "\n")
    it = run("eval", "errors", "--out", out)
    assert (it.value["n_others"], it.value["n_without"]) == (1, 1)
    assert "1 other settings have results there: the latest are shown" in it.text
    assert "1 questions have no evidence" in it.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--methods", "text,spans"), "no results of the method 'text'"),
        (("--data", "y"), "only of: x"),
        (("--out", "nowhere"), "run coinrag eval --out nowhere"),
        (("--page", "no/such/folder.html"), "give --page"),
    ],
)
def test_bad_input_is_one_clear_error(run, out, monkeypatch, options, message):
    monkeypatch.chdir(out)
    it = run("eval", "errors", "--out", out, *options)
    assert (it.code, it.value["error"]["type"]) == (1, "ConfigError")
    assert message in it.value["error"]["message"]
