"""Spans in host memory, in front of the disk: verified once, never more than a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from coinrag_integrations.engine.store.format import Identity
from coinrag_integrations.types import ChunkId, SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A span in memory: the `parts` that hold it, and which of its chunk's entries (`stored`) it is.

    `identity` is that of the file it was read from.
    """

    parts: Mapping[str, torch.Tensor]
    stored: slice
    identity: Identity

    @property
    def n_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(kw_only=True)
class MemoryTier:
    """Least recently used spans, at most `max_bytes` of them. Safe to share between threads."""

    max_bytes: int
    n_bytes: int = 0
    _spans: OrderedDict[SpanRef, Kept] = field(default_factory=OrderedDict)
    _of_chunk: dict[ChunkId, set[SpanRef]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, ref: SpanRef, identity: Identity) -> Kept | None:
        """The span, if it was read from the file that is there now."""
        with self._lock:
            kept = self._spans.get(ref)
            if kept is None:
                return None
            if kept.identity != identity:
                self._drop(ref.chunk_id)
                return None
            self._spans.move_to_end(ref)
            return kept

    def put(self, ref: SpanRef, kept: Kept) -> None:
        """Keep a span, unless it is larger than all there may be."""
        if kept.n_bytes > self.max_bytes:
            return
        with self._lock:
            self._remove(ref)
            self._spans[ref] = kept
            self._of_chunk.setdefault(ref.chunk_id, set()).add(ref)
            self.n_bytes += kept.n_bytes
            while self.n_bytes > self.max_bytes:
                self._remove(next(iter(self._spans)))

    def drop(self, chunk_id: ChunkId) -> None:
        """Forget all spans of a chunk."""
        with self._lock:
            self._drop(chunk_id)

    def _drop(self, chunk_id: ChunkId) -> None:
        for ref in list(self._of_chunk.get(chunk_id, ())):
            self._remove(ref)

    def _remove(self, ref: SpanRef) -> None:
        kept = self._spans.pop(ref, None)
        if kept is None:
            return
        self.n_bytes -= kept.n_bytes
        refs = self._of_chunk[ref.chunk_id]
        refs.discard(ref)
        if not refs:
            del self._of_chunk[ref.chunk_id]
