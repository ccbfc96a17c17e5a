"""Measured answers in a file of JSON lines, one written as soon as it is there. Knows no model.

A run that was interrupted goes on: what was measured with the same settings is not measured again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from coinrag_integrations.evaluation.lines import LinesFile, read_lines

RESULTS = "results.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One answer of one method.

    `settings` and `example` are digests of what it depends on; `n_context` counts the rows between
    prompt and question, `nll` is in nats a token of the first gold answer. `rouge_l` is measured where
    answers are summaries.
    """

    settings: str
    data: str
    example: str
    method: str
    answer: str
    f1: float
    nll: float
    n_context: int
    bytes_read: int
    compose_ms: float
    ttft_ms: float
    rouge_l: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is the measurement of, within some settings."""
        return self.data, self.example, self.method

    @property
    def is_empty(self) -> bool:
        """Whether nothing was answered."""
        return not self.answer.strip()


def read_results(path: Path) -> Iterator[Measured]:
    """All measurements in a file, of whatever settings, in the order in which they were written.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    return read_lines(path, _measured, "measurement")


class ResultsFile:
    """Measurements of one setting in a file, which may hold those of others too."""

    def __init__(self, path: Path, settings: str) -> None:
        """Read what is there. A last line that was not finished is dropped, also from the file.

        Raises:
            ConfigError: the file cannot be read or written, or holds something else.
        """
        self.settings = settings
        self._found = {row.key: row for row in read_results(path) if row.settings == settings}
        self._file = LinesFile(path)

    def __contains__(self, key: object) -> bool:
        """Whether something has been measured."""
        return key in self._found

    def __getitem__(self, key: tuple[str, str, str]) -> Measured:
        """A measurement."""
        return self._found[key]

    def add(self, row: Measured) -> None:
        """Note a measurement; it is in the file when this returns."""
        self._file.add(asdict(row))
        self._found[row.key] = row

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self._file.__exit__()


_KINDS: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
}
_FIELDS = {field.name: _KINDS[str(field.type)] for field in fields(Measured)}


def _measured(value: Any) -> Measured:
    if not isinstance(value, dict) or set(value) != set(_FIELDS):
        raise TypeError(f"a line has not exactly the fields {', '.join(_FIELDS)}")
    for name, kinds in _FIELDS.items():
        if not isinstance(value[name], kinds):
            raise TypeError(f"{name} is {value[name]!r}")
    return Measured(**value)
