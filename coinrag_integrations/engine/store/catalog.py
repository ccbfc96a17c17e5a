"""The texts and tokens behind a store: which documents it holds and what their chunks say.

KV files can be lost, evicted or corrupt; the catalog is what they are encoded again from. One SQLite
file, written by one process, readable by many.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from coinrag_integrations.errors import ChunkNotFoundError, StoreError
from coinrag_integrations.types import Chunk, ChunkId, Nugget, Span

_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    document_id TEXT PRIMARY KEY, content TEXT NOT NULL, n_chunks INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (
    chunk_id TEXT PRIMARY KEY, document_id TEXT NOT NULL, position INTEGER NOT NULL,
    char_start INTEGER NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL,
    offsets BLOB NOT NULL, nuggets TEXT NOT NULL, metadata TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS chunks_of_document ON chunks (document_id, position);
"""
_COLUMNS = (
    "chunk_id, document_id, position, char_start, text, token_ids, offsets, nuggets, metadata"
)


class Catalog:
    """Documents and chunks by id. Every method may raise `StoreError` when the file is unusable."""

    def __init__(self, path: Path) -> None:
        """Open the catalog, creating it if it is not there."""
        self.path = path
        self._lock = threading.Lock()
        with self._guard():
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(_SCHEMA)

    def content(self, document_id: str) -> str | None:
        """The content hash of a document that is completely ingested."""
        rows = self._select("SELECT content FROM documents WHERE document_id = ?", document_id)
        return rows[0][0] if rows else None

    def documents(self) -> list[str]:
        """Ids of all complete documents, sorted."""
        return [row[0] for row in self._select("SELECT document_id FROM documents ORDER BY 1")]

    def chunk_ids(self, document_id: str) -> list[ChunkId]:
        """Ids of a document's chunks, in order, also of one whose ingestion was interrupted."""
        query = "SELECT chunk_id FROM chunks WHERE document_id = ? ORDER BY position"
        return [ChunkId(row[0]) for row in self._select(query, document_id)]

    def chunk(self, chunk_id: ChunkId) -> Chunk:
        """A chunk with its tokens and nuggets.

        Raises:
            ChunkNotFoundError: no such chunk was ever stored, or it was deleted.
        """
        rows = self._select(f"SELECT {_COLUMNS} FROM chunks WHERE chunk_id = ?", chunk_id)
        if not rows:
            raise ChunkNotFoundError(f"chunk {chunk_id} is not in the catalog {self.path}")
        return _chunk(rows[0])

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, by document and position, a page at a time."""
        query = (
            f"SELECT {_COLUMNS} FROM chunks WHERE (document_id, position, chunk_id) > (?, ?, ?) "
            "ORDER BY document_id, position, chunk_id LIMIT 256"
        )
        last: tuple[str, int, str] = ("", -1, "")
        while rows := self._select(query, *last):
            page = [_chunk(row) for row in rows]
            yield from page
            last = (page[-1].document_id, page[-1].index, page[-1].chunk_id)

    def counts(self) -> dict[str, int]:
        """How many documents and chunks there are."""
        query = "SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM chunks)"
        documents, chunks = self._select(query)[0]
        return {"documents": documents, "chunks": chunks}

    def put_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Add chunks, replacing those of the same ids."""
        rows = [_row(chunk) for chunk in chunks]
        slots = ", ".join("?" * len(_COLUMNS.split(",")))
        with self._guard(), self._db:
            self._db.executemany(
                f"INSERT OR REPLACE INTO chunks ({_COLUMNS}) VALUES ({slots})", rows
            )

    def finish_document(self, document_id: str, content: str, n_chunks: int) -> None:
        """Note that everything of a document is stored and indexed."""
        with self._guard(), self._db:
            self._db.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?)",
                (document_id, content, n_chunks),
            )

    def forget_document(self, document_id: str) -> None:
        """Note that a document is no longer complete; its chunks stay until they are deleted."""
        with self._guard(), self._db:
            self._db.execute("DELETE FROM documents WHERE document_id = ?", (document_id,))

    def delete_chunks(self, chunk_ids: Sequence[ChunkId]) -> None:
        """Remove chunks; unknown ids are ignored."""
        with self._guard(), self._db:
            self._db.executemany("DELETE FROM chunks WHERE chunk_id = ?", [(i,) for i in chunk_ids])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        """The catalog itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _select(self, query: str, *values: Any) -> list[Any]:
        with self._guard():
            return self._db.execute(query, values).fetchall()

    def _guard(self) -> _Guard:
        return _Guard(self._lock, self.path)


class _Guard:
    """Holds the catalog's lock, and names the file in what SQLite raises."""

    def __init__(self, lock: threading.Lock, path: Path) -> None:
        self._lock, self._path = lock, path

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._lock.release()
        if isinstance(error, sqlite3.Error):
            raise StoreError(f"cannot use the catalog {self._path}: {error}") from error


def _row(chunk: Chunk) -> tuple[Any, ...]:
    nuggets = [
        [n.text, n.span.start, n.span.stop, n.char_start, n.char_stop, n.match, n.similarity]
        for n in chunk.nuggets
    ]
    return (
        chunk.chunk_id,
        chunk.document_id,
        chunk.index,
        chunk.char_start,
        chunk.text,
        np.asarray(chunk.token_ids, dtype=np.int32).tobytes(),
        np.asarray(chunk.offsets, dtype=np.int32).tobytes(),
        json.dumps(nuggets, ensure_ascii=False),
        json.dumps(dict(chunk.metadata), ensure_ascii=False),
    )


def _chunk(row: tuple[Any, ...]) -> Chunk:
    chunk_id, document_id, index, char_start, text, ids, offsets, nuggets, metadata = row
    pairs = np.frombuffer(offsets, dtype=np.int32).reshape(-1, 2).tolist()
    return Chunk(
        chunk_id=ChunkId(chunk_id),
        document_id=document_id,
        index=index,
        text=text,
        char_start=char_start,
        token_ids=tuple(np.frombuffer(ids, dtype=np.int32).tolist()),
        offsets=tuple((a, b) for a, b in pairs),
        nuggets=tuple(
            Nugget(text=t, span=Span(a, b), char_start=c, char_stop=d, match=m, similarity=s)
            for t, a, b, c, d, m, s in json.loads(nuggets)
        ),
        metadata=json.loads(metadata),
    )
