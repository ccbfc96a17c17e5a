"""Entries computed without the question and without other chunks, then put together: no repair.

Whole chunks in several contexts, nuggets in isolation, and four ways to keep fewer entries of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from coinrag_integrations.engine.kernels.reference import rotate
from coinrag_integrations.engine.rope import RopeTable
from coinrag_integrations.evaluation.rivals.kitchen import Cached, Context, Kitchen
from coinrag_integrations.evaluation.rivals.task import Composed, Task
from coinrag_integrations.types import Chunk, Span


def whole(kitchen: Kitchen, task: Task, context: Context) -> list[Cached]:
    """Every chunk, as it was encoded in a context."""
    return [Cached.whole(c.ref(), kitchen.entries(c, context)) for c in task.chunks]


def naive(kitchen: Kitchen, task: Task) -> Composed:
    """Chunks encoded alone and joined as they are, every one still at the positions it had there.

    TurboRAG's "composite positions" (arXiv 2410.07590), without training.
    """
    return kitchen.lay_out(task, whole(kitchen, task, "alone"), order="stale")


def chunk(kitchen: Kitchen, task: Task) -> Composed:
    """Chunks encoded alone, keys turned to their new positions.

    TurboRAG's "reordered positions" and Block-Attention (arXiv 2409.15355), without training.
    """
    return kitchen.lay_out(task, whole(kitchen, task, "alone"))


def chunk_bos(kitchen: Kitchen, task: Task) -> Composed:
    """Like `chunk`, encoded behind one BOS token whose row is dropped: the sink lies outside.

    What CacheBlend's scripts do (arXiv 2405.16444).
    """
    return kitchen.lay_out(task, whole(kitchen, task, "bos"))


def chunk_after_prompt(kitchen: Kitchen, task: Task) -> Composed:
    """Like `chunk`, encoded behind the prompt's head: such entries serve this prompt only."""
    return kitchen.lay_out(task, whole(kitchen, task, "prompt"))


def isolated(kitchen: Kitchen, task: Task, *, nuggets: int | None = None) -> Composed:
    """The nuggets found, each encoded alone: CoinRAG's ablation (arXiv 2608.07458)."""
    pieces = []
    for ref in task.nearest(nuggets):
        make = partial(kitchen.encode, task.ids_of(ref))
        entries = kitchen.offline((ref, "isolated"), make)
        pieces.append(Cached.whole(ref, entries))
    return kitchen.lay_out(task, pieces)


def strided(kitchen: Kitchen, task: Task, *, k: int = 4) -> Composed:
    """Every k-th entry of a chunk, the last of each block, at its own position.

    The footprint of C2KV (arXiv 2607.17715) without its extractor.
    """
    return _fewer(kitchen, task, k, lambda entries, last: entries[last])


def meanpool(kitchen: Kitchen, task: Task, *, k: int = 4) -> Composed:
    """The mean of each block of k entries, keys before RoPE, at the position of its last."""
    return _fewer(kitchen, task, k, _block_means)


def truncated(kitchen: Kitchen, task: Task, *, k: int = 4) -> Composed:
    """The first 1/k of each chunk's tokens: what as many entries hold of a text that is cut short."""
    pieces = []
    for it in task.chunks:
        if n := -(-len(it) // k):
            pieces.append(Cached.whole(it.ref(Span(0, n)), kitchen.entries(it)[:n]))
    return kitchen.lay_out(task, pieces)


def evict(kitchen: Kitchen, task: Task, *, k: int = 4) -> Composed:
    """Of each chunk, layer and head the 1/k of entries whose keys are least like their mean.

    KeyDiff (arXiv 2504.15364), a query-free eviction: keys are compared as an independent
    cache holds them, turned to their positions in the chunk, and stay at these positions. Every head
    keeps other tokens, so keys are stored turned, and whole chunks are turned on.
    """
    pieces = []
    for it in task.chunks:
        make = partial(_least_alike, kitchen.entries(it), kitchen.model.rope, k)
        kept = kitchen.offline((it.chunk_id, "evict", k), make)
        pieces.append(Cached.fewer(it, kept, np.zeros(len(kept), dtype=np.int64)))
    return kitchen.lay_out(task, pieces)


def _fewer(
    kitchen: Kitchen,
    task: Task,
    k: int,
    reduce: Callable[[torch.Tensor, NDArray[np.int64]], torch.Tensor],
) -> Composed:
    """Each chunk reduced to one entry a block of `k`, which stands at the block's last token."""

    def piece(it: Chunk) -> Cached:
        last = np.minimum(np.arange(k - 1, len(it) + k - 1, k), len(it) - 1)
        entries = kitchen.offline(
            (it.chunk_id, reduce.__qualname__, k), lambda: reduce(kitchen.entries(it), last)
        )
        return Cached.fewer(it, entries, last)

    return kitchen.lay_out(task, [piece(it) for it in task.chunks])


def _block_means(entries: torch.Tensor, last: NDArray[np.int64]) -> torch.Tensor:
    """[T, L, 2, H, D] -> [len(last), L, 2, H, D], in fp32 and rounded once; a short tail by itself."""
    first = np.concatenate(([0], last[:-1] + 1))
    blocks = zip(first.tolist(), last.tolist(), strict=True)
    means = [entries[a : b + 1].float().mean(0) for a, b in blocks]
    return torch.stack(means).to(entries.dtype)


def _least_alike(entries: torch.Tensor, rope: RopeTable, k: int) -> torch.Tensor:
    """[T, L, 2, H, D] -> [ceil(T / k), L, 2, H, D], keys turned to their positions in the chunk."""
    n = len(entries)
    keys, values = entries.unbind(2)  # [T, L, H, D] each
    # `place` applies the attention scaling (YaRN): here keys are only turned.
    unit = replace(rope, rotaries=tuple(replace(r, attention_scaling=1.0) for r in rope.rotaries))
    turned = rotate(keys, unit.rotation(range(n), entries.device))  # fp32
    directions = torch.nn.functional.normalize(turned, dim=-1)
    alike = torch.nn.functional.cosine_similarity(turned, directions.mean(0), dim=-1)  # [T, L, H]
    kept = alike.topk(-(-n // k), dim=0, largest=False).indices.sort(0).values
    index = kept[..., None].expand(-1, -1, -1, entries.shape[-1])  # [n, L, H, D]
    chosen = (turned.to(entries.dtype).gather(0, index), values.gather(0, index))
    return torch.stack(chosen, dim=2)
