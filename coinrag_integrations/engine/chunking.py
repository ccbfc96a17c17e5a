"""Cut a document into chunks of tokens. One tokenisation a document; nothing is lost."""

from __future__ import annotations

from collections import Counter

from coinrag_integrations.engine.fingerprint import canonical_digest
from coinrag_integrations.engine.tokens import Encoding, TextTokenizer
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.types import Chunk, ChunkId, Document, Scope

CHUNK_TOKENS = 512


def chunk_document(
    document: Document,
    tokenizer: TextTokenizer,
    n_tokens: int = CHUNK_TOKENS,
    scope: Scope | None = None,
) -> tuple[Chunk, ...]:
    """The document's chunks, in order; joined, their texts are the document's text.

    Every chunk but the last has `n_tokens` tokens, or up to three fewer where a character made of
    several tokens would be cut. Ids differ between scopes. An empty document, or one without a single
    token, has no chunks.

    Raises:
        ConfigError: `n_tokens` is too small to hold every character.
    """
    if n_tokens < 8:
        raise ConfigError(f"chunks of {n_tokens} tokens are too small: use at least 8")
    encoding = tokenizer.encode(document.text)
    bounds = _bounds(encoding, n_tokens)
    owner = scope or Scope()
    seen: Counter[tuple[int, ...]] = Counter()
    chunks = []
    for index, (first, stop) in enumerate(bounds):
        ids = encoding.ids[first:stop]
        begin = 0 if index == 0 else encoding.offsets[first - 1][1]
        end = len(document.text) if stop == len(encoding.ids) else encoding.offsets[stop - 1][1]
        chunks.append(
            Chunk(
                chunk_id=_chunk_id(owner, document.document_id, ids, seen[ids]),
                document_id=document.document_id,
                index=index,
                text=document.text[begin:end],
                char_start=begin,
                token_ids=ids,
                offsets=tuple(
                    (max(a - begin, 0), b - begin) for a, b in encoding.offsets[first:stop]
                ),
                metadata=document.metadata,
            )
        )
        seen[ids] += 1
    return tuple(chunks)


def has_its_tokens(chunk: Chunk, scope: Scope) -> bool:
    """Whether a chunk's id is that of its tokens, as `chunk_document` gives it."""
    return any(
        chunk.chunk_id == _chunk_id(scope, chunk.document_id, chunk.token_ids, occurrence)
        for occurrence in range(chunk.index + 1)
    )


def _bounds(encoding: Encoding, n_tokens: int) -> list[tuple[int, int]]:
    """Token ranges of the chunks, moved back where a cut would fall inside a character."""
    total = len(encoding.ids)
    bounds, first = [], 0
    while first < total:
        stop = min(first + n_tokens, total)
        while stop < total and encoding.offsets[stop][0] < encoding.offsets[stop - 1][1]:
            stop -= 1
        if stop <= first:
            raise ConfigError(
                f"a character at {encoding.offsets[first][0]} takes more than {n_tokens} tokens: "
                "use larger chunks"
            )
        bounds.append((first, stop))
        first = stop
    return bounds


def _chunk_id(scope: Scope, document_id: str, ids: tuple[int, ...], occurrence: int) -> ChunkId:
    """128 bits over the scope, the document, the tokens, and how often they came before in it."""
    value = {
        "tenant": scope.tenant,
        "collection": scope.collection,
        "document": document_id,
        "tokens": ids,
        "occurrence": occurrence,
    }
    return ChunkId(canonical_digest(value)[:32])
