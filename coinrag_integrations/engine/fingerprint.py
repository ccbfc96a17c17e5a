"""What the bytes of a cached chunk depend on, as one comparable value. Reads no files.

Digests are SHA-256 over canonical JSON, so they are the same in every process and on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

FORMAT_VERSION = 2


def canonical_digest(value: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of `value` as JSON with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that changes the bytes of a cached chunk.

    `weights`, `tokenizer` and `rope` are hashes; `layout` spells layers, heads and head dimension;
    `context` is "alone", or "after_prompt:" and the hash of the prompt's token ids. `extractor` is
    "none" for tokens' own entries, and "c2kv:", its digest, ":" and the ratio for C2KV's slots.
    """

    weights: str
    tokenizer: str
    rope: str
    layout: str
    dtype: str
    context: str
    codec: str = "none"
    extractor: str = "none"
    format_version: int = FORMAT_VERSION

    @property
    def ratio(self) -> int:
        """Tokens of an entry: 1, unless entries are slots."""
        ratio = self.extractor.rpartition(":")[2]
        return int(ratio) if self.extractor.startswith("c2kv:") and ratio.isdecimal() else 1

    @property
    def digest(self) -> str:
        """SHA-256 over all fields, in hex."""
        return canonical_digest(asdict(self))

    def of_slots(self, extractor: str, ratio: int) -> Fingerprint:
        """That of slots of so many tokens, made of these entries by the extractor with that digest."""
        return replace(self, extractor=f"c2kv:{extractor}:{ratio}")

    def differences(self, other: Fingerprint) -> list[str]:
        """The names of the fields that differ, in order of declaration."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Fingerprint:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a field is missing or unknown.
        """
        names = {f.name for f in fields(cls)}
        if set(value) != names:
            raise ValueError(f"fingerprint has fields {sorted(value)}, expected {sorted(names)}")
        return cls(**value)
