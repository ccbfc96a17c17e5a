"""The salt that a composed prefix is cached under in a server. Standard library only.

A server shares the KV of equal tokens behind equal salts. What is composed is other KV than that of the
plain text, so its salt is made of everything that the rows depend on, and of the store's secret: equal
prefixes share their blocks, nobody else finds them, and nobody can guess them.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence

from coinrag_integrations.types import Scope, SpanRef

# To be raised whenever the same head and spans give other rows: of anything but their bytes.
COMPOSITION = "1:right-aligned"
MARK = "coinrag-"


def salt_of(
    *,
    key: bytes,
    forms: Mapping[int, str],
    scope: Scope,
    head: Sequence[int],
    refs: Sequence[SpanRef],
) -> str:
    """The salt of a prefix: `key` is the store's secret, `forms` the digests of its KV by ratio."""
    ratios = {1, *(ref.ratio for ref in refs)}  # the head's are those of entries
    said = {
        "composition": COMPOSITION,
        "forms": {str(ratio): forms[ratio] for ratio in ratios},
        "scope": str(scope),
        "head": list(head),
        "spans": [[ref.chunk_id, ref.start, ref.stop, ref.ratio] for ref in refs],
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return MARK + hmac.digest(key, text.encode(), "sha256").hex()


def is_ours(salt: object) -> bool:
    """Whether a salt says that what is cached under it was composed."""
    return isinstance(salt, str) and salt.startswith(MARK)
