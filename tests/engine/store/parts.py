"""A small store and chunks for it."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.kernels import Quantised
from coinrag_integrations.engine.kernels.reference import dequantise
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store import Disk, KVStore, ReadReport, Stage, scope_folder
from coinrag_integrations.engine.store.disk import KV
from coinrag_integrations.engine.store.variants import choose_variant
from coinrag_integrations.types import ChunkId, Scope, Span, SpanRef

LAYOUT = KVLayout(n_layers=2, n_kv_heads=1, head_dim=4, dtype=torch.float32)
FINGERPRINT = Fingerprint(
    weights="w", tokenizer="t", rope="r", layout="2x2x1x4", dtype="float32", context="alone"
)

# Other processes, forked from one that has imported what takes seconds to import.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__, "chromadb"])


def chunk_id(name: object) -> ChunkId:
    return ChunkId(hashlib.md5(str(name).encode(), usedforsecurity=False).hexdigest())


def make_kv(n_tokens: int, layout: KVLayout = LAYOUT, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(layout.staged(n_tokens), generator=random).to(layout.dtype)


def open_store(
    folder: Path, layout: KVLayout = LAYOUT, *, memory_bytes: int = 0, **changes: str
) -> KVStore:
    """A store whose files lie in `folder` itself; `changes` are fields of its fingerprint."""
    return KVStore(folder, layout, replace(FINGERPRINT, **changes), memory_bytes=memory_bytes)


def open_scoped(
    disk: Disk, scope: Scope | None = None, layout: KVLayout = LAYOUT, **changes: str
) -> KVStore:
    """A store where an engine's would be: in its tenant's folder, under the caps of `disk`."""
    scope, fingerprint = scope or Scope(), replace(FINGERPRINT, **changes)
    kv = scope_folder(disk.root, scope) / KV
    folder = choose_variant(kv, fingerprint, add=True)
    return KVStore(folder, layout, fingerprint, scope=scope, disk=disk)


def poisoned(store: KVStore, refs: Sequence[SpanRef]) -> Stage:
    """A stage in which a row that nobody fills is not what was stored."""
    stage = store.stage(refs)
    for tensor in stage.tensors.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 255)
    return stage


def n_disk(report: ReadReport) -> int:
    """Bytes that were read from disk."""
    return sum(report.disk.values())


def n_memory(report: ReadReport) -> int:
    """Bytes that were found in memory."""
    return sum(report.memory.values())


def read_stage(store: KVStore, *refs: SpanRef) -> Stage:
    """Spans as they are stored; raises the first error."""
    stage = poisoned(store, refs)
    for _, error in sorted(store.read(stage).errors.items()):
        raise error
    return stage


def read(store: KVStore, *refs: SpanRef) -> torch.Tensor:
    """The entries of spans, as numbers; raises the first error."""
    entries = read_stage(store, *refs).entries(slice(None))
    return dequantise(entries) if isinstance(entries, Quantised) else entries


def rows_of_span(stage: Stage, index: int) -> dict[str, torch.Tensor]:
    """What a stage holds of a span, by part: its entries or codes, and all rows kept for its scales."""
    return {
        part.name: stage.tensors[part.name][
            stage.rows[index] if part.group == 1 else stage.groups[index]
        ]
        for part in stage.codec.parts
    }


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits, also where they are NaN."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def whole(n_tokens: int) -> list[Span]:
    return [Span(0, n_tokens)]


def in_another_process(work: Callable[..., object], *arguments: object) -> object:
    """What a function of a module returns, called in a process of its own, which then ends."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_send, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    finally:
        process.join()
    if isinstance(result, BaseException):
        raise result
    return result


def _send(to: Connection, work: Callable[..., object], arguments: Sequence[object]) -> None:
    try:
        to.send(work(*arguments))
    except BaseException as error:
        to.send(error)
        raise
