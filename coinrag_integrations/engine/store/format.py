"""One chunk, one file: how a chunk's KV lies in a safetensors file. Knows no directory and no model.

Tensors: `kv` [E, L, 2, H, D], the covered entries in token order, and `checksums` [E] uint64, the
XXH3 of each entry's bytes, so that a range can be verified without reading the rest. Metadata:
`coinrag`, a JSON object (format version, fingerprint, chunk id, token count, covered token ranges,
dtype and shape), and `check`, the XXH3 of that text.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors.torch import save_file

from coinrag_integrations.engine.fingerprint import FORMAT_VERSION
from coinrag_integrations.engine.layout import KVLayout, dtype_name
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError
from coinrag_integrations.types import ChunkId, Span

_MAX_HEADER = 16 << 20
Identity = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """What a chunk file says of itself, checked against what we expect of it.

    `identity` (inode, size, modification time) tells whether the file is still the one read;
    `kv_offset` is the byte at which the first entry starts.
    """

    chunk_id: ChunkId
    n_tokens: int
    ranges: tuple[Span, ...]
    checksums: NDArray[np.uint64]
    kv_offset: int
    identity: Identity

    def rows(self, span: Span) -> slice:
        """The entries that hold the tokens of `span`.

        Raises:
            ChunkNotFoundError: some of these tokens are not stored.
        """
        first = 0
        for covered in self.ranges:
            if covered.start <= span.start and span.stop <= covered.stop:
                start = first + span.start - covered.start
                return slice(start, start + len(span))
            first += len(covered)
        raise ChunkNotFoundError(
            f"tokens [{span.start}, {span.stop}) of chunk {self.chunk_id} are not stored: only the "
            "covered ranges of its nuggets are. Build the store with coverage 'all' to keep them"
        )


def entry_checksums(entries: torch.Tensor) -> NDArray[np.uint64]:
    """XXH3 of each entry's bytes: entries [E, L, 2, H, D] on the CPU, contiguous -> [E]."""
    if not len(entries):
        return np.empty(0, dtype=np.uint64)
    rows = entries.view(torch.uint8).reshape(len(entries), -1).numpy()
    return np.fromiter((xxhash.xxh3_64_intdigest(row) for row in rows), np.uint64, len(rows))


def write_chunk(
    path: Path, chunk_id: ChunkId, kv: torch.Tensor, ranges: Sequence[Span], fingerprint: str
) -> None:
    """Write a chunk's KV so that the file is either whole or not there.

    kv [T, L, 2, H, D] on any device, all tokens of the chunk; `ranges` are disjoint and in order,
    and only they are stored.
    """
    covered = [kv[span.start : span.stop] for span in ranges]
    entries = torch.cat(covered).cpu().contiguous() if covered else kv[:0].cpu()
    meta = json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "chunk_id": chunk_id,
            "n_tokens": len(kv),
            "ranges": [[span.start, span.stop] for span in ranges],
            "dtype": dtype_name(kv.dtype),
            "shape": list(entries.shape),
        }
    )
    checksums = torch.from_numpy(entry_checksums(entries))
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(
            {"kv": entries, "checksums": checksums},
            temporary,
            metadata={"coinrag": meta, "check": _check(meta)},
        )
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_header(file: int, path: Path, layout: KVLayout, fingerprint: str) -> ChunkHeader:
    """Read and check everything of an open chunk file but its entries.

    Raises:
        CorruptChunkError: the file is not the whole chunk file that its name promises.
    """
    status = os.fstat(file)
    start = 8 + int.from_bytes(os.pread(file, 8, 0), "little")
    if not 8 < start <= min(status.st_size, _MAX_HEADER):
        raise _corrupt(path, "it has no safetensors header")
    try:
        header: dict[str, Any] = json.loads(os.pread(file, start - 8, 8))
        text = header["__metadata__"]["coinrag"]
        checked = header["__metadata__"]["check"] == _check(text)
        kv, sums = (_extent(header[name]["data_offsets"]) for name in ("kv", "checksums"))
        meta: dict[str, Any] = json.loads(text)
        ranges = tuple(Span(int(a), int(b)) for a, b in meta["ranges"])
        n_tokens = int(meta["n_tokens"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(path, "its header cannot be read") from error
    if not checked:
        raise _corrupt(path, "its metadata does not match its checksum")
    n_entries = sum(map(len, ranges))
    expected = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "chunk_id": path.stem,
        "dtype": dtype_name(layout.dtype),
        "shape": list(layout.staged(n_entries)),
    }
    for name, value in expected.items():
        if meta.get(name) != value:
            raise _corrupt(path, f"its {name} is {meta.get(name)!r}, expected {value!r}")
    complete = len(kv) == n_entries * layout.bytes_per_entry and len(sums) == 8 * n_entries
    if not complete or status.st_size != start + max(kv.stop, sums.stop):
        raise _corrupt(path, f"it is {status.st_size} bytes long, which is not what it describes")
    return ChunkHeader(
        chunk_id=ChunkId(path.stem),
        n_tokens=n_tokens,
        ranges=ranges,
        checksums=np.frombuffer(os.pread(file, len(sums), start + sums.start), dtype=np.uint64),
        kv_offset=start + kv.start,
        identity=identity(status),
    )


def _extent(offsets: Any) -> range:
    """Where a tensor's bytes lie behind the header."""
    start, stop = map(int, offsets)
    if not 0 <= start <= stop:
        raise ValueError(f"data_offsets {offsets}")
    return range(start, stop)


def identity(status: os.stat_result) -> Identity:
    """What tells one file from another at the same path."""
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _check(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _corrupt(path: Path, reason: str) -> CorruptChunkError:
    return CorruptChunkError(f"{path} cannot be trusted: {reason}. It will not be used")


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
