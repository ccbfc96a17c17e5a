"""A plan to a prefix: read the spans, rotate them into place. Knows no prompt text and no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from coinrag_integrations.engine.kernels import Kernels
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from coinrag_integrations.engine.rope import RopeTable
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import SpanError, StoreError
from coinrag_integrations.types import ChunkId, SpanRef

OnMiss = Literal["recompute", "raise"]
Recompute = Callable[[ChunkId, StoreError], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composer:
    """What composition needs: where entries come from and how they are turned."""

    layout: KVLayout
    rope: RopeTable
    kernels: Kernels
    device: torch.device
    store: KVStore

    def compose(
        self,
        plan: PrefixPlan,
        prompt: torch.Tensor,
        watch: Stopwatch,
        *,
        room: int = 0,
        recompute: Recompute | None = None,
    ) -> tuple[Prefix, tuple[SpanRef, ...]]:
        """Load and place every entry of `plan`; also returns the spans that had to be recomputed.

        prompt [P, L, 2, H, D] on the CPU: the prompt's entries before RoPE. `room` rows are kept
        free behind the entries. `recompute` gives a chunk's kv [T, L, 2, H, D] when its file is
        missing or cannot be trusted (it is told the error); without it the store's error is raised.

        Raises:
            StoreError: a span cannot be read, and `recompute` is None.
            SpanError: a span ends after its chunk's last token.
        """
        refs = [segment.ref for segment in plan.segments]
        with watch.part("load"):
            staged = torch.empty(
                self.layout.staged(plan.n_entries),
                dtype=self.layout.dtype,
                pin_memory=self.device.type == "cuda",
            )
            staged[: plan.n_prompt] = prompt
            errors = self.store.read(refs, staged[plan.n_prompt :]) if refs else {}
            watch.bytes_read += self.layout.bytes_per_entry * sum(
                len(ref) for index, ref in enumerate(refs) if index not in errors
            )
        if errors:
            with watch.part("recompute"):
                if recompute is None:
                    raise next(iter(errors.values()))
                failed = {refs[index].chunk_id: error for index, error in errors.items()}
                fresh = {chunk_id: recompute(chunk_id, error) for chunk_id, error in failed.items()}
                for index in errors:
                    segment, ref = plan.segments[index], refs[index]
                    kv = fresh[ref.chunk_id]
                    if ref.stop > len(kv):
                        raise SpanError(
                            f"span [{ref.start}, {ref.stop}) ends after the {len(kv)} tokens of "
                            f"chunk {ref.chunk_id}"
                        )
                    staged[segment.row : segment.row + len(ref)] = kv[ref.start : ref.stop].cpu()
        with watch.part("compose"):
            cos, sin = self.rope.angles(plan.positions(), self.device)
            placed = empty_kv(self.layout, plan.n_entries + room, self.device)
            self.kernels.place(staged.to(self.device, non_blocking=True), cos, sin, placed, 0)
        return (
            Prefix(kv=placed, n_entries=plan.n_entries, plan=plan),
            tuple(refs[index] for index in sorted(errors)),
        )
