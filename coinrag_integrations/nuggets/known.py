"""Nuggets that were found before, and travelled with their text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownNuggets:
    """Character ranges of nuggets, by the text of their chunk. A text that is not known has none.

    The same nuggets have the same `proposer_id`.
    """

    by_text: Mapping[str, Sequence[tuple[int, int]]]

    @property
    def proposer_id(self) -> str:
        """A digest of all of them."""
        rows = sorted((text, [*map(list, found)]) for text, found in self.by_text.items())
        return f"known:{hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]}"

    def propose(self, text: str) -> list[str]:
        """The nuggets' words."""
        return [text[start:stop] for start, stop in self.ranges(text)]

    def ranges(self, text: str) -> Sequence[tuple[int, int]]:
        """The nuggets' half-open character ranges."""
        return self.by_text.get(text, ())
