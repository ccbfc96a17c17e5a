"""Entries of the text before the first segment, kept in memory by token ids. Knows no plan."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(kw_only=True)
class PromptCache:
    """Least recently used heads, at most `max_bytes` of them (but always the last one).

    `encode` makes the entries [P, L, 2, H, D] of a head that is not there, on the CPU. Safe to share
    between threads; two that miss the same head at once may both encode it.
    """

    encode: Callable[[Sequence[int]], torch.Tensor]
    max_bytes: int = 256 << 20
    _heads: OrderedDict[tuple[int, ...], torch.Tensor] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, ids: tuple[int, ...]) -> torch.Tensor:
        """The entries of a head: [P, L, 2, H, D], not to be written to."""
        with self._lock:
            if ids in self._heads:
                self._heads.move_to_end(ids)
                return self._heads[ids]
        entries = self.encode(ids)
        with self._lock:
            self._heads[ids] = entries
            self._heads.move_to_end(ids)
            while self.n_bytes > self.max_bytes and len(self._heads) > 1:
                self._heads.popitem(last=False)
        return entries

    def __contains__(self, ids: object) -> bool:
        """Whether the entries of a head are there."""
        with self._lock:
            return ids in self._heads

    @property
    def n_bytes(self) -> int:
        """Bytes of all heads."""
        return sum(kv.nbytes for kv in self._heads.values())
