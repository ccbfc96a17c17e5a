"""Chunk files in remote storage, behind the local folder: read by ranges, then kept locally.

Objects are named by tenant, collection, fingerprint and chunk: machines that build the same may share
them. A storage that was out of reach is left alone for a while, so that not every question waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coinrag_integrations.engine.store.codec import Codec, Memory
from coinrag_integrations.engine.store.format import (
    HEAD_BYTES,
    ChunkHeader,
    parse_header,
    row_checksums,
)
from coinrag_integrations.engine.store.remote import Remote
from coinrag_integrations.engine.store.stage import Stage
from coinrag_integrations.engine.store.variants import chunk_key
from coinrag_integrations.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    RemoteError,
    StoreError,
)
from coinrag_integrations.files import publish
from coinrag_integrations.types import ChunkId, Scope, Span

Room = Callable[[int], AbstractContextManager[bool]]
logger = logging.getLogger(__name__)

_MAX_HEADERS = 65_536
_AT_ONCE = 16
_LEFT_ALONE_S = 15.0


@dataclass(kw_only=True)
class FarChunks:
    """The remote objects of one fingerprint and scope. Safe to use from many threads."""

    remote: Remote
    scope: Scope
    codec: Codec
    digest: str
    _headers: OrderedDict[ChunkId, ChunkHeader] = field(default_factory=OrderedDict)
    _fetching: set[ChunkId] = field(default_factory=set)
    _down: tuple[float, RemoteError] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="coinrag-fetch")
    )

    def key(self, chunk_id: ChunkId) -> str:
        """The name of a chunk's object."""
        return chunk_key(self.scope, self.digest[:16], chunk_id)

    def header(self, chunk_id: ChunkId) -> ChunkHeader:
        """What is stored of a chunk.

        Raises:
            ChunkNotFoundError: there is no such object.
            CorruptChunkError: it cannot be trusted.
            RemoteError: the storage cannot be reached.
        """
        with self._lock:
            if chunk_id in self._headers:
                self._headers.move_to_end(chunk_id)
                return self._headers[chunk_id]
        key = self.key(chunk_id)
        try:
            size = self.remote.size(key)
            (head,) = self.remote.read_ranges(key, [range(min(size, HEAD_BYTES))])
        except FileNotFoundError as error:
            raise ChunkNotFoundError(
                f"chunk {chunk_id} is neither in the store nor in {self.remote.url}"
            ) from error

        def pread(n: int, offset: int) -> bytes:
            if offset + n <= len(head):
                return head[offset : offset + n]
            stop = min(offset + n, size)
            return self.remote.read_ranges(key, [range(min(offset, stop), stop)])[0]

        header = parse_header(pread, Path(key), self.codec, self.digest, (0, size, 0))
        with self._lock:
            self._headers[chunk_id] = header
            if len(self._headers) > _MAX_HEADERS:
                self._headers.popitem(last=False)
        return header

    def read(
        self, stage: Stage, by_chunk: Mapping[ChunkId, Sequence[int]]
    ) -> dict[ChunkId, tuple[dict[int, int], dict[int, StoreError]]]:
        """Read spans into their rows, all chunks at once: by chunk, bytes and errors by span."""
        if not by_chunk:
            return {}
        with ThreadPoolExecutor(min(len(by_chunk), _AT_ONCE)) as pool:
            found = pool.map(lambda item: self._read_chunk(stage, *item), by_chunk.items())
            return dict(zip(by_chunk, found, strict=True))

    def has(self, chunk_id: ChunkId) -> bool:
        """Whether there is an object for a chunk.

        Raises:
            RemoteError: the storage cannot be reached.
        """
        return self.remote.exists(self.key(chunk_id))

    def put(self, chunk_id: ChunkId, path: Path) -> None:
        """Upload a chunk's file.

        Raises:
            RemoteError: the storage cannot be reached, or refuses.
        """
        self.forget(chunk_id)
        self.remote.put(self.key(chunk_id), path)

    def delete(self, chunk_id: ChunkId) -> bool:
        """Remove a chunk's object; whether there was one.

        Raises:
            RemoteError: the storage cannot be reached, or refuses.
        """
        self.forget(chunk_id)
        return self.remote.delete(self.key(chunk_id))

    def fetch_later(self, chunk_id: ChunkId, path: Path, room: Room) -> None:
        """Fetch the whole object beside other work, if there is `room` for its bytes."""
        with self._lock:
            if chunk_id in self._fetching:
                return
            self._fetching.add(chunk_id)

        def work() -> None:
            try:
                with room(self.header(chunk_id).identity[1]) as granted:
                    if granted:
                        self.fetch(chunk_id, path)
            except StoreError as error:
                logger.warning("could not keep chunk %s locally: %s", chunk_id, error)
            finally:
                with self._lock:
                    self._fetching.discard(chunk_id)

        self._pool.submit(work)

    def fetch(self, chunk_id: ChunkId, path: Path) -> None:
        """Make the whole object the local file `path`.

        Raises:
            StoreError: the storage or the disk refuses; nothing is left behind.
        """
        temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            self.remote.fetch(self.key(chunk_id), temporary)
            publish(temporary, path)
        except OSError as error:
            raise StoreError(f"cannot fetch {path}: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def forget(self, chunk_id: ChunkId) -> None:
        """Drop what is in memory of a chunk."""
        with self._lock:
            self._headers.pop(chunk_id, None)

    def close(self) -> None:
        """Wait for what is being fetched."""
        self._pool.shutdown()

    def _read_chunk(
        self, stage: Stage, chunk_id: ChunkId, spans: Sequence[int]
    ) -> tuple[dict[int, int], dict[int, StoreError]]:
        down = self._down
        if down is not None and time.monotonic() < down[0]:
            return {}, dict.fromkeys(spans, down[1])
        for last in (False, True):
            try:
                return self._read(stage, self.header(chunk_id), spans)
            except RemoteError as error:
                self._down = (time.monotonic() + _LEFT_ALONE_S, error)
                return {}, dict.fromkeys(spans, error)
            except StoreError as error:
                self.forget(chunk_id)  # the object may have been replaced since its header was read
                if last or not isinstance(error, CorruptChunkError):
                    return {}, dict.fromkeys(spans, error)
        raise AssertionError

    def _read(
        self, stage: Stage, header: ChunkHeader, spans: Sequence[int]
    ) -> tuple[dict[int, int], dict[int, StoreError]]:
        key, errors = self.key(header.chunk_id), dict[int, StoreError]()
        wanted: list[tuple[int, str, slice, Memory]] = []
        for index in spans:
            ref = stage.refs[index]
            try:
                stored = header.rows(Span(ref.start, ref.stop))
            except StoreError as error:
                errors[index] = error
                continue
            for part, rows, target in stage.targets(index, stored):
                wanted.append((index, part.name, rows, target))
        ranges = []
        for _, name, rows, target in wanted:
            start = header.parts[name].offset + rows.start * target.shape[1]
            ranges.append(range(start, start + target.nbytes))
        try:
            pieces = self.remote.read_ranges(key, ranges) if ranges else []
        except FileNotFoundError as error:
            raise ChunkNotFoundError(
                f"chunk {header.chunk_id} is no longer in {self.remote.url}"
            ) from error
        n_bytes: dict[int, int] = {}
        for (index, name, rows, target), piece in zip(wanted, pieces, strict=True):
            target[:] = np.frombuffer(piece, dtype=np.uint8).reshape(target.shape)
            if (row_checksums(target) != header.parts[name].checksums[rows]).any():
                raise CorruptChunkError(
                    f"{self.remote.url}/{key}: rows [{rows.start}, {rows.stop}) of {name} are not "
                    "the bytes that were written. They will not be used"
                )
            n_bytes[index] = n_bytes.get(index, 0) + len(piece)
        return n_bytes, errors
