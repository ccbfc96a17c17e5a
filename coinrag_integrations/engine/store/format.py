"""One chunk, one file: how a chunk's KV lies in a safetensors file. Knows no directory and no model.

Tensors: the parts of the codec, of which the first holds one row an entry, in token order ("kv"
[E, L, 2, H, D] for codec "none"); and for each part `<name>.xxh3` uint64, the XXH3 of each of its rows,
so that a range can be verified without reading the rest. Metadata: `coinrag`, a JSON object (format
version, fingerprint, chunk id, token count, covered token ranges, XXH3 of all checksums), and `check`, the
XXH3 of that text.
"""

from __future__ import annotations

import json
import os
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from safetensors.torch import save_file

from coinrag_integrations.engine.fingerprint import FORMAT_VERSION
from coinrag_integrations.engine.store.codec import Codec, Memory, memory_of
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError
from coinrag_integrations.files import publish, share
from coinrag_integrations.types import ChunkId, Span

# A header of ours has one or two kilobytes; with the checksums of 512 entries, this holds it all.
HEAD_BYTES = 32 << 10
_MAX_HEADER = 1 << 20
_MAX_ENTRIES = 1 << 20  # no window is as long
_TORCH_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
Identity = tuple[int, int, int]
Pread = Callable[[int, int], bytes]  # (n_bytes, offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedChunk:
    """What is to be stored of a chunk: entries of `ranges` of tokens (disjoint, in order) as `parts`."""

    n_tokens: int
    ranges: tuple[Span, ...]
    parts: Mapping[str, torch.Tensor]
    codec: Codec

    def rows(self, span: Span) -> slice | None:
        """The entries that hold the tokens of `span`; None if some are not among them."""
        return self.codec.rows(self.ranges, span)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOnDisk:
    """Where the rows of a part start in the file, and their checksums."""

    offset: int
    checksums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """What a chunk file says of itself, checked against what we expect of it.

    `identity` (inode, size, modification time) tells whether the file is still the one read.
    """

    chunk_id: ChunkId
    n_tokens: int
    ranges: tuple[Span, ...]
    parts: Mapping[str, PartOnDisk]
    identity: Identity
    codec: Codec

    @property
    def n_entries(self) -> int:
        """Entries that are stored."""
        return self.codec.n_entries(self.ranges)

    def rows(self, span: Span) -> slice:
        """The entries that hold the tokens of `span`.

        Raises:
            ChunkNotFoundError: some of these tokens are not stored, or a slot would be cut.
        """
        rows = self.codec.rows(self.ranges, span)
        if rows is None:
            raise ChunkNotFoundError(
                f"tokens [{span.start}, {span.stop}) of chunk {self.chunk_id} are not stored: only "
                "the covered ranges of its nuggets are. Build the store with coverage 'all' to keep "
                "them"
                if self.codec.ratio == 1
                else f"tokens [{span.start}, {span.stop}) of chunk {self.chunk_id} are no slots: these "
                f"stand for {self.codec.ratio} of its {self.n_tokens} tokens each"
            )
        return rows


def row_checksums(rows: Memory) -> NDArray[np.uint64]:
    """XXH3 of each row's bytes: [R, bytes] -> [R]."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rows), np.uint64, len(rows))


def write_chunk(path: Path, chunk_id: ChunkId, chunk: PackedChunk, fingerprint: str) -> None:
    """Write a chunk so that its file is either whole or not there, also after a loss of power."""
    checksums = {name: row_checksums(memory_of(part)) for name, part in chunk.parts.items()}
    meta = json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "chunk_id": chunk_id,
            "n_tokens": chunk.n_tokens,
            "ranges": [[span.start, span.stop] for span in chunk.ranges],
            "checksums": _check_all(checksums.values()),
        }
    )
    tensors = dict(chunk.parts)
    for name, sums in checksums.items():
        tensors[f"{name}.xxh3"] = torch.from_numpy(sums)
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(tensors, temporary, metadata={"coinrag": meta, "check": _check(meta)})
        _order_metadata(temporary)
        share(temporary)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _order_metadata(path: Path) -> None:
    """Put the header's metadata in one order: safetensors has none, and equal chunks are equal files."""
    with path.open("r+b") as file:
        n = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(n))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":")).encode()
        file.seek(8)
        file.write(text.ljust(n))  # as long as it was: the same words in another order


def read_header(file: int, path: Path, codec: Codec, fingerprint: str) -> ChunkHeader:
    """Read and check everything of an open chunk file but its parts.

    Raises:
        CorruptChunkError: the file is not the whole chunk file that its name promises.
    """
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise _corrupt(path, "it is no regular file")
    return parse_header(
        lambda n, offset: os.pread(file, n, offset), path, codec, fingerprint, identity(status)
    )


def parse_header(
    pread: Pread, path: Path, codec: Codec, fingerprint: str, identity_: Identity
) -> ChunkHeader:
    """Like `read_header`, of anything that can be read: `identity_` holds the size.

    Raises:
        CorruptChunkError: it is not the whole chunk file that its name promises.
    """
    n_bytes = identity_[1]
    start = 8 + int.from_bytes(pread(8, 0), "little")
    if not 8 < start <= min(n_bytes, _MAX_HEADER):
        raise _corrupt(path, "it has no safetensors header")
    try:
        header: dict[str, Any] = json.loads(pread(start - 8, 8))
        text = header["__metadata__"]["coinrag"]
        checked = header["__metadata__"]["check"] == _check(text)
        meta: dict[str, Any] = json.loads(text)
        ranges = tuple(Span(int(a), int(b)) for a, b in meta["ranges"])
        n_tokens = Span(0, max(int(meta["n_tokens"]), 1)).stop if meta["n_tokens"] else 0
        disjoint = all(a.stop <= b.start for a, b in pairwise(ranges))
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise _corrupt(path, "its header cannot be read") from error
    if not checked:
        raise _corrupt(path, "its metadata does not match its checksum")
    expected = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "chunk_id": path.stem,
    }
    for name, value in expected.items():
        if meta.get(name) != value:
            raise _corrupt(path, f"its {name} is {meta.get(name)!r:.80}, expected {value!r}")
    if not disjoint or (ranges and ranges[-1].stop > n_tokens):
        raise _corrupt(path, f"its ranges are not ranges of {n_tokens} tokens")
    if any(span.start % codec.ratio for span in ranges):
        raise _corrupt(path, f"its ranges do not begin with slots of {codec.ratio} tokens")
    n_entries = codec.n_entries(ranges)
    if n_entries > _MAX_ENTRIES:
        raise _corrupt(path, f"it describes more than {_MAX_ENTRIES} entries")
    extents = _extents(path, header, codec, n_entries, n_bytes - start)
    checksums: dict[str, NDArray[np.uint64]] = {}
    for part in codec.parts:
        extent = extents[f"{part.name}.xxh3"]
        sums = pread(len(extent), start + extent.start) if extent else b""
        checksums[part.name] = np.frombuffer(sums, dtype=np.uint64)
    if meta.get("checksums") != _check_all(checksums.values()):
        raise _corrupt(path, "its checksums are not its own")
    return ChunkHeader(
        chunk_id=ChunkId(path.stem),
        n_tokens=n_tokens,
        ranges=ranges,
        parts={
            name: PartOnDisk(offset=start + extents[name].start, checksums=sums)
            for name, sums in checksums.items()
        },
        identity=identity_,
        codec=codec,
    )


def _extents(
    path: Path, header: dict[str, Any], codec: Codec, n_entries: int, n_bytes: int
) -> dict[str, range]:
    """Where each tensor's bytes lie behind the header: all that we expect, and nothing else."""
    expected: dict[str, tuple[str, list[int], int]] = {}
    for part in codec.parts:
        shape, n_rows = list(part.shape(n_entries)), part.n_rows(n_entries)
        expected[part.name] = (_TORCH_NAMES[part.dtype], shape, n_rows * part.row_bytes)
        expected[f"{part.name}.xxh3"] = ("U64", [n_rows], 8 * n_rows)
    found = {name: value for name, value in header.items() if name != "__metadata__"}
    if found.keys() != expected.keys():
        raise _corrupt(path, f"it holds {sorted(found)!r:.200}, expected {sorted(expected)}")
    extents: dict[str, range] = {}
    for name, (dtype, shape, size) in expected.items():
        try:
            said = (found[name]["dtype"], found[name]["shape"])
            first, stop = (int(offset) for offset in found[name]["data_offsets"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise _corrupt(path, "its header cannot be read") from error
        if said != (dtype, shape) or first < 0 or stop - first != size:
            raise _corrupt(path, f"its {name} is {said!r:.80}, expected {(dtype, shape)}")
        extents[name] = range(first, stop)
    end = 0
    for extent in sorted((e for e in extents.values() if e), key=lambda e: e.start):
        if extent.start != end:
            raise _corrupt(path, "its tensors overlap, or do not follow each other")
        end = extent.stop
    if end != n_bytes:
        raise _corrupt(path, f"{n_bytes} bytes follow its header, which describes {end}")
    return extents


def identity(status: os.stat_result) -> Identity:
    """What tells one file from another at the same path."""
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _check_all(checksums: Iterable[NDArray[np.uint64]]) -> str:
    digest = xxhash.xxh3_64()
    for sums in checksums:
        digest.update(sums.tobytes())
    return digest.hexdigest()


def _check(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _corrupt(path: Path, reason: str) -> CorruptChunkError:
    return CorruptChunkError(f"{path} cannot be trusted: {reason}. It will not be used")
