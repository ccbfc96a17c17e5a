"""The mark that is there while rows of an index change, and what it says if it was left."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.files import write_text
from coinrag_integrations.types import ChunkId


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A change of the index that did not end. `torn`: the process died, and Chroma's files with it."""

    torn: bool
    chunk_ids: tuple[ChunkId, ...]

    def write(self, mark: Path) -> None:
        """Note it in a file.

        Raises:
            SpanIndexError: the disk refuses.
        """
        try:
            write_text(mark, json.dumps({"torn": self.torn, "chunk_ids": self.chunk_ids}))
        except OSError as error:
            raise SpanIndexError(f"cannot write {mark}: {error}") from error

    @classmethod
    def read(cls, mark: Path) -> Interruption | None:
        """The inverse of `write`; None if there is no such file.

        Raises:
            SpanIndexError: it cannot be read.
        """
        try:
            value = json.loads(mark.read_text(encoding="utf-8"))
            return cls(torn=bool(value["torn"]), chunk_ids=tuple(map(ChunkId, value["chunk_ids"])))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpanIndexError(f"cannot read {mark}: {error}") from error
