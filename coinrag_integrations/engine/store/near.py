"""The chunk files of one fingerprint in a local folder: open, check, read spans. Writes nothing.

Reads touch only the requested entries and verify each of them. What was read stays in the memory tier,
as long as the file is the one it was read from.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from coinrag_integrations.engine.store.codec import Codec, Memory, memory_of
from coinrag_integrations.engine.store.disk import Disk
from coinrag_integrations.engine.store.format import (
    ChunkHeader,
    identity,
    read_header,
    row_checksums,
)
from coinrag_integrations.engine.store.memory import Kept, MemoryTier
from coinrag_integrations.engine.store.stage import Stage
from coinrag_integrations.engine.store.variants import chunk_path
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError, StoreError
from coinrag_integrations.types import ChunkId, Span

_MAX_HEADERS = 65_536
_OPEN_AT_ONCE = 64
_MUCH = 16 << 20  # bytes from which on threads pay
_THREADS = 4
# Not through a link, and without waiting for whoever may write into a pipe of that name.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(slots=True)
class ReadReport:
    """What reading spans came to, by the index of the span: errors, and bytes by where they were."""

    errors: dict[int, StoreError] = field(default_factory=dict)
    disk: dict[int, int] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)
    remote: dict[int, int] = field(default_factory=dict)
    remote_seconds: float = 0.0

    def add(self, other: ReadReport) -> None:
        """Add what was read of other spans."""
        self.errors |= other.errors
        self.disk |= other.disk
        self.memory |= other.memory
        self.remote |= other.remote
        self.remote_seconds += other.remote_seconds


@dataclass(frozen=True, slots=True)
class _Opened:
    """A chunk's open file, and the spans that are to be read from it with their entries."""

    file: int
    header: ChunkHeader
    wanted: list[tuple[int, slice]]


@dataclass(kw_only=True)
class NearChunks:
    """The local files of one fingerprint and scope. Safe to use from many threads."""

    root: Path
    codec: Codec
    digest: str
    disk: Disk
    memory: MemoryTier
    closed: bool = False
    _headers: OrderedDict[ChunkId, ChunkHeader] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def header(self, chunk_id: ChunkId) -> ChunkHeader:
        """What is stored of a chunk.

        Raises:
            ChunkNotFoundError: nothing is.
            CorruptChunkError: its file cannot be trusted.
        """
        file = self._open(chunk_id)
        try:
            return self._header(chunk_id, file)
        finally:
            os.close(file)

    def read(
        self, stage: Stage, by_chunk: Mapping[ChunkId, Sequence[int]], report: ReadReport
    ) -> None:
        """Read spans, given by chunk as indices in the stage, into their rows."""
        jobs = list(by_chunk.items())
        for first in range(0, len(jobs), _OPEN_AT_ONCE):
            self._read_chunks(stage, jobs[first : first + _OPEN_AT_ONCE], report)

    def verify(self, chunk_id: ChunkId) -> ChunkHeader:
        """Read a chunk's whole file and check every byte of it.

        Raises:
            ChunkNotFoundError, CorruptChunkError: as for `header`, or a checksum does not fit.
        """
        self.forget(chunk_id)
        file = self._open(chunk_id)
        try:
            header = self._header(chunk_id, file)
            for part in self.codec.parts:
                rows = torch.empty(part.shape(header.n_entries), dtype=part.dtype)
                self._read_rows(header, file, part.name, slice(0, len(rows)), memory_of(rows))
            return header
        finally:
            os.close(file)

    def forget(self, chunk_id: ChunkId) -> None:
        """Drop what is in memory of a chunk."""
        with self._lock:
            self._headers.pop(chunk_id, None)
        self.memory.drop(chunk_id)

    def _read_chunks(
        self, stage: Stage, jobs: Sequence[tuple[ChunkId, Sequence[int]]], report: ReadReport
    ) -> None:
        """Ask the system for everything first, then read one behind the other.

        Threads help where there is much to verify beside reading; a few spans they only delay, since they
        wait for the interpreter: docs/log.md.
        """
        opened: list[_Opened] = []
        try:
            for chunk_id, spans in jobs:
                try:
                    file = self._open(chunk_id)
                    opened.append(self._start(stage, chunk_id, file, spans, report))
                except StoreError as error:
                    report.errors |= dict.fromkeys(spans, error)
            reads = [(it, index, stored) for it in opened for index, stored in it.wanted]

            def read(job: tuple[_Opened, int, slice]) -> None:
                it, index, stored = job
                try:
                    self._read_span(stage, index, it, stored, report)
                except StoreError as error:
                    report.errors[index] = error

            n_entries = sum(stored.stop - stored.start for _, _, stored in reads)
            if len(reads) > 1 and self.codec.n_bytes(n_entries) >= _MUCH:
                with ThreadPoolExecutor(_THREADS, thread_name_prefix="coinrag-read") as pool:
                    list(pool.map(read, reads))
            else:
                for job in reads:
                    read(job)
        finally:
            for it in opened:
                os.close(it.file)

    def _start(
        self,
        stage: Stage,
        chunk_id: ChunkId,
        file: int,
        spans: Sequence[int],
        report: ReadReport,
    ) -> _Opened:
        """Take from memory what is there, and note what is to be read."""
        try:
            header = self._header(chunk_id, file)
        except StoreError:
            os.close(file)
            raise
        it = _Opened(file, header, [])
        for index in spans:
            ref = stage.refs[index]
            if kept := self.memory.get(ref, header.identity):
                stage.fill(index, kept.parts, kept.stored, origin=kept.stored.start)
                report.memory[index] = kept.n_bytes
                continue
            try:
                stored = header.rows(Span(ref.start, ref.stop))
            except StoreError as error:
                report.errors[index] = error
                continue
            it.wanted.append((index, stored))
            for part, rows, target in stage.targets(index, stored):
                start = header.parts[part.name].offset + rows.start * part.row_bytes
                _will_need(file, start, target.nbytes)
        return it

    def _read_span(
        self, stage: Stage, index: int, it: _Opened, stored: slice, report: ReadReport
    ) -> None:
        n_bytes = 0
        for part, rows, target in stage.targets(index, stored):
            self._read_rows(it.header, it.file, part.name, rows, target)
            n_bytes += target.nbytes
        report.disk[index] = n_bytes
        if self.memory.max_bytes:
            parts = {
                part.name: torch.from_numpy(target.copy())
                for part, _, target in stage.targets(index, stored)
            }
            kept = Kept(parts=parts, stored=stored, identity=it.header.identity)
            self.memory.put(stage.refs[index], kept)

    def _read_rows(
        self, header: ChunkHeader, file: int, name: str, rows: slice, target: Memory
    ) -> None:
        """Read rows of one part into `target`, and verify them."""
        on_disk, buffer = header.parts[name], target.reshape(-1).data
        start, done = on_disk.offset + rows.start * target.shape[1], 0
        try:
            while done < len(buffer):  # one read is at most 2 GB
                n_read = os.preadv(file, [buffer[done:]], start + done)
                if not n_read:
                    break
                done += n_read
        except OSError as error:
            raise StoreError(f"cannot read {self._path(header.chunk_id)}: {error}") from error
        if done < len(buffer) or (row_checksums(target) != on_disk.checksums[rows]).any():
            raise CorruptChunkError(
                f"{self._path(header.chunk_id)}: rows [{rows.start}, {rows.stop}) of {name} are not "
                "the bytes that were written. They will not be used"
            )

    def _path(self, chunk_id: ChunkId) -> Path:
        return chunk_path(self.root, chunk_id)

    def _open(self, chunk_id: ChunkId) -> int:
        if self.closed:
            raise StoreError(f"the store {self.root} was closed: open it again")
        try:
            return os.open(f"{self.root}/{chunk_id[:2]}/{chunk_id}.safetensors", _OPEN)
        except FileNotFoundError as error:
            raise ChunkNotFoundError(f"chunk {chunk_id} is not in the store {self.root}") from error
        except OSError as error:
            raise StoreError(f"cannot open {self._path(chunk_id)}: {error}") from error

    def _header(self, chunk_id: ChunkId, file: int) -> ChunkHeader:
        try:
            status = os.fstat(file)
            self.disk.touch(file, status)
            with self._lock:
                known = self._headers.get(chunk_id)
                if known is not None and known.identity == identity(status):
                    self._headers.move_to_end(chunk_id)
                    return known
            header = read_header(file, self._path(chunk_id), self.codec, self.digest)
        except OSError as error:
            raise StoreError(f"cannot read {self._path(chunk_id)}: {error}") from error
        with self._lock:
            self._headers[chunk_id] = header
            if len(self._headers) > _MAX_HEADERS:
                self._headers.popitem(last=False)
        return header


def _will_need(file: int, offset: int, n_bytes: int) -> None:
    """Have the system fetch a range while we do something else, where it can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, offset, n_bytes, os.POSIX_FADV_WILLNEED)
