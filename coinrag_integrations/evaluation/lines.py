"""Values in a file of JSON lines, one written as soon as it is there. Knows nothing of what they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from coinrag_integrations.errors import ConfigError

Row = TypeVar("Row")


def read_lines(path: Path, parse: Callable[[Any], Row], what: str) -> Iterator[Row]:
    """The values of a file, in order; nothing where there is no file.

    A last line that was not finished is left out. `parse` raises ValueError, TypeError or KeyError for
    what is no `what` ("measurement").

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            while (line := file.readline()).endswith(b"\n"):
                if line.strip():
                    yield parse(json.loads(line))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{path} holds something that is no {what} ({error}): give another folder"
        ) from error


class LinesFile:
    """A file that lines are added to."""

    def __init__(self, path: Path) -> None:
        """Open it, and cut off a last line that was not finished.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
            self._file.truncate(_end_of_lines(path))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error

    def add(self, value: Mapping[str, Any]) -> None:
        """Write a line; it is in the file when this returns."""
        self._file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self._file.close()


def _end_of_lines(path: Path) -> int:
    end = position = 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            if line.endswith(b"\n"):
                end = position
    return end
