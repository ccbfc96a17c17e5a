"""Composed KV, ready for a question: entries in order, and room behind them for online tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.visibility import HIDDEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The entries of one or several plans, side by side.

    `kv` [L, 2, B, H, N + room, D] on the model's device; of prefix b the first
    `plans[b].n_entries` rows are valid, N is the largest of these. A prefix may be asked several
    questions, one after the other: they write into the room only.
    """

    kv: torch.Tensor
    plans: tuple[PrefixPlan, ...]

    @property
    def n_entries(self) -> int:
        """N: the rows of the longest prefix."""
        return max(plan.n_entries for plan in self.plans)

    @property
    def room(self) -> int:
        """Rows behind the entries."""
        return self.kv.shape[4] - self.n_entries

    def positions(self) -> torch.Tensor:
        """Where each row stands: int64 [B, N] on the CPU, `HIDDEN` behind a shorter prefix's end."""
        positions = torch.full((len(self.plans), self.n_entries), HIDDEN)
        for row, plan in zip(positions, self.plans, strict=True):
            row[: plan.n_entries] = torch.from_numpy(plan.positions())
        return positions

    def with_room(self, room: int) -> torch.Tensor:
        """`kv` with at least `room` rows behind the entries. No copy, unless it has fewer."""
        if room <= self.room:
            return self.kv
        n = self.n_entries
        shape = (*self.kv.shape[:4], n + room, self.kv.shape[5])
        kv = torch.empty(shape, dtype=self.kv.dtype, device=self.kv.device)
        kv[..., :n, :] = self.kv[..., :n, :]
        return kv


def empty_kv(
    layout: KVLayout, n_rows: int, device: torch.device, n_prefixes: int = 1
) -> torch.Tensor:
    """A buffer `[L, 2, B, H, n_rows, D]` for prefixes, uninitialised."""
    shape = layout.prefixes(n_prefixes, n_rows)
    return torch.empty(shape, dtype=layout.dtype, device=device)
