"""What a row of the index holds: a chunk or a nugget, with its triple and its document's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.retrieval.chroma import clean_metadata
from coinrag_integrations.types import Chunk, ChunkId, ScoredSpan, SpanRef


@dataclass(frozen=True, slots=True)
class Row:
    """A row to write: a chunk's or a nugget's."""

    id: str
    text: str
    metadata: dict[str, Any]


def chunk_row(chunk: Chunk) -> Row:
    """The row of a whole chunk."""
    return Row(chunk.chunk_id, chunk.text, _metadata(chunk, 0, len(chunk), 0, len(chunk.text)))


def nugget_rows(chunk: Chunk) -> list[Row]:
    """The rows of a chunk's nuggets."""
    return [
        Row(
            f"{chunk.chunk_id}:{n.span.start}:{n.span.stop}",
            n.text,
            _metadata(chunk, n.span.start, n.span.stop, n.char_start, n.char_stop),
        )
        for n in chunk.nuggets
    ]


def _metadata(
    chunk: Chunk, start: int, stop: int, char_start: int, char_stop: int
) -> dict[str, Any]:
    return {
        **clean_metadata(chunk.metadata),
        "coinrag_chunk_id": chunk.chunk_id,
        "coinrag_document_id": chunk.document_id,
        "coinrag_start": start,
        "coinrag_stop": stop,
        "coinrag_char_start": chunk.char_start + char_start,
        "coinrag_char_stop": chunk.char_start + char_stop,
    }


def scored(metadata: Any, text: Any, score: float) -> ScoredSpan:
    """The span that a row stands for.

    Raises:
        SpanIndexError: we did not write this row.
    """
    try:
        ref = SpanRef(
            ChunkId(metadata["coinrag_chunk_id"]),
            int(metadata["coinrag_start"]),
            int(metadata["coinrag_stop"]),
        )
        return ScoredSpan(
            ref=ref,
            text=text,
            score=float(score),
            document_id=metadata["coinrag_document_id"],
            char_start=int(metadata["coinrag_char_start"]),
            char_stop=int(metadata["coinrag_char_stop"]),
            metadata={k: v for k, v in metadata.items() if not k.startswith("coinrag_")},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SpanIndexError(
            f"the collection holds a row that we did not write: {metadata!r}. Use a collection of "
            "its own for the span index"
        ) from error


def best_first(span: ScoredSpan) -> tuple[float, SpanRef]:
    """The order of results: equal texts get scores that differ in the last bits, hence rounding."""
    return (-round(span.score, 6), span.ref)
