"""The KV of one fingerprint and scope: put, look up, read spans, delete. Knows no text and no model.

    <root>/fingerprint.json               what every chunk file below depends on
    <root>/ab/ab34….safetensors           one chunk (see `format`)

What is not in memory is read from disk (`near`), what is not on disk from remote storage (`far`), if
there is any.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import SafetensorError

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.kernels import Quantise
from coinrag_integrations.engine.kernels.reference import quantise as reference_quantise
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store import variants
from coinrag_integrations.engine.store.codec import CODECS, Codec, chunk_bytes
from coinrag_integrations.engine.store.disk import Disk
from coinrag_integrations.engine.store.far import FarChunks
from coinrag_integrations.engine.store.format import ChunkHeader, PackedChunk, write_chunk
from coinrag_integrations.engine.store.memory import MemoryTier
from coinrag_integrations.engine.store.near import NearChunks, ReadReport
from coinrag_integrations.engine.store.remote import Remote
from coinrag_integrations.engine.store.stage import Stage
from coinrag_integrations.errors import ChunkNotFoundError, SpanError, StoreError
from coinrag_integrations.types import ChunkId, Scope, Span, SpanRef

Tier = Literal["disk", "remote"]
_HEADER_ROOM = 4096


class KVStore:
    """The KV of many chunks. Safe to read from many threads; one process writes."""

    def __init__(
        self,
        root: Path,
        layout: KVLayout,
        fingerprint: Fingerprint,
        *,
        scope: Scope | None = None,
        disk: Disk | None = None,
        quantise: Quantise = reference_quantise,
        memory_bytes: int = 0,
        memory: MemoryTier | None = None,
        remote: Remote | None = None,
        n_threads: int = 8,
    ) -> None:
        """Open the folder `root`, creating it if it is not there.

        What is put goes to `remote` as well; what is not in the folder is read from there. `memory` is
        shared with other stores of the same chunks, instead of `memory_bytes` of its own.

        Raises:
            FingerprintMismatchError: its chunks were encoded differently; names the fields.
            StoreError: the folder cannot be read or created.
        """
        if fingerprint.codec not in CODECS:
            raise StoreError(f"codec {fingerprint.codec!r} is not one of {', '.join(CODECS)}")
        self.root, self.fingerprint, self.scope = root, fingerprint, scope or Scope()
        self.codec = Codec(fingerprint.codec, layout, fingerprint.ratio)
        self.disk = disk or Disk(root)
        self._digest, self._quantise = fingerprint.digest, quantise
        variants.claim(root, fingerprint)
        self._near = NearChunks(
            root=root,
            codec=self.codec,
            digest=self._digest,
            disk=self.disk,
            memory=memory or MemoryTier(max_bytes=memory_bytes),
        )
        self._remote = remote
        self._far = (
            FarChunks(remote=remote, scope=self.scope, codec=self.codec, digest=self._digest)
            if remote
            else None
        )
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="coinrag-read")

    def beside(self, fingerprint: Fingerprint) -> KVStore:
        """The store of the same chunks in another form, beside this one; opened, or begun.

        Raises:
            StoreError: the folder cannot be read or created.
        """
        return KVStore(
            variants.choose_variant(self.root.parent, fingerprint, add=True),
            self.layout,
            fingerprint,
            scope=self.scope,
            disk=self.disk,
            quantise=self._quantise,
            memory=self._near.memory,
            remote=self._remote,
        )

    @property
    def layout(self) -> KVLayout:
        """The layout of entries."""
        return self.codec.layout

    def path(self, chunk_id: ChunkId) -> Path:
        """Where a chunk's file is, or would be.

        Raises:
            ChunkNotFoundError: the id is not one of ours (it may come from a prompt or a database).
        """
        return variants.chunk_path(self.root, chunk_id)

    def __contains__(self, chunk_id: ChunkId) -> bool:
        """Whether there is a local file for the chunk. It is checked when it is read."""
        return self.path(chunk_id).is_file()

    def __iter__(self) -> Iterator[ChunkId]:
        """The ids of all chunks that have a local file."""
        return (ChunkId(path.stem) for path in self._files() if self._is_in_place(path))

    def strays(self) -> list[Path]:
        """Files in the folders of chunks that are no chunk's file, temporary ones apart."""
        return [path for path in self._files() if not self._is_in_place(path)]

    # -- writing -------------------------------------------------------------------------------

    def pack(
        self, kv: torch.Tensor, ranges: Sequence[Span], n_tokens: int | None = None
    ) -> PackedChunk:
        """What would be stored of a chunk's kv, on any device, for these ranges of tokens.

        kv [T, L, 2, H, D] are the entries of all of its `n_tokens` (T if left out), or slots [S, ...].

        Raises:
            StoreError: the codec cannot hold these numbers.
        """
        n_tokens = len(kv) if n_tokens is None else n_tokens
        whole = [Span(0, n_tokens)] if n_tokens else []
        rows = [self.codec.rows(whole, span) or slice(0, 0) for span in ranges]
        covered = [kv[it] for it in rows]
        entries = torch.cat(covered) if covered else kv[:0]
        return self.pack_entries(entries, ranges, n_tokens)

    def pack_entries(
        self, entries: torch.Tensor, ranges: Sequence[Span], n_tokens: int
    ) -> PackedChunk:
        """Like `pack`, of the entries [E, L, 2, H, D] of the ranges alone."""
        parts = self.codec.pack(entries, self._quantise)
        return PackedChunk(n_tokens=n_tokens, ranges=tuple(ranges), parts=parts, codec=self.codec)

    def put(
        self,
        chunk_id: ChunkId,
        kv: torch.Tensor,
        ranges: Sequence[Span],
        n_tokens: int | None = None,
    ) -> None:
        """Store the tokens in `ranges` (disjoint, in order) of a chunk's kv [T, L, 2, H, D]: see `pack`.

        Replaces what was there. The file appears whole or not at all.

        Raises:
            StoreError: the disk refuses (full, read-only, no permission), or the store's cap leaves
                no room; nothing is left behind.
            RemoteError: the remote storage refuses; the local file stays.
        """
        self.put_packed(chunk_id, self.pack(kv, ranges, n_tokens))

    def put_packed(self, chunk_id: ChunkId, chunk: PackedChunk) -> None:
        """Like `put`, of what is packed already."""
        path = self.path(chunk_id)
        n_entries = self.codec.n_entries(chunk.ranges)
        n_bytes = chunk_bytes(self.codec, n_entries) + _HEADER_ROOM
        with self.disk.room(self.scope.tenant, n_bytes):
            try:
                path.parent.mkdir(exist_ok=True)
                write_chunk(path, chunk_id, chunk, self._digest)
            except (OSError, SafetensorError) as error:
                raise StoreError(f"cannot write {path}: {error}") from error
            finally:
                self.forget(chunk_id)
        if self._far is not None:
            self._far.put(chunk_id, path)

    def delete(self, chunk_id: ChunkId) -> bool:
        """Remove a chunk's file, and its remote object; whether there was one.

        Raises:
            StoreError: the disk, or the remote storage, refuses.
        """
        path = self.path(chunk_id)
        self.forget(chunk_id)
        try:
            path.unlink()
            was_there = True
        except FileNotFoundError:
            was_there = False
        except OSError as error:
            raise StoreError(f"cannot delete {path}: {error}") from error
        return was_there | (self._far is not None and self._far.delete(chunk_id))

    # -- reading -------------------------------------------------------------------------------

    def header(self, chunk_id: ChunkId) -> ChunkHeader:
        """What is stored of a chunk, on disk or else remotely.

        Raises:
            ChunkNotFoundError: nothing is.
            CorruptChunkError: it cannot be trusted.
            RemoteError: the remote storage cannot be reached.
        """
        if self.tier(chunk_id) == "remote" and self._far is not None:
            return self._far.header(chunk_id)
        return self._near.header(chunk_id)

    def is_uploaded(self, chunk_id: ChunkId) -> bool:
        """Whether the remote storage, if there is one, has the chunk.

        Raises:
            RemoteError: it cannot be reached.
        """
        return self._far is None or self._far.has(chunk_id)

    def tier(self, chunk_id: ChunkId) -> Tier:
        """Where a chunk would be read from."""
        return "disk" if chunk_id in self or self._far is None else "remote"

    def stage(self, refs: Sequence[SpanRef], *, pin: bool = False) -> Stage:
        """Room for spans, one behind the other; `pin` its memory, so that a GPU can fetch it.

        Raises:
            SpanError: a span is to be read at another ratio than this store's.
        """
        for ref in refs:
            if ref.ratio != self.codec.ratio:
                raise SpanError(
                    f"span {ref} wants an entry for every {ref.ratio} tokens, the store {self.root} has "
                    f"one for every {self.codec.ratio}"
                )
        return Stage.allocate(self.codec, refs, pin=pin)

    def read(
        self,
        stage: Stage,
        spans: slice = slice(None),
        *,
        without: Collection[ChunkId] = (),
    ) -> ReadReport:
        """Read spans into their rows of a stage: exactly the bytes of their entries and scales.

        The rows of a span that failed are undefined, all others are verified. Chunks in `without` are
        left out.
        """
        report = ReadReport()
        by_chunk: dict[ChunkId, list[int]] = {}
        for index in range(len(stage.refs))[spans]:
            by_chunk.setdefault(stage.refs[index].chunk_id, []).append(index)
        for chunk_id in [i for i in by_chunk if i in without or not variants.is_id(i)]:
            indices = by_chunk.pop(chunk_id)
            if chunk_id not in without:
                report.errors |= dict.fromkeys(indices, variants.no_id(chunk_id))
        self._near.read(stage, by_chunk, report)
        if self._far is not None:
            self._read_far(self._far, stage, by_chunk, report)
        return report

    def start_read(
        self, stage: Stage, spans: slice, *, without: Collection[ChunkId] = ()
    ) -> Future[ReadReport]:
        """Like `read`, but return at once; what was started first is done first."""
        return self._pool.submit(self.read, stage, spans, without=without)

    def verify(self, chunk_id: ChunkId) -> ChunkHeader:
        """Read a chunk's whole local file and check every byte of it.

        Raises:
            ChunkNotFoundError, CorruptChunkError: it is not there, or cannot be trusted.
        """
        self.path(chunk_id)
        return self._near.verify(chunk_id)

    def n_bytes(self) -> int:
        """Bytes of all local chunk files."""
        return sum(map(_size, self._files()))

    def close(self) -> None:
        """Stop reading; wait for what is being fetched from remote storage."""
        self._near.closed = True
        self._pool.shutdown()
        if self._far is not None:
            self._far.close()

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _files(self) -> list[Path]:
        return sorted(p for p in self.root.glob("??/*") if not p.name.startswith("."))

    def _is_in_place(self, path: Path) -> bool:
        return variants.is_id(path.stem) and path == self.path(ChunkId(path.stem))

    def _read_far(
        self,
        far: FarChunks,
        stage: Stage,
        by_chunk: Mapping[ChunkId, Sequence[int]],
        report: ReadReport,
    ) -> None:
        """Read from remote storage what is not on disk, all chunks at once; then fetch it for good."""
        missing = {
            chunk_id: spans
            for chunk_id, spans in by_chunk.items()
            if isinstance(report.errors.get(spans[0]), ChunkNotFoundError) and chunk_id not in self
        }
        begin = time.perf_counter()
        for chunk_id, (n_bytes, errors) in far.read(stage, missing).items():
            for index in missing[chunk_id]:
                report.errors.pop(index, None)
            report.errors |= errors
            report.remote |= n_bytes
            if n_bytes:
                far.fetch_later(chunk_id, self.path(chunk_id), self._room)
        report.remote_seconds += time.perf_counter() - begin

    @contextmanager
    def _room(self, n_bytes: int) -> Iterator[bool]:
        """Make room for a file that the block fetches, unless somebody else is writing."""
        with self.disk.if_free() as free:
            if not free:
                yield False
                return
            with self.disk.room(self.scope.tenant, n_bytes):
                yield True

    def forget(self, chunk_id: ChunkId) -> None:
        """Drop what is in memory of a chunk."""
        self._near.forget(chunk_id)
        if self._far is not None:
            self._far.forget(chunk_id)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # deleted or evicted meanwhile
        return 0
