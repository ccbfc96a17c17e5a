"""Plans to prefixes: read the spans, rotate them into place. Knows no prompt text and no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from coinrag_integrations.engine.kernels import Kernels
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from coinrag_integrations.engine.prompt_cache import PromptCache
from coinrag_integrations.engine.rope import RopeTable
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.upload import Uploader
from coinrag_integrations.errors import SpanError, StoreError
from coinrag_integrations.types import ChunkId, SpanRef

OnMiss = Literal["recompute", "raise"]
Recompute = Callable[[ChunkId, StoreError], torch.Tensor]
# On a GPU, spans are read, copied and placed in pieces of this size, so that the three overlap: large
# enough for the bus to run at full speed, small enough that the last piece is soon done. Staged entries
# are not cut by layer: a layer of them is not contiguous, and copying it would need another buffer.
PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """A prefix for each plan, side by side, and what of each had to be recomputed on the way."""

    prefix: Prefix
    recomputed: tuple[tuple[SpanRef, ...], ...]


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

    def compose(
        self,
        plans: Sequence[PrefixPlan],
        watch: Stopwatch,
        *,
        room: int = 0,
        recompute: Recompute | None = None,
    ) -> Composed:
        """Load and place every entry of `plans`, with `room` rows behind the longest of them.

        `recompute(chunk_id, error)` gives a chunk's kv [T, L, 2, H, D] when a span of it is missing
        or cannot be trusted (it is told the error); without it the store's error is raised.

        Raises:
            StoreError: a span cannot be read, and `recompute` is None.
            SpanError: a span ends after its chunk's last token.
        """
        refs = [ref for plan in plans for ref in plan.refs]
        heads = [self.prompts.get(plan.head) for plan in plans if plan.head]
        n_heads = sum(map(len, heads))
        on_gpu = self.device.type == "cuda"
        with watch.part("load", wait=False):
            shape = self.layout.staged(n_heads + sum(map(len, refs)))
            staged = torch.empty(shape, dtype=self.layout.dtype, pin_memory=on_gpu)
            piece_bytes = PIECE_BYTES if on_gpu else None
            pieces = list(_cut(refs, n_heads, self.layout.bytes_per_entry, piece_bytes))
            reads = [self.store.start_read(refs[p.refs], staged[p.read]) for p in pieces]
            if heads:
                torch.cat(heads, out=staged[:n_heads])
            reads[0].wait()  # Python shared with the reading threads would slow down both
        with watch.part("compose", wait=False):
            n_entries = max(plan.n_entries for plan in plans)
            kv = empty_kv(self.layout, n_entries + room, self.device, len(plans))
            for b, plan in enumerate(plans):  # masks hide these rows, but not what is not finite
                kv[:, :, b, :, plan.n_entries : n_entries] = 0
            positions, slots = _lay_out(plans, n_entries + room)
            rotation = self.rope.rotation(positions, self.device)
            where = torch.from_numpy(slots).to(self.device, non_blocking=True)
        errors: dict[int, StoreError] = {}
        for piece, read in zip(pieces, reads, strict=True):
            with watch.part("load", wait=False):
                failed = {piece.refs.start + i: error for i, error in read.wait().items()}
            if failed:
                with watch.part("recompute"):
                    _mend(refs, failed, staged[n_heads:], recompute)
                errors |= failed
            with watch.part("compose", wait=piece is pieces[-1]):
                rows = piece.place
                entries = self.uploader.upload(staged[rows])
                self.kernels.place(entries, rotation[rows], kv, where[rows])
        n_read = sum(len(ref) for index, ref in enumerate(refs) if index not in errors)
        watch.bytes_read += self.layout.bytes_per_entry * n_read
        return Composed(
            prefix=Prefix(kv=kv, plans=tuple(plans)), recomputed=tuple(_by_plan(plans, errors))
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of the spans, the rows of the stage they are read into, and the rows to place then."""

    refs: slice
    read: slice
    place: slice


def _cut(
    refs: Sequence[SpanRef], n_heads: int, bytes_per_entry: int, piece_bytes: int | None
) -> Iterator[_Piece]:
    """Consecutive spans of at least `piece_bytes` together (None: all); heads go with the first."""
    first, first_row, row = 0, n_heads, n_heads
    for index, ref in enumerate(refs):
        row += len(ref)
        full = piece_bytes is not None and (row - first_row) * bytes_per_entry >= piece_bytes
        if full or index == len(refs) - 1:
            placed = slice(first_row if first else 0, row)
            yield _Piece(slice(first, index + 1), slice(first_row, row), placed)
            first, first_row = index + 1, row
    if not refs:
        yield _Piece(slice(0, 0), slice(n_heads, n_heads), slice(0, n_heads))


def _lay_out(
    plans: Sequence[PrefixPlan], n_rows: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Position and slot of every staged entry: [T] each. All heads come first, then all segments."""
    heads, segments = [], []
    for b, plan in enumerate(plans):
        n_head = len(plan.head)
        both = np.stack((plan.positions(), b * n_rows + np.arange(plan.n_entries)))
        heads.append(both[:, :n_head])
        segments.append(both[:, n_head:])
    positions, slots = np.concatenate([*heads, *segments], axis=1)
    return positions, slots


def _mend(
    refs: Sequence[SpanRef],
    failed: dict[int, StoreError],
    staged: torch.Tensor,
    recompute: Recompute | None,
) -> None:
    """Fill the rows of spans that could not be read; `staged` begins with the first span's."""
    if recompute is None:
        raise next(iter(failed.values()))
    chunks = {refs[index].chunk_id: error for index, error in failed.items()}
    fresh = {chunk_id: recompute(chunk_id, error) for chunk_id, error in chunks.items()}
    stops = np.cumsum([len(ref) for ref in refs])
    for index in failed:
        ref, kv = refs[index], fresh[refs[index].chunk_id]
        if ref.stop > len(kv):
            raise SpanError(
                f"span [{ref.start}, {ref.stop}) ends after the {len(kv)} tokens of "
                f"chunk {ref.chunk_id}"
            )
        staged[stops[index] - len(ref) : stops[index]] = kv[ref.start : ref.stop].cpu()


def _by_plan(
    plans: Sequence[PrefixPlan], errors: dict[int, StoreError]
) -> Iterator[tuple[SpanRef, ...]]:
    """Of each plan the spans that failed."""
    first = 0
    for plan in plans:
        yield tuple(ref for i, ref in enumerate(plan.refs, first) if i in errors)
        first += len(plan.refs)
