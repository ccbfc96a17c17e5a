"""Plans to prefixes: read the spans, rotate them into place. Knows no prompt text and no model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
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
from coinrag_integrations.engine.source import Source
from coinrag_integrations.engine.store import ReadReport, Stage
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.upload import Uploader
from coinrag_integrations.errors import ConfigError, SlowReadError, StoreError
from coinrag_integrations.types import ChunkId, SpanRef

OnMiss = Literal["recompute", "raise"]
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
    """What composition needs: where entries come from, by their ratio, and how they are turned."""

    layout: KVLayout
    rope: RopeTable
    kernels: Kernels
    device: torch.device
    sources: Mapping[int, Source]
    prompts: PromptCache
    uploader: Uploader

    def compose(
        self,
        plans: Sequence[PrefixPlan],
        watch: Stopwatch,
        *,
        room: int = 0,
        kept: torch.Tensor | None = None,
    ) -> Composed:
        """Load and place every entry of `plans`, with `room` rows behind the longest of them.

        `kept` [L, 2, H, n, D] are the rows that a single plan begins with.

        Raises:
            StoreError: a span cannot be read, and its source does not recompute.
            SpanError: a span ends after its chunk's last token, or cuts a slot.
            ConfigError: there is no source of a span's ratio.
        """
        heads = [self.prompts.get(plan.head) for plan in plans if plan.head]
        n_heads = sum(map(len, heads))
        with watch.part("load", wait=False):
            groups = self._groups(plans, n_heads)
        with watch.part("compose", wait=False):
            n_entries = max(plan.n_entries for plan in plans)
            kv = empty_kv(self.layout, n_entries + room, self.device, len(plans))
            for b, plan in enumerate(plans):  # masks hide these rows, but not what is not finite
                kv[:, :, b, :, plan.n_entries : n_entries] = 0
            if kept is not None:
                kv[:, :, 0, :, : kept.shape[3]] = kept
            orders = [group.indices for group in groups]
            positions, slots = _lay_out(plans, n_entries + room, orders)
            rotation = self.rope.rotation(positions, self.device)
            where = torch.from_numpy(slots).to(self.device, non_blocking=True)
            if heads:
                entries = self.uploader.upload(torch.cat(heads) if len(heads) > 1 else heads[0])
                self.kernels.place(entries, rotation[:n_heads], kv, where[:n_heads])
        total = ReadReport()
        for group in groups:
            for number, piece in enumerate(group.pieces):
                with watch.part("load", wait=False):
                    report = group.read(number)
                if report.errors:
                    with watch.part("recompute"):
                        group.source.mend(group.stage, report.errors)
                total.add(group.renamed(report))
                is_last = group is groups[-1] and piece is group.pieces[-1]
                with watch.part("compose", wait=is_last):
                    rows = _rows(group.stage, piece, group.first)
                    entries = self.uploader.upload(group.stage.entries(piece))
                    self.kernels.place(entries, rotation[rows], kv, where[rows])
        return Composed(
            prefix=Prefix(kv=kv, plans=tuple(plans)), loaded=tuple(_by_plan(plans, total))
        )

    def _groups(self, plans: Sequence[PrefixPlan], n_heads: int) -> list[_Group]:
        """The spans of all plans by their ratio; on a GPU, reading has begun."""
        by_ratio: dict[int, list[int]] = {}
        refs = [ref for plan in plans for ref in plan.refs]
        for index, ref in enumerate(refs):
            by_ratio.setdefault(ref.ratio, []).append(index)
        groups: list[_Group] = []
        first, on_gpu = n_heads, self.device.type == "cuda"
        for ratio, indices in by_ratio.items():
            if ratio not in self.sources:
                there = ", ".join(str(it) for it in self.sources if it > 1)
                raise ConfigError(
                    f"the store has no slots for every {ratio} tokens"
                    + (f", only for {there}" if there else "")
                    + f": build it with C2KV (`coinrag build --c2kv {ratio}`), or ask for others"
                )
            source = self.sources[ratio]
            stage = source.store.stage([refs[i] for i in indices], pin=on_gpu)
            pieces = list(_cut(stage, PIECE_BYTES)) if on_gpu else [slice(0, len(indices))]
            declined = source.declined(stage)
            group = _Group(
                source=source,
                stage=stage,
                pieces=pieces,
                indices=indices,
                first=first,
                declined=declined,
                started=[
                    source.store.start_read(stage, piece, without=declined) for piece in pieces
                ]
                if on_gpu
                else [],
            )
            groups.append(group)
            first += stage.rows[-1].stop
        return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The spans of one ratio, staged: the `indices` of all plans' spans, read piece by piece.

    Their entries come behind `first` others.
    """

    source: Source
    stage: Stage
    pieces: list[slice]
    indices: list[int]
    first: int
    declined: Mapping[ChunkId, StoreError]
    started: list[Future[ReadReport]]

    def read(self, number: int) -> ReadReport:
        """Have a piece read; what was declined is among the errors."""
        piece, begin = self.pieces[number], time.perf_counter()
        report = (
            self.started[number].result()
            if self.started
            else self.source.store.read(self.stage, piece, without=self.declined)
        )
        self.source.cost.observe(report, time.perf_counter() - begin)
        for index in range(len(self.indices))[piece]:
            chunk_id = self.stage.refs[index].chunk_id
            if chunk_id in self.declined:
                report.errors[index] = self.declined[chunk_id]
        return report

    def renamed(self, report: ReadReport) -> ReadReport:
        """A report by the indices of all plans' spans."""
        names = self.indices
        return ReadReport(
            errors={names[i]: error for i, error in report.errors.items()},
            disk={names[i]: n for i, n in report.disk.items()},
            memory={names[i]: n for i, n in report.memory.items()},
            remote={names[i]: n for i, n in report.remote.items()},
            remote_seconds=report.remote_seconds,
        )


def _cut(stage: Stage, piece_bytes: int) -> Iterator[slice]:
    """Consecutive spans of at least `piece_bytes` together."""
    first, n_bytes = 0, 0
    for index, ref in enumerate(stage.refs):
        n_bytes += stage.codec.n_bytes(ref.n_entries)
        if n_bytes >= piece_bytes or index == len(stage.refs) - 1:
            yield slice(first, index + 1)
            first, n_bytes = index + 1, 0


def _rows(stage: Stage, piece: slice, first: int) -> slice:
    """Where the entries of consecutive spans come among all that are placed, behind `first` others."""
    rows = stage.rows[piece]
    return slice(first + rows[0].start, first + rows[-1].stop)


def _lay_out(
    plans: Sequence[PrefixPlan], n_rows: int, orders: Sequence[Sequence[int]]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Position and slot of every staged entry: [T] each.

    All heads come first, then the segments of all plans in the orders of the groups.
    """
    heads, segments = [], []
    for b, plan in enumerate(plans):
        n_head = len(plan.head)
        both = np.stack((plan.positions(), b * n_rows + np.arange(plan.n_entries)))
        heads.append(both[:, plan.n_kept : plan.n_kept + n_head])
        segments += [both[:, it.row : it.row + it.ref.n_entries] for it in plan.segments]
    ordered = [segments[index] for order in orders for index in order]
    positions, slots = np.concatenate([*heads, *ordered], axis=1)
    return positions, slots


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
