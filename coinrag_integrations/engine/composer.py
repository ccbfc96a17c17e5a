"""Plans to prefixes: read the spans, rotate them into place. Knows no prompt text and no model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from coinrag_integrations.engine.cost import CostModel
from coinrag_integrations.engine.kernels import Kernels
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from coinrag_integrations.engine.prompt_cache import PromptCache
from coinrag_integrations.engine.rope import RopeTable
from coinrag_integrations.engine.store import KVStore, PackedChunk, ReadReport, Stage
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.upload import Uploader
from coinrag_integrations.errors import SlowReadError, SpanError, StoreError
from coinrag_integrations.types import ChunkId, Span, SpanRef

OnMiss = Literal["recompute", "raise"]
# Of chunks and the bytes to read of them, those that had better be encoded anew, and why.
Decline = Callable[[Mapping[ChunkId, int]], Mapping[ChunkId, StoreError]]
# Encodes a chunk again; the spans of it that are wanted, and why they were not read.
Recompute = Callable[[ChunkId, Sequence[Span], StoreError], PackedChunk]
# On a GPU, spans are read, copied and placed in pieces of this size, so that the three overlap: large
# enough for the bus to run at full speed, small enough that the last piece is soon done. Staged entries
# are not cut by layer: a layer of them is not contiguous, and copying it would need another buffer.
PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Where the spans of one plan came from.

    `recomputed` were encoded again, `n_declined` of them because reading would have taken longer;
    the bytes are those of all others.
    """

    recomputed: tuple[SpanRef, ...]
    n_declined: int
    bytes_read: int
    bytes_in_memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A prefix for each plan, side by side, and how each was come by."""

    prefix: Prefix
    loaded: tuple[Loaded, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composer:
    """What composition needs: where entries come from and how they are turned."""

    layout: KVLayout
    rope: RopeTable
    kernels: Kernels
    device: torch.device
    store: KVStore
    prompts: PromptCache
    uploader: Uploader
    cost: CostModel

    def compose(
        self,
        plans: Sequence[PrefixPlan],
        watch: Stopwatch,
        *,
        room: int = 0,
        recompute: Recompute | None = None,
        decline: Decline | None = None,
        kept: torch.Tensor | None = None,
    ) -> Composed:
        """Load and place every entry of `plans`, with `room` rows behind the longest of them.

        `kept` [L, 2, H, n, D] are the rows that a single plan begins with.
        `recompute(chunk_id, spans, error)` gives what would be stored of a chunk when spans of it are
        missing or cannot be trusted; without it the store's error is raised. `decline` says which
        chunks not to read in the first place.

        Raises:
            StoreError: a span cannot be read, and `recompute` is None.
            SpanError: a span ends after its chunk's last token.
        """
        refs = [ref for plan in plans for ref in plan.refs]
        heads = [self.prompts.get(plan.head) for plan in plans if plan.head]
        on_gpu = self.device.type == "cuda"
        with watch.part("load", wait=False):
            stage = self.store.stage(refs, pin=on_gpu)
            pieces = list(_cut(stage, PIECE_BYTES)) if on_gpu else [slice(0, len(refs))]
            declined = _declined(stage, decline) if recompute and decline else {}
            reads = (
                [self.store.start_read(stage, piece, without=declined) for piece in pieces]
                if on_gpu
                else []
            )
        with watch.part("compose", wait=False):
            n_entries = max(plan.n_entries for plan in plans)
            kv = empty_kv(self.layout, n_entries + room, self.device, len(plans))
            for b, plan in enumerate(plans):  # masks hide these rows, but not what is not finite
                kv[:, :, b, :, plan.n_entries : n_entries] = 0
            if kept is not None:
                kv[:, :, 0, :, : kept.shape[3]] = kept
            positions, slots = _lay_out(plans, n_entries + room)
            rotation = self.rope.rotation(positions, self.device)
            where = torch.from_numpy(slots).to(self.device, non_blocking=True)
            n_heads = sum(map(len, heads))
            if heads:
                entries = self.uploader.upload(torch.cat(heads) if len(heads) > 1 else heads[0])
                self.kernels.place(entries, rotation[:n_heads], kv, where[:n_heads])
        total = ReadReport()
        for number, piece in enumerate(pieces):
            with watch.part("load", wait=False):
                begin = time.perf_counter()
                report = (
                    reads[number].result()
                    if reads
                    else self.store.read(stage, piece, without=declined)
                )
                self.cost.observe(report, time.perf_counter() - begin)
            for index in range(len(refs))[piece]:
                if refs[index].chunk_id in declined:
                    report.errors[index] = declined[refs[index].chunk_id]
            if report.errors:
                with watch.part("recompute"):
                    _mend(stage, report.errors, recompute)
            total.add(report)
            with watch.part("compose", wait=piece is pieces[-1]):
                rows = _rows(stage, piece, n_heads)
                entries = self.uploader.upload(stage.entries(piece))
                self.kernels.place(entries, rotation[rows], kv, where[rows])
        return Composed(
            prefix=Prefix(kv=kv, plans=tuple(plans)), loaded=tuple(_by_plan(plans, total))
        )


def _declined(stage: Stage, decline: Decline) -> Mapping[ChunkId, StoreError]:
    """The chunks that are better encoded than read, and why."""
    n_bytes: dict[ChunkId, int] = {}
    for ref in stage.refs:
        n_bytes[ref.chunk_id] = n_bytes.get(ref.chunk_id, 0) + stage.codec.n_bytes(len(ref))
    return decline(n_bytes)


def _cut(stage: Stage, piece_bytes: int) -> Iterator[slice]:
    """Consecutive spans of at least `piece_bytes` together."""
    first, n_bytes = 0, 0
    for index, ref in enumerate(stage.refs):
        n_bytes += stage.codec.n_bytes(len(ref))
        if n_bytes >= piece_bytes or index == len(stage.refs) - 1:
            yield slice(first, index + 1)
            first, n_bytes = index + 1, 0


def _rows(stage: Stage, piece: slice, n_heads: int) -> slice:
    """Where the entries of consecutive spans come among all that are placed, heads first."""
    rows = stage.rows[piece]
    return slice(n_heads + rows[0].start, n_heads + rows[-1].stop) if rows else slice(0, 0)


def _lay_out(
    plans: Sequence[PrefixPlan], n_rows: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Position and slot of every staged entry: [T] each. All heads come first, then all segments."""
    heads, segments = [], []
    for b, plan in enumerate(plans):
        n_head = len(plan.head)
        both = np.stack((plan.positions(), b * n_rows + np.arange(plan.n_entries)))[
            :, plan.n_kept :
        ]
        heads.append(both[:, :n_head])
        segments.append(both[:, n_head:])
    positions, slots = np.concatenate([*heads, *segments], axis=1)
    return positions, slots


def _mend(stage: Stage, failed: Mapping[int, StoreError], recompute: Recompute | None) -> None:
    """Fill the rows of spans that could not be read."""
    if recompute is None:
        raise next(iter(failed.values()))
    by_chunk: dict[ChunkId, list[int]] = {}
    for index in failed:
        by_chunk.setdefault(stage.refs[index].chunk_id, []).append(index)
    for chunk_id, indices in by_chunk.items():
        spans = [Span(stage.refs[i].start, stage.refs[i].stop) for i in indices]
        fresh = recompute(chunk_id, spans, failed[indices[0]])
        for index, span in zip(indices, spans, strict=True):
            stored = fresh.rows(span)
            if stored is None:
                raise SpanError(
                    f"span [{span.start}, {span.stop}) ends after the {fresh.n_tokens} tokens of "
                    f"chunk {chunk_id}"
                )
            stage.fill(index, fresh.parts, stored)


def _by_plan(plans: Sequence[PrefixPlan], report: ReadReport) -> Iterator[Loaded]:
    """What a report says of the spans of each plan."""
    first = 0
    for plan in plans:
        spans = dict(enumerate(plan.refs, first))
        first += len(plan.refs)
        yield Loaded(
            recomputed=tuple(ref for index, ref in spans.items() if index in report.errors),
            n_declined=sum(isinstance(report.errors.get(i), SlowReadError) for i in spans),
            bytes_read=sum(report.disk.get(i, 0) + report.remote.get(i, 0) for i in spans),
            bytes_in_memory=sum(report.memory.get(i, 0) for i in spans),
        )
