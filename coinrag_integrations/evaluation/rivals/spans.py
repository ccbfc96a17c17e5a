"""Ours: spans cut out of the KV of whole chunks (CoinRAG, arXiv 2608.07458)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coinrag_integrations.evaluation.rivals.kitchen import Cached, Kitchen
from coinrag_integrations.evaluation.rivals.task import Composed, Task
from coinrag_integrations.types import SpanRef


def spans(kitchen: Kitchen, task: Task, *, nuggets: int | None = None) -> Composed:
    """The nuggets found, as slices of their chunks' entries, packed behind the prompt.

    `nuggets` takes so many of the best ones instead.
    """
    return kitchen.lay_out(task, [_cut(kitchen, task, ref) for ref in task.nearest(nuggets)])


def unaligned(kitchen: Kitchen, task: Task) -> Composed:
    """Like `spans`, every key at the position that it had in its chunk: the papers' ablation.

    The question stands where it would behind packed spans.
    """
    pieces = [
        replace(_cut(kitchen, task, ref), at=np.arange(ref.start, ref.stop)) for ref in task.spans
    ]
    return kitchen.lay_out(task, pieces, order="stale")


def _cut(kitchen: Kitchen, task: Task, ref: SpanRef) -> Cached:
    return Cached.whole(ref, kitchen.entries(task.chunk_of(ref))[ref.start : ref.stop])
