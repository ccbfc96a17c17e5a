"""The span index: chunks and their nuggets in two Chroma collections, searched in two stages.

Stage one finds the chunks nearest to the question, stage two the nuggets nearest to it among those
chunks' (CoinRAG, arXiv 2608.07458). What comes back are span triples; KV is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from coinrag_integrations.errors import ConfigError, SpanIndexError
from coinrag_integrations.retrieval.chroma import clean_metadata, guard, pages
from coinrag_integrations.retrieval.embedders import Embedder, Vectors
from coinrag_integrations.types import Chunk, ChunkId, ScoredSpan, SpanRef

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.models.Collection import Collection
    from chromadb.base_types import Where

_TIES = 16
_IN_PAGE = 10_000  # values of one `$in`: SQLite allows 32,766 variables a query


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalConfig:
    """How wide to search: `n_chunks` bounds stage one, `n_nuggets` stage two (paper: 5 and 10)."""

    n_chunks: int = 5
    n_nuggets: int = 10

    def __post_init__(self) -> None:
        """Refuse searches for nothing."""
        if self.n_chunks < 1 or self.n_nuggets < 1:
            raise ConfigError(
                f"n_chunks={self.n_chunks} and n_nuggets={self.n_nuggets} must be at least 1"
            )


class SpanIndex:
    """Two collections, `<name>_chunks` and `<name>_nuggets`, of one embedder's vectors.

    Safe to use from many threads.
    """

    def __init__(self, client: ClientAPI, embedder: Embedder, name: str = "coinrag") -> None:
        """Open the collections, creating them if they are not there.

        Raises:
            SpanIndexError: Chroma fails, or the collections belong to another embedder.
        """
        self.embedder = embedder
        with guard(f"open the collections of {name!r}"):
            self._chunks = self._open(client, f"{name}_chunks")
            self._nuggets = self._open(client, f"{name}_nuggets")
            self._batch = int(client.get_max_batch_size())

    def put(self, chunks: Sequence[Chunk]) -> None:
        """Index chunks with their nuggets, replacing rows of the same ids. Nuggets come first.

        Raises:
            SpanIndexError: Chroma fails, or metadata that it cannot hold.
        """
        nuggets = self._embedded([row for chunk in chunks for row in _nugget_rows(chunk)])
        rows = self._embedded([_chunk_row(chunk) for chunk in chunks])
        # Upsert would merge metadata and keep rows of former nuggets, so replaced rows go first.
        self.delete([chunk.chunk_id for chunk in chunks])
        self._add(self._nuggets, nuggets)
        self._add(self._chunks, rows)

    def delete(self, chunk_ids: Sequence[ChunkId]) -> None:
        """Remove chunks and their nuggets; unknown ids are ignored.

        Raises:
            SpanIndexError: Chroma fails.
        """
        with guard("delete chunks"):
            for page in pages(chunk_ids, min(self._batch, _IN_PAGE)):
                self._nuggets.delete(where=_of_chunks(page))
                self._chunks.delete(ids=list(page))

    def counts(self) -> dict[str, int]:
        """How many chunks and nuggets are indexed."""
        with guard("count rows"):
            return {"chunks": self._chunks.count(), "nuggets": self._nuggets.count()}

    def search_chunks(self, question: str, n_chunks: int) -> list[ScoredSpan]:
        """Stage one alone: the nearest chunks as whole-chunk spans, best first."""
        return self._search_chunks(self.embedder.embed_query(question), n_chunks)

    def search(self, question: str, config: RetrievalConfig | None = None) -> list[ScoredSpan]:
        """Both stages: the nearest nuggets of the nearest chunks, best first.

        A chunk without nuggets stands for itself, as one span. Scores are cosine similarities.

        Raises:
            SpanIndexError: Chroma fails, or returns rows that we did not write.
        """
        config = config or RetrievalConfig()
        vector = self.embedder.embed_query(question)
        chunks = self._search_chunks(vector, config.n_chunks)
        return self._search_nuggets(vector, chunks, config.n_nuggets)

    def search_nuggets(
        self, question: str, chunks: Sequence[ScoredSpan], n_nuggets: int
    ) -> list[ScoredSpan]:
        """Stage two alone: the nearest nuggets of these chunks, best first."""
        return self._search_nuggets(self.embedder.embed_query(question), chunks, n_nuggets)

    def _search_nuggets(
        self, vector: Vectors, chunks: Sequence[ScoredSpan], n_nuggets: int
    ) -> list[ScoredSpan]:
        if not chunks:
            return []
        # The nuggets of a few chunks are few: an exact product of all of them is as fast as the
        # approximate index, and misses nothing.
        with guard("search nuggets"):
            found = self._nuggets.get(
                where=_of_chunks([chunk.ref.chunk_id for chunk in chunks]),
                include=["documents", "metadatas", "embeddings"],
            )
        metadatas, documents = found["metadatas"] or [], found["documents"] or []
        scores = (
            (np.asarray(found["embeddings"], dtype=np.float32) @ vector).tolist()
            if documents
            else []
        )
        spans = [
            _scored(metadata, text, score)
            for metadata, text, score in zip(metadatas, documents, scores, strict=True)
        ]
        with_nuggets = {span.ref.chunk_id for span in spans}
        spans += [chunk for chunk in chunks if chunk.ref.chunk_id not in with_nuggets]
        return sorted(spans, key=_best_first)[:n_nuggets]

    def _search_chunks(self, vector: Vectors, n_chunks: int) -> list[ScoredSpan]:
        # The approximate index cuts ties in any order: look a little further, then cut in ours.
        with guard("search chunks"):
            found = self._chunks.query(
                query_embeddings=vector[None],
                n_results=n_chunks + _TIES,
                include=["documents", "metadatas", "distances"],
            )
        rows = zip(
            (found["metadatas"] or [[]])[0],
            (found["documents"] or [[]])[0],
            (found["distances"] or [[]])[0],
            strict=True,
        )
        spans = [_scored(metadata, text, 1.0 - distance) for metadata, text, distance in rows]
        return sorted(spans, key=_best_first)[:n_chunks]

    def _open(self, client: ClientAPI, name: str) -> Collection:
        ours = {"coinrag_embedder": self.embedder.embedder_id}
        collection = client.get_or_create_collection(
            name,
            metadata=ours,
            configuration={"hnsw": {"space": "cosine"}},
            embedding_function=None,
        )
        found = (collection.metadata or {}).get("coinrag_embedder")
        if found != self.embedder.embedder_id:
            raise SpanIndexError(
                f"collection {name!r} belongs to the embedder {found!r}, not to "
                f"{self.embedder.embedder_id!r}: use that embedder, or another collection name"
            )
        return collection

    def _embedded(self, rows: Sequence[_Row]) -> list[tuple[_Row, Vectors]]:
        """Rows with their vectors, a page of texts at a time."""
        return [
            pair
            for page in pages(rows, self._batch)
            for pair in zip(
                page, self.embedder.embed_documents([row.text for row in page]), strict=True
            )
        ]

    def _add(self, collection: Collection, rows: Sequence[tuple[_Row, Vectors]]) -> None:
        for page in pages(rows, self._batch):
            with guard(f"write {len(page)} rows"):
                collection.add(
                    ids=[row.id for row, _ in page],
                    documents=[row.text for row, _ in page],
                    metadatas=[row.metadata for row, _ in page],
                    embeddings=np.stack([vector for _, vector in page]),
                )


@dataclass(frozen=True, slots=True)
class _Row:
    """A row to write: a chunk's or a nugget's."""

    id: str
    text: str
    metadata: dict[str, Any]


def _of_chunks(chunk_ids: Sequence[ChunkId]) -> Where:
    return cast("Where", {"coinrag_chunk_id": {"$in": list(chunk_ids)}})


def _best_first(span: ScoredSpan) -> tuple[float, SpanRef]:
    # Equal texts get scores that differ in the last bits; rounding makes their order ours.
    return (-round(span.score, 6), span.ref)


def _chunk_row(chunk: Chunk) -> _Row:
    return _Row(chunk.chunk_id, chunk.text, _metadata(chunk, 0, len(chunk), 0, len(chunk.text)))


def _nugget_rows(chunk: Chunk) -> list[_Row]:
    return [
        _Row(
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


def _scored(metadata: Any, text: Any, score: float) -> ScoredSpan:
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
