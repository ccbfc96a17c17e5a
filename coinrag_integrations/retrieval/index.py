"""The span index: chunks and their nuggets in two Chroma collections, searched in two stages.

Stage one finds the chunks nearest to the question, stage two the nuggets nearest to it among those
chunks' (CoinRAG, arXiv 2608.07458). What comes back are span triples; KV is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.retrieval.chroma import guard, pages
from coinrag_integrations.retrieval.config import RetrievalConfig
from coinrag_integrations.retrieval.embedders import Embedder, Vectors, unit_vectors
from coinrag_integrations.retrieval.filters import NOTHING, Condition, where_of
from coinrag_integrations.retrieval.folder import ChromaFolder
from coinrag_integrations.retrieval.interruption import Interruption
from coinrag_integrations.retrieval.rows import Row, best_first, chunk_row, nugget_rows, scored
from coinrag_integrations.types import Chunk, ChunkId, ScoredSpan

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.collection_configuration import CreateHNSWConfiguration
    from chromadb.api.models.Collection import Collection
    from chromadb.base_types import Where

Live = Callable[[Sequence[ChunkId]], set[ChunkId]]
_TIES = 16
# By default Chroma writes its vector index after a thousand changes, and otherwise whenever a process
# opens it, even one that only searches: unmarked, unsynced, and for nothing. Adding takes no longer.
_AT_ONCE: CreateHNSWConfiguration = {"sync_threshold": 1, "batch_size": 1}
_IN_PAGE = 10_000  # values of one `$in`: SQLite allows 32,766 variables a query


class SpanIndex:
    """Two collections, `<name>_chunks` and `<name>_nuggets`, of one embedder's vectors.

    Safe to use from many threads.
    """

    def __init__(
        self,
        client: ClientAPI | ChromaFolder,
        embedder: Embedder,
        name: str = "coinrag",
        *,
        mark: Path | None = None,
    ) -> None:
        """Open the collections, creating them if they are not there.

        A `ChromaFolder` is kept from other processes while it is written to; it is the caller's to
        close. `mark` is a file that is there while rows are written, and says which.

        Raises:
            SpanIndexError: Chroma fails, or the collections belong to another embedder.
        """
        self.embedder = embedder
        self._folder = client if isinstance(client, ChromaFolder) else None
        self._client = client.client if isinstance(client, ChromaFolder) else client
        self._name, self._mark = name, mark
        self._open_both()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep other processes from a folder while it is written to.

        Raises:
            SpanIndexError: one has it open.
        """
        with self._folder.writing() if self._folder else nullcontext():
            yield

    def put(
        self, chunks: Sequence[Chunk], vectors: Mapping[ChunkId, Vectors] | None = None
    ) -> None:
        """Index chunks with their nuggets, replacing rows of the same ids. Nuggets come first.

        `vectors` ([d] each) are those of chunks that need not be embedded.

        Raises:
            SpanIndexError: Chroma fails, or metadata that it cannot hold.
        """
        known = vectors or {}
        nuggets = self._embedded([row for chunk in chunks for row in nugget_rows(chunk)])
        rows = self._embedded([chunk_row(c) for c in chunks if c.chunk_id not in known])
        rows += [
            (chunk_row(c), unit_vectors([known[c.chunk_id]])[0])
            for c in chunks
            if c.chunk_id in known
        ]
        # Upsert would merge metadata and keep rows of former nuggets, so replaced rows go first.
        chunk_ids = [chunk.chunk_id for chunk in chunks]
        with self._changing(chunk_ids):
            self._delete(chunk_ids)
            self._add(self._nuggets, nuggets)
            self._add(self._chunks, rows)

    def delete(self, chunk_ids: Sequence[ChunkId]) -> None:
        """Remove chunks and their nuggets; unknown ids are ignored.

        Raises:
            SpanIndexError: Chroma fails.
        """
        if chunk_ids:
            with self._changing(chunk_ids):
                self._delete(chunk_ids)

    @property
    def interruption(self) -> Interruption | None:
        """What a change that did not end was about; None if all of them did.

        Raises:
            SpanIndexError: the mark cannot be read.
        """
        return Interruption.read(self._mark) if self._mark else None

    def reset(self) -> None:
        """Remove all rows, whatever state Chroma's files are in.

        Raises:
            SpanIndexError: Chroma fails.
        """
        with guard(f"make the collections of {self._name!r} anew"):
            there = {collection.name for collection in self._client.list_collections()}
            for name in {f"{self._name}_chunks", f"{self._name}_nuggets"} & there:
                self._client.delete_collection(name)
        self._open_both()

    def probe(self) -> None:
        """Ask for something, to see whether the index can be used.

        Raises:
            SpanIndexError: Chroma fails.
        """
        with guard("search"):
            for collection in (self._chunks, self._nuggets):
                found = collection.get(limit=1, include=["embeddings"])["embeddings"]
                if found is not None and len(found):
                    collection.query(query_embeddings=np.asarray(found[:1]), n_results=1)

    def begin_mending(self) -> None:
        """Leave a mark until `end_mending`: the changes between them have none of their own.

        Raises:
            SpanIndexError: the disk refuses.
        """
        if self._mark:
            Interruption(torn=True, chunk_ids=()).write(self._mark)

    def end_mending(self) -> None:
        """Note that the index is whole.

        Raises:
            SpanIndexError: Chroma fails, or the disk refuses.
        """
        self._settle()
        if self._mark:
            self._mark.unlink(missing_ok=True)

    def counts(self) -> dict[str, int]:
        """How many chunks and nuggets are indexed."""
        with guard("count rows"):
            return {"chunks": self._chunks.count(), "nuggets": self._nuggets.count()}

    def ids(self) -> tuple[set[ChunkId], set[ChunkId]]:
        """Chunks that have a row, and chunks that have rows of nuggets.

        Raises:
            SpanIndexError: Chroma fails, or returns rows that we did not write.
        """
        found = (self._values(it, "coinrag_chunk_id") for it in (self._chunks, self._nuggets))
        chunks, nuggets = ({ChunkId(value) for value in values} for values in found)
        return chunks, nuggets

    def documents(self, where: Condition) -> set[str]:
        """Ids of the documents that fulfil a condition on their metadata (see `filters.where_of`).

        Raises:
            ConfigError: a condition that Chroma cannot check.
            SpanIndexError: Chroma fails.
        """
        return self._values(self._chunks, "coinrag_document_id", where_of(where))

    def search_chunks(
        self,
        question: str,
        n_chunks: int,
        *,
        where: Condition | None = None,
        live: Live | None = None,
    ) -> list[ScoredSpan]:
        """Stage one alone: the nearest chunks as whole-chunk spans, best first.

        `live` says which of the chunks found there still are.
        """
        return self._search_chunks(self.embedder.embed_query(question), n_chunks, where, live)

    def search(
        self,
        question: str,
        config: RetrievalConfig | None = None,
        *,
        live: Live | None = None,
    ) -> list[ScoredSpan]:
        """Both stages: the nearest nuggets of the nearest chunks, best first.

        `live` says which of the chunks found there still are. A chunk without nuggets stands for
        itself, as one span. Scores are cosine similarities.

        Raises:
            SpanIndexError: Chroma fails, or returns rows that we did not write.
        """
        config = config or RetrievalConfig()
        vector = self.embedder.embed_query(question)
        chunks = self._search_chunks(vector, config.n_chunks, config.where, live)
        return self._search_nuggets(vector, chunks, config.n_nuggets, live)

    def search_nuggets(
        self, question: str, chunks: Sequence[ScoredSpan], n_nuggets: int
    ) -> list[ScoredSpan]:
        """Stage two alone: the nearest nuggets of these chunks, best first."""
        return self._search_nuggets(self.embedder.embed_query(question), chunks, n_nuggets)

    def _search_nuggets(
        self,
        vector: Vectors,
        chunks: Sequence[ScoredSpan],
        n_nuggets: int,
        live: Live | None = None,
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
            scored(metadata, text, score)
            for metadata, text, score in zip(metadatas, documents, scores, strict=True)
        ]
        with_nuggets = {span.ref.chunk_id for span in spans}
        alone = [chunk for chunk in chunks if chunk.ref.chunk_id not in with_nuggets]
        if alone and live is not None:  # they may have lost their nuggets because they just went
            there = live([chunk.ref.chunk_id for chunk in alone])
            alone = [chunk for chunk in alone if chunk.ref.chunk_id in there]
        spans += alone
        return sorted(spans, key=best_first)[:n_nuggets]

    def _search_chunks(
        self, vector: Vectors, n_chunks: int, where: Condition | None, live: Live | None
    ) -> list[ScoredSpan]:
        condition = where_of(where)
        if condition == NOTHING:
            return []
        # The approximate index cuts ties in any order: look a little further, then cut in ours.
        # Rows of chunks that are not there take the place of others: then look further still.
        n_results = n_chunks + _TIES
        while True:
            spans, n_found = self._nearest_chunks(vector, n_results, condition)
            if live is not None:
                there = live([span.ref.chunk_id for span in spans])
                spans = [span for span in spans if span.ref.chunk_id in there]
            if n_found < n_results or len(spans) >= n_chunks:
                break
            n_results *= 4
        return sorted(spans, key=best_first)[:n_chunks]

    def _nearest_chunks(
        self, vector: Vectors, n_results: int, where: Condition | None
    ) -> tuple[list[ScoredSpan], int]:
        """The nearest chunks, and of how many rows: those that go meanwhile come back empty."""
        with guard("search chunks"):
            found = self._chunks.query(
                query_embeddings=vector[None],
                n_results=n_results,
                where=cast("Where | None", where),
                include=["documents", "metadatas", "distances"],
            )
        rows: list[tuple[Any, Any, float]] = list(
            zip(
                (found["metadatas"] or [[]])[0],
                (found["documents"] or [[]])[0],
                (found["distances"] or [[]])[0],
                strict=True,
            )
        )
        there = [row for row in rows if row[:2] != (None, None)]
        return [scored(meta, text, 1.0 - distance) for meta, text, distance in there], len(rows)

    @contextmanager
    def _changing(self, chunk_ids: Sequence[ChunkId]) -> Iterator[None]:
        """Leave a mark while rows are written.

        Chroma rewrites its vector index in place now and then. A process that dies meanwhile leaves one
        that cannot be trusted; whoever finds the mark makes it anew. Chroma does part of its work when
        it is asked next, so we ask before the mark goes.
        """
        if self._mark is None or self._mark.exists():  # within a repair, which has its own mark
            yield
            return
        it = Interruption(torn=True, chunk_ids=tuple(chunk_ids))
        it.write(self._mark)
        try:
            yield
            self._settle()
        except SpanIndexError:
            raise
        except BaseException:  # our own process lives, so Chroma's files are whole
            replace(it, torn=False).write(self._mark)
            raise
        self._mark.unlink()

    def _settle(self) -> None:
        """Have Chroma do what it has put off, and the disk hold it."""
        self.probe()
        if self._folder is not None:
            self._folder.sync()

    def _delete(self, chunk_ids: Sequence[ChunkId]) -> None:
        with guard("delete chunks"):
            for page in pages(chunk_ids, min(self._batch, _IN_PAGE)):
                self._nuggets.delete(where=_of_chunks(page))
                self._chunks.delete(ids=list(page))

    def _open_both(self) -> None:
        with guard(f"open the collections of {self._name!r}"):
            self._chunks = self._open(self._client, f"{self._name}_chunks")
            self._nuggets = self._open(self._client, f"{self._name}_nuggets")
            self._batch = int(self._client.get_max_batch_size())

    def _open(self, client: ClientAPI, name: str) -> Collection:
        ours = {"coinrag_embedder": self.embedder.embedder_id}
        collection = client.get_or_create_collection(
            name,
            metadata=ours,
            configuration={"hnsw": {"space": "cosine", **_AT_ONCE}},
            embedding_function=None,
        )
        found = (collection.metadata or {}).get("coinrag_embedder")
        if found != self.embedder.embedder_id:
            raise SpanIndexError(
                f"collection {name!r} belongs to the embedder {found!r}, not to "
                f"{self.embedder.embedder_id!r}: use that embedder, or another collection name"
            )
        return collection

    def _values(self, collection: Collection, key: str, where: Condition | None = None) -> set[str]:
        """What rows hold under one of our keys."""
        values: set[str] = set()
        with guard("list rows"):
            for start in range(0, collection.count(), _IN_PAGE):
                found = collection.get(
                    limit=_IN_PAGE,
                    offset=start,
                    where=cast("Where | None", where),
                    include=["metadatas"],
                )
                values |= {str(metadata.get(key)) for metadata in found["metadatas"] or []}
        return values

    def _embedded(self, rows: Sequence[Row]) -> list[tuple[Row, Vectors]]:
        """Rows with their vectors, a page of texts at a time."""
        return [
            pair
            for page in pages(rows, self._batch)
            for pair in zip(
                page, self.embedder.embed_documents([row.text for row in page]), strict=True
            )
        ]

    def _add(self, collection: Collection, rows: Sequence[tuple[Row, Vectors]]) -> None:
        for page in pages(rows, self._batch):
            with guard(f"write {len(page)} rows"):
                collection.add(
                    ids=[row.id for row, _ in page],
                    documents=[row.text for row, _ in page],
                    metadatas=[row.metadata for row, _ in page],
                    embeddings=np.stack([vector for _, vector in page]),
                )


def _of_chunks(chunk_ids: Sequence[ChunkId]) -> Where:
    return cast("Where", {"coinrag_chunk_id": {"$in": list(chunk_ids)}})
