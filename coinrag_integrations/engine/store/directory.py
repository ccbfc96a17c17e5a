"""A directory of chunk files of one fingerprint: put, look up, read spans, delete.

    <root>/fingerprint.json               what every chunk file below depends on
    <root>/ab/ab34….safetensors           one chunk (see `format`)

Reads touch only the requested entries and verify each of them.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store.format import (
    ChunkHeader,
    entry_checksums,
    identity,
    read_header,
    write_chunk,
)
from coinrag_integrations.engine.store.lock import writing
from coinrag_integrations.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    FingerprintMismatchError,
    StoreError,
)
from coinrag_integrations.types import ChunkId, Span, SpanRef

_MAX_HEADERS = 65_536
_CHUNK_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class PendingRead:
    """Spans that are being read."""

    futures: tuple[Future[dict[int, StoreError]], ...]

    def wait(self) -> dict[int, StoreError]:
        """Wait for all of them; the errors by index, as `KVStore.read` gives them."""
        return {i: error for future in self.futures for i, error in future.result().items()}


class KVStore:
    """The KV of many chunks on disk. Safe to read from many threads; one process writes."""

    def __init__(
        self, root: Path, layout: KVLayout, fingerprint: Fingerprint, *, n_threads: int = 8
    ) -> None:
        """Open the store at `root`, creating it if it is not there.

        Raises:
            FingerprintMismatchError: its chunks were encoded differently; names the fields.
            StoreError: the directory cannot be read or created.
        """
        self.root, self.layout, self.fingerprint = root, layout, fingerprint
        self._digest = fingerprint.digest
        self._headers: OrderedDict[ChunkId, ChunkHeader] = OrderedDict()
        self._lock, self._writers = threading.Lock(), threading.RLock()
        try:
            root.mkdir(parents=True, exist_ok=True)
            check_fingerprint(root, fingerprint)
        except OSError as error:
            raise StoreError(f"cannot open the KV store {root}: {error}") from error
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="coinrag-read")

    def path(self, chunk_id: ChunkId) -> Path:
        """Where a chunk's file is, or would be.

        Raises:
            ChunkNotFoundError: the id is not one of ours (it may come from a prompt or a database).
        """
        if not _CHUNK_ID.fullmatch(chunk_id):
            raise ChunkNotFoundError(f"{chunk_id!r} is not a chunk id: expected 32 hex digits")
        return self.root / chunk_id[:2] / f"{chunk_id}.safetensors"

    def __contains__(self, chunk_id: ChunkId) -> bool:
        """Whether there is a file for the chunk. It is checked when it is read."""
        return self.path(chunk_id).is_file()

    def __iter__(self) -> Iterator[ChunkId]:
        """The ids of all chunks that have a file."""
        return (ChunkId(path.stem) for path in sorted(self.root.glob("??/*.safetensors")))

    def put(self, chunk_id: ChunkId, kv: torch.Tensor, ranges: Sequence[Span]) -> None:
        """Store the tokens in `ranges` (disjoint, in order) of a chunk's kv [T, L, 2, H, D].

        Replaces what was there. The file appears whole or not at all.

        Raises:
            StoreError: the disk refuses (full, read-only, no permission); nothing is left behind.
        """
        path = self.path(chunk_id)
        try:
            path.parent.mkdir(exist_ok=True)
            write_chunk(path, chunk_id, kv, ranges, self._digest)
        except (OSError, SafetensorError) as error:
            raise StoreError(f"cannot write {path}: {error}") from error
        finally:
            with self._lock:
                self._headers.pop(chunk_id, None)

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

    def read(self, refs: Sequence[SpanRef], out: torch.Tensor) -> dict[int, StoreError]:
        """Read spans, one behind the other, into `out` [sum of lengths, L, 2, H, D] on the CPU.

        Chunks are read in parallel. Returns the errors by index in `refs`: the rows of a span that
        failed are undefined, all others are verified. Reads exactly the bytes of the entries.

        Raises:
            ValueError: `out` has another shape than the spans need.
        """
        return self.start_read(refs, out).wait()

    def start_read(self, refs: Sequence[SpanRef], out: torch.Tensor) -> PendingRead:
        """Like `read`, but return at once; what was started first is done first.

        Raises:
            ValueError: `out` has another shape than the spans need.
        """
        total = sum(map(len, refs))
        if out.shape != self.layout.staged(total) or not out.is_contiguous():
            raise ValueError(f"out is {tuple(out.shape)}, expected {self.layout.staged(total)}")
        jobs: dict[ChunkId, list[tuple[int, Span, torch.Tensor]]] = {}
        row = 0
        for index, ref in enumerate(refs):
            rows = out[row : row + len(ref)]
            jobs.setdefault(ref.chunk_id, []).append((index, Span(ref.start, ref.stop), rows))
            row += len(ref)
        return PendingRead(
            tuple(self._pool.submit(self._read_chunk, id_, job) for id_, job in jobs.items())
        )

    def delete(self, chunk_id: ChunkId) -> bool:
        """Remove a chunk's file; whether there was one.

        Raises:
            StoreError: the disk refuses.
        """
        with self._lock:
            self._headers.pop(chunk_id, None)
        try:
            self.path(chunk_id).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"cannot delete {self.path(chunk_id)}: {error}") from error
        return True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only process that writes to this store; threads of this object wait for each other.

        Raises:
            StoreError: another process is writing.
        """
        with self._writers, writing(self.root):
            yield

    def sweep(self) -> int:
        """Remove what an interrupted writer left; how many files. For the one writing process."""
        leftovers = list(self.root.glob("??/.*.tmp"))
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)

    def n_bytes(self) -> int:
        """Bytes of all chunk files."""
        return sum(path.stat().st_size for path in self.root.glob("??/*.safetensors"))

    def close(self) -> None:
        """Stop the reading threads."""
        self._pool.shutdown()

    def __enter__(self) -> Self:
        """The store itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _read_chunk(
        self, chunk_id: ChunkId, job: Sequence[tuple[int, Span, torch.Tensor]]
    ) -> dict[int, StoreError]:
        try:
            file = self._open(chunk_id)
        except StoreError as error:
            return {index: error for index, _, _ in job}
        try:
            header = self._header(chunk_id, file)
            failed: dict[int, StoreError] = {}
            for index, span, rows in job:
                try:
                    self._read_span(header, file, span, rows)
                except StoreError as error:
                    failed[index] = error
            return failed
        except StoreError as error:
            return {index: error for index, _, _ in job}
        finally:
            os.close(file)

    def _read_span(self, header: ChunkHeader, file: int, span: Span, rows: torch.Tensor) -> None:
        stored = header.rows(span)
        buffer = rows.view(torch.uint8).reshape(-1).numpy().data
        offset = header.kv_offset + stored.start * self.layout.bytes_per_entry
        try:
            n_read = os.preadv(file, [buffer], offset)
        except OSError as error:
            raise StoreError(f"cannot read {self.path(header.chunk_id)}: {error}") from error
        if n_read != len(buffer) or (entry_checksums(rows) != header.checksums[stored]).any():
            raise CorruptChunkError(
                f"{self.path(header.chunk_id)}: tokens [{span.start}, {span.stop}) are not the "
                "bytes that were written. They will not be used"
            )

    def _open(self, chunk_id: ChunkId) -> int:
        path = self.path(chunk_id)
        try:
            return os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise ChunkNotFoundError(f"chunk {chunk_id} is not in the store {self.root}") from error
        except OSError as error:
            raise StoreError(f"cannot open {path}: {error}") from error

    def _header(self, chunk_id: ChunkId, file: int) -> ChunkHeader:
        with self._lock:
            known = self._headers.get(chunk_id)
        if known is not None and known.identity == identity(os.fstat(file)):
            return known
        path = self.path(chunk_id)
        try:
            header = read_header(file, path, self.layout, self._digest)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error}") from error
        with self._lock:
            self._headers[chunk_id] = header
            if len(self._headers) > _MAX_HEADERS:
                self._headers.popitem(last=False)
        return header


def check_fingerprint(root: Path, fingerprint: Fingerprint) -> None:
    """Compare with the fingerprint that `root` was made for; note ours if there is none.

    Raises:
        FingerprintMismatchError: they differ; names the fields and both values.
        StoreError: the note cannot be read.
    """
    path = root / "fingerprint.json"
    if not path.exists():
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(fingerprint.to_dict(), indent=1), encoding="utf-8")
        temporary.replace(path)
        return
    try:
        found = Fingerprint.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read: {error}. Build the store anew") from error
    names = found.differences(fingerprint)
    if names:
        values = "; ".join(
            f"{n} is {_short(getattr(found, n))}, this engine has {_short(getattr(fingerprint, n))}"
            for n in names
        )
        raise FingerprintMismatchError(
            f"the store {root} was built differently: {values}. Use the model and options it was "
            "built with, or build another store"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:16]}…"
