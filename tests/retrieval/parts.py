"""Chunks with nuggets, one word a token, without any tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

from coinrag_integrations.types import Chunk, ChunkId, Nugget, Span


def make_chunk(
    text: str,
    nuggets: Iterable[str] = (),
    *,
    name: str = "",
    char_start: int = 0,
    metadata: Mapping[str, object] | None = None,
) -> Chunk:
    """A chunk whose tokens are its words; each nugget is the first place where its text stands."""
    offsets = tuple(m.span() for m in re.finditer(r"\S+", text))
    chunk_id = hashlib.md5((name or text).encode(), usedforsecurity=False).hexdigest()
    chunk = Chunk(
        chunk_id=ChunkId(chunk_id),
        document_id=f"doc-{name}",
        index=0,
        text=text,
        char_start=char_start,
        token_ids=tuple(range(len(offsets))),
        offsets=offsets,
        metadata=metadata or {},
    )
    found = []
    for nugget in nuggets:
        start = text.index(nugget)
        stop = start + len(nugget)
        found.append(
            Nugget(
                text=nugget,
                span=chunk.span_of(start, stop),
                char_start=start,
                char_stop=stop,
                match="exact",
                similarity=1.0,
            )
        )
    return Chunk(
        **{name: getattr(chunk, name) for name in chunk.__slots__ if name != "nuggets"},
        nuggets=tuple(found),
    )


def whole(chunk: Chunk) -> Span:
    return Span(0, len(chunk))
