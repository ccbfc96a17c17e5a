"""Files of JSON lines: whole lines only, and nothing else."""

from __future__ import annotations

import pytest

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.lines import LinesFile, read_lines


def test_a_line_is_there_as_soon_as_it_is_added(tmp_path):
    path = tmp_path / "new" / "lines.jsonl"
    assert list(read_lines(path, dict, "object")) == []
    with LinesFile(path) as file:
        file.add({"word": "Marenqué"})
        assert list(read_lines(path, dict, "object")) == [{"word": "Marenqué"}]


@pytest.mark.parametrize("tail", [b'{"a": "\xc3', b"{}", b""])
def test_a_line_that_was_not_finished_is_dropped(tmp_path, tail):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + tail)
    assert list(read_lines(path, dict, "object")) == [{"a": 1}]
    assert path.read_bytes().endswith(tail), "reading changes nothing"
    with LinesFile(path) as file:
        file.add({"a": 2})
    assert list(read_lines(path, dict, "object")) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("line", ["no JSON\n", "3\n", '{"b": 1}\n', "[" * 99_999 + "\n"])
def test_other_lines_are_one_clear_error(tmp_path, line):
    path = tmp_path / "lines.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"lines\.jsonl holds something that is no count"):
        list(read_lines(path, lambda value: value["a"], "count"))


def test_what_cannot_be_read_or_written_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_lines(tmp_path, dict, "object"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        LinesFile(tmp_path / "file" / "lines.jsonl")
