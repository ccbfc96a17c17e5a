"""Composed KV, ready for a question: entries in order, and room behind them for online tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coinrag_integrations.engine import hf
from coinrag_integrations.engine.hf import Cache
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.plan import PrefixPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """`kv` [L, 2, H, N + room, D] on the model's device; the first `n_entries` rows are valid.

    A prefix may be asked several questions, one after the other: they write into the room only.
    """

    kv: torch.Tensor
    n_entries: int
    plan: PrefixPlan

    @property
    def room(self) -> int:
        """Rows behind the entries."""
        return self.kv.shape[3] - self.n_entries

    def cache(self, room: int) -> Cache:
        """A transformers cache over this buffer, with at least `room` rows to write.

        No copy, unless the room is too small.
        """
        kv = self.kv
        if room > self.room:
            kv = torch.empty(
                (*kv.shape[:3], self.n_entries + room, kv.shape[4]),
                dtype=kv.dtype,
                device=kv.device,
            )
            kv[:, :, :, : self.n_entries] = self.kv[:, :, :, : self.n_entries]
        return hf.prefix_cache(kv, self.n_entries)


def empty_kv(layout: KVLayout, n_rows: int, device: torch.device) -> torch.Tensor:
    """An uninitialised prefix buffer `[L, 2, H, n_rows, D]`."""
    return torch.empty(layout.prefix(n_rows), dtype=layout.dtype, device=device)
