"""Commands as users run them, in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from coinrag_integrations.cli import main


@dataclass
class Result:
    """What one command did."""

    code: int
    value: dict[str, Any]
    text: str


Run = Callable[..., Result]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `coinrag … --json`; its object, its human text, its exit code."""

    def command(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["coinrag", *map(str, arguments), "--json"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        value = json.loads(out.splitlines()[-1]) if out.strip() else {}
        assert len(out.splitlines()) <= 1, "stdout holds only the object"
        return Result(int(stop.value.code or 0), value, err)

    return command
