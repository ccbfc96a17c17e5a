"""`coinrag bench codec` and `coinrag bench injection`, run for real on a tiny model folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from coinrag_integrations.cli import main
from tests.tiny import save_tiny

PASSAGES = [
    {
        "title": "Organ",
        "text": "The tidal organ was built by Bastien Roule.",
        "is_supporting": True,
    },
    {"title": "Pier", "text": "The keeper of the pier writes down each note."},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(monkeypatch, capsys):
    def command(*arguments: object) -> tuple[int, dict, str]:
        monkeypatch.setattr(sys, "argv", ["coinrag", "bench", *map(str, arguments), "--json"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), json.loads(out.splitlines()[-1]), err

    return command


def test_codecs_are_measured_on_a_file_of_questions(run, tiny, tmp_path):
    row = {"question": "Who built it?", "answers": ["Bastien Roule"], "passages": PASSAGES}
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([json.dumps(row)] * 3))
    for pieces in ("spans", "chunks"):
        options = ("--data", data, "--questions", 2, "--pieces", pieces)
        code, value, text = run("codec", "--model", tiny, *options)
        assert (code, value["n"], value["pieces"]) == (0, 2, pieces)
        assert list(value["codecs"]) == ["raw", "int8", "int4"]
        assert value["codecs"]["raw"]["nll_ratio"] == 1
        assert "int4" in text


def test_codecs_are_measured_on_the_demos_questions_by_default(run, tiny):
    code, value, _ = run("codec", "--model", tiny, "--questions", 1)
    assert (code, value["n"]) == (0, 1)


def test_bad_questions_are_one_clear_error(run, tiny, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "Who?"}')
    code, value, text = run("codec", "--model", tiny, "--data", tmp_path / "data.jsonl")
    assert (code, value["error"]["type"]) == (1, "DocumentError")
    assert "line 1" in value["error"]["message"]
    assert "Traceback" not in text
    code, value, _ = run("codec", "--model", tiny, "--pieces", "words")
    assert (code, value["error"]["type"]) == (1, "ConfigError")


def test_attacks_are_counted(run, tiny):
    code, value, text = run("injection", "--model", tiny, "--attacks", 1)
    assert (code, value["n"], len(value["attacks"])) == (0, 1, 1)
    assert list(value["modes"]) == ["coinrag", "chunk", "full"]
    assert value["modes"]["full"]["over_full"]["mean"] == 0
    assert "over full" in text
