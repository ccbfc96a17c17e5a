"""The texts and tokens behind a store: which documents it holds and what their chunks say.

KV files can be lost, evicted or corrupt; the catalog is what they are encoded again from. One SQLite
file, written by one process, readable by many.

A document is there once it is finished: a version of it (named by the hash of its content) is begun,
then its KV and index rows are written, then one transaction puts it in the place of the version before.
What belongs to no version any more is garbage, and is known as such until it is purged.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from coinrag_integrations.errors import ChunkNotFoundError, FingerprintMismatchError, StoreError
from coinrag_integrations.types import Chunk, ChunkId, Nugget, Span

_SCHEMA_VERSION = "2"
# All or nothing: what is there after a crash is what there was before, or a whole catalog.
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS documents (
    document_id TEXT PRIMARY KEY, content TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (
    document_id TEXT NOT NULL, content TEXT NOT NULL, position INTEGER NOT NULL,
    chunk_id TEXT NOT NULL, char_start INTEGER NOT NULL, text TEXT NOT NULL, token_ids BLOB NOT NULL,
    offsets BLOB NOT NULL, nuggets TEXT NOT NULL, metadata TEXT NOT NULL,
    PRIMARY KEY (document_id, content, position)
);
CREATE INDEX IF NOT EXISTS chunks_by_id ON chunks (chunk_id);
CREATE TABLE IF NOT EXISTS vectors (
    document_id TEXT NOT NULL, content TEXT NOT NULL, vector BLOB NOT NULL,
    PRIMARY KEY (document_id, content)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS garbage (chunk_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS pins (document_id TEXT PRIMARY KEY) WITHOUT ROWID;
COMMIT;
"""
_NEWEST = "name = 'vectors'"  # the table that came last: catalogs of before lack it
_COLUMNS = (
    "document_id, content, position, chunk_id, char_start, text, token_ids, offsets, nuggets, "
    "metadata"
)
_LIVE = "chunks JOIN documents USING (document_id, content)"
_BEGUN = "(document_id, content) NOT IN (SELECT document_id, content FROM documents)"
_UNPIN = "DELETE FROM pins WHERE document_id = ?"
_IN_PAGE = 10_000  # values of one list: SQLite allows 32,766 variables a query


class Catalog:
    """Documents and chunks by id. Every method may raise `StoreError` when the file is unusable."""

    def __init__(self, path: Path, *, expected: Mapping[str, str] | None = None) -> None:
        """Open the catalog, creating it if it is not there.

        `expected` (tenant, collection, tokenizer) is noted in a new catalog and compared with an old
        one's notes.

        Raises:
            FingerprintMismatchError: it was made for something else; names what.
        """
        self.path = path
        self._lock = threading.Lock()
        with self._guard():
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA secure_delete=ON")  # deleted texts are not left in the file
            if not self._db.execute(f"SELECT 1 FROM sqlite_master WHERE {_NEWEST}").fetchall():
                self._db.executescript(_SCHEMA)
        try:
            self._check({"schema": _SCHEMA_VERSION, **(expected or {})})
        except StoreError:
            self.close()
            raise

    # -- documents -----------------------------------------------------------------------------

    def content(self, document_id: str) -> str | None:
        """The content hash of a document that is there."""
        rows = self._select("SELECT content FROM documents WHERE document_id = ?", document_id)
        return rows[0][0] if rows else None

    def documents(self) -> list[str]:
        """Ids of all documents, sorted."""
        return [row[0] for row in self._select("SELECT document_id FROM documents ORDER BY 1")]

    def begin_document(
        self,
        document_id: str,
        content: str,
        chunks: Sequence[Chunk],
        vector: Sequence[float] | None = None,
    ) -> None:
        """Begin a version of a document. The finished one, if any, stays until this is finished.

        `vector` is the document's, if it came with one (`Document.vector`).
        """
        slots = ", ".join("?" * len(_COLUMNS.split(",")))
        rows = [_row(document_id, content, i, chunk) for i, chunk in enumerate(chunks)]
        with self._guard(), self._db:
            self._remove(f"document_id = ? AND (content = ? OR {_BEGUN})", document_id, content)
            self._db.executemany(f"INSERT INTO chunks ({_COLUMNS}) VALUES ({slots})", rows)
            if vector is not None:
                blob = np.asarray(vector, dtype=np.float32).tobytes()
                self._db.execute(
                    "INSERT INTO vectors VALUES (?, ?, ?)", (document_id, content, blob)
                )

    def is_begun(self, document_id: str) -> bool:
        """Whether there is a version of the document that was never finished."""
        query = f"SELECT 1 FROM chunks WHERE document_id = ? AND {_BEGUN} LIMIT 1"
        return bool(self._select(query, document_id))

    def n_begun(self) -> int:
        """How many documents have a version that was never finished."""
        query = f"SELECT count(DISTINCT document_id) FROM chunks WHERE {_BEGUN}"
        return int(self._select(query)[0][0])

    def finish_document(self, document_id: str, content: str) -> None:
        """Put a version that was begun in the place of the one before."""
        with self._guard(), self._db:
            self._db.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?)", (document_id, content)
            )
            self._remove("document_id = ? AND content != ?", document_id, content)

    def delete_document(self, document_id: str) -> bool:
        """From now on the document is not there; whether it was. Its chunks become garbage."""
        with self._guard(), self._db:
            found = self._db.execute("DELETE FROM documents WHERE document_id = ?", (document_id,))
            self._db.execute(_UNPIN, (document_id,))
            self._remove("document_id = ?", document_id)
        return found.rowcount > 0

    def forget_begun(self) -> None:
        """Give up versions that were begun and never finished; their chunks become garbage."""
        with self._guard(), self._db:
            self._remove(_BEGUN)

    def pin(self, document_ids: Iterable[str], *, pinned: bool = True) -> None:
        """Keep the KV of documents from being evicted, or no longer."""
        query = "INSERT OR IGNORE INTO pins VALUES (?)" if pinned else _UNPIN
        with self._guard(), self._db:
            self._db.executemany(query, [(document_id,) for document_id in document_ids])

    def pins(self) -> list[str]:
        """Ids of pinned documents, sorted."""
        return [row[0] for row in self._select("SELECT document_id FROM pins ORDER BY 1")]

    # -- chunks --------------------------------------------------------------------------------

    def chunk_ids(self, document_id: str) -> list[ChunkId]:
        """Ids of a document's chunks, in order."""
        query = f"SELECT chunk_id FROM {_LIVE} WHERE document_id = ? ORDER BY position"
        return [ChunkId(row[0]) for row in self._select(query, document_id)]

    def live(self, chunk_ids: Iterable[ChunkId]) -> set[ChunkId]:
        """Those of the chunks that belong to a document that is there."""
        ids = list(dict.fromkeys(chunk_ids))
        found: set[ChunkId] = set()
        for start in range(0, len(ids), _IN_PAGE):
            page = ids[start : start + _IN_PAGE]
            slots = ", ".join("?" * len(page))
            query = f"SELECT chunk_id FROM {_LIVE} WHERE chunk_id IN ({slots})"
            found |= {ChunkId(row[0]) for row in self._select(query, *page)}
        return found

    def chunk(self, chunk_id: ChunkId) -> Chunk:
        """A chunk with its tokens and nuggets.

        Raises:
            ChunkNotFoundError: no such chunk was ever stored, or it was deleted.
        """
        query = (
            f"SELECT {_COLUMNS}, {_BEGUN} AS begun FROM chunks WHERE chunk_id = ? "
            "ORDER BY begun LIMIT 1"
        )
        rows = self._select(query, chunk_id)
        if not rows:
            raise ChunkNotFoundError(f"chunk {chunk_id!r:.80} is not in the catalog {self.path}")
        return _chunk(rows[0][:-1])

    def find(self, digits: str) -> list[Chunk]:
        """Chunks of documents that are there whose id begins with these hexadecimal digits."""
        query = f"SELECT {_COLUMNS} FROM {_LIVE} WHERE chunk_id >= ? AND chunk_id < ?"
        return [_chunk(row) for row in self._select(query, digits, f"{digits}g")]

    def has_chunk(self, chunk_id: ChunkId) -> bool:
        """Whether `chunk` would find it."""
        return bool(self._select("SELECT 1 FROM chunks WHERE chunk_id = ? LIMIT 1", chunk_id))

    def chunks(self) -> Iterator[Chunk]:
        """All chunks of documents that are there, by document and position, a page at a time."""
        query = (
            f"SELECT {_COLUMNS} FROM {_LIVE} WHERE (document_id, position) > (?, ?) "
            "ORDER BY document_id, position LIMIT 256"
        )
        last: tuple[str, int] = ("", -1)
        while rows := self._select(query, *last):
            page = [_chunk(row) for row in rows]
            yield from page
            last = (page[-1].document_id, page[-1].index)

    def vectors(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, NDArray[np.float32]]:
        """The vectors that documents came with that are there and of one chunk: [d] each."""
        found: dict[ChunkId, NDArray[np.float32]] = {}
        for start in range(0, len(chunk_ids), _IN_PAGE):
            page = chunk_ids[start : start + _IN_PAGE]
            slots = ", ".join("?" * len(page))
            query = (
                f"SELECT min(chunk_id), vector FROM {_LIVE} JOIN vectors USING (document_id, content) "
                f"WHERE document_id IN (SELECT document_id FROM chunks WHERE chunk_id IN ({slots})) "
                "GROUP BY document_id HAVING count(*) = 1"
            )
            found |= {
                ChunkId(chunk_id): np.frombuffer(blob, dtype=np.float32)
                for chunk_id, blob in self._select(query, *page)
            }
        return found

    def garbage(self) -> list[ChunkId]:
        """Chunks of no version of any document: to be removed from files and index, then purged."""
        query = "SELECT chunk_id FROM garbage WHERE chunk_id NOT IN (SELECT chunk_id FROM chunks)"
        return [ChunkId(row[0]) for row in self._select(query)]

    def purge(self, chunk_ids: Sequence[ChunkId]) -> None:
        """Forget garbage that has been removed; unknown ids are ignored."""
        with self._guard(), self._db:
            self._db.executemany(
                "DELETE FROM garbage WHERE chunk_id = ?", [(chunk_id,) for chunk_id in chunk_ids]
            )

    def counts(self) -> dict[str, int]:
        """How many documents there are, and chunks of them."""
        query = f"SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM {_LIVE})"
        documents, chunks = self._select(query)[0]
        return {"documents": documents, "chunks": chunks}

    # -- life ----------------------------------------------------------------------------------

    def secret(self) -> bytes:
        """32 random bytes that are this catalog's own, made when first asked for."""
        query = "SELECT value FROM meta WHERE key = 'secret'"
        if not (rows := self._select(query)):
            with self._guard(), self._db:
                self._db.execute(
                    "INSERT OR IGNORE INTO meta VALUES ('secret', ?)", (secrets.token_hex(32),)
                )
            rows = self._select(query)
        try:
            return bytes.fromhex(rows[0][0])
        except ValueError as error:
            raise StoreError(f"the secret in {self.path} is damaged: {error}") from error

    def compact(self) -> None:
        """Give space that is no longer used back to the disk."""
        with self._guard():
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def check_integrity(self) -> list[str]:
        """What SQLite finds wrong with the file; nothing if it is in order."""
        found = [row[0] for row in self._select("PRAGMA integrity_check")]
        return [] if found == ["ok"] else found

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

    def _check(self, expected: Mapping[str, str]) -> None:
        found = dict(self._select("SELECT key, value FROM meta"))
        if new := [(key, value) for key, value in expected.items() if key not in found]:
            with self._guard(), self._db:
                self._db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", new)
            found = dict(self._select("SELECT key, value FROM meta"))
        for key, value in expected.items():
            if found[key] != value:
                raise FingerprintMismatchError(
                    f"the catalog {self.path} was made for {key} {found[key]!r:.40}, not for "
                    f"{value!r:.40}: use what it was built with, or another store"
                )

    def _remove(self, where: str, *values: Any) -> None:
        """Remove chunks of versions, and remember their ids as garbage. Within a transaction."""
        query = f"INSERT OR IGNORE INTO garbage SELECT chunk_id FROM chunks WHERE {where}"
        self._db.execute(query, values)
        self._db.execute(f"DELETE FROM chunks WHERE {where}", values)
        self._db.execute(f"DELETE FROM vectors WHERE {where}", values)

    def _select(self, query: str, *values: Any) -> list[Any]:
        with self._guard():
            return self._db.execute(query, values).fetchall()

    def _guard(self) -> _Guard:
        return _Guard(self._lock, self.path)


def pinned_chunks(path: Path) -> set[ChunkId]:
    """Chunks whose KV is not to be evicted, of the catalog in a file; none if there is no file.

    Raises:
        StoreError: the file cannot be read.
    """
    if not path.exists():
        return set()
    query = f"SELECT chunk_id FROM {_LIVE} WHERE document_id IN (SELECT document_id FROM pins)"
    try:
        with closing(sqlite3.connect(path, timeout=30)) as db:
            return {ChunkId(row[0]) for row in db.execute(query)}
    except sqlite3.Error as error:
        raise StoreError(f"cannot use the catalog {path}: {error}") from error


class _Guard:
    """Holds the catalog's lock, and names the file in what SQLite raises."""

    def __init__(self, lock: threading.Lock, path: Path) -> None:
        self._lock, self._path = lock, path

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._lock.release()
        if isinstance(error, sqlite3.Error | UnicodeEncodeError):  # ids may be no text
            raise StoreError(f"cannot use the catalog {self._path}: {error}") from error


def _row(document_id: str, content: str, position: int, chunk: Chunk) -> tuple[Any, ...]:
    nuggets = [
        [n.text, n.span.start, n.span.stop, n.char_start, n.char_stop, n.match, n.similarity]
        for n in chunk.nuggets
    ]
    return (
        document_id,
        content,
        position,
        chunk.chunk_id,
        chunk.char_start,
        chunk.text,
        np.asarray(chunk.token_ids, dtype=np.int32).tobytes(),
        np.asarray(chunk.offsets, dtype=np.int32).tobytes(),
        json.dumps(nuggets, ensure_ascii=False),
        json.dumps(dict(chunk.metadata), ensure_ascii=False),
    )


def _chunk(row: tuple[Any, ...]) -> Chunk:
    document_id, _, index, chunk_id, char_start, text, ids, offsets, nuggets, metadata = row
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
