"""Entries of chunks kept on disk while slots are trained: what stays as it is is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from coinrag_integrations.engine import KVStore, LoadedModel
from coinrag_integrations.engine.store.variants import choose_variant
from coinrag_integrations.types import Chunk, ChunkId, Span


class KeptEntries:
    """A folder of chunk files, as a store holds them: for one model, also for several trainings."""

    def __init__(self, folder: Path, model: LoadedModel) -> None:
        """Open the folder, or begin it.

        Raises:
            StoreError: it cannot be used.
        """
        fingerprint = model.fingerprint()
        root = choose_variant(folder, fingerprint, add=True)
        self._store, self._device = KVStore(root, model.layout, fingerprint), model.device

    def read(self, chunks: Sequence[Chunk]) -> dict[ChunkId, torch.Tensor]:
        """The entries [T, L, 2, H, D] of those chunks that are there and can be trusted."""
        there = [it for it in chunks if len(it)]
        stage = self._store.stage([it.ref() for it in there])
        failed = self._store.read(stage).errors
        entries = stage.entries(slice(None))
        assert isinstance(entries, torch.Tensor)  # they are not stored as codes
        return {
            it.chunk_id: entries[rows].to(self._device)
            for i, (it, rows) in enumerate(zip(there, stage.rows, strict=True))
            if i not in failed
        }

    def keep(self, found: Iterable[tuple[Chunk, torch.Tensor]]) -> None:
        """Write the entries of chunks.

        Raises:
            StoreError: the disk refuses.
        """
        for chunk, entries in found:
            if len(chunk):
                self._store.put(chunk.chunk_id, entries, [Span(0, len(chunk))])
