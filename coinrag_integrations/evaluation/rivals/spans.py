"""Ours: spans cut out of the KV of whole chunks (CoinRAG, arXiv 2608.07458)."""

from __future__ import annotations

from coinrag_integrations.evaluation.rivals.kitchen import Cached, Kitchen
from coinrag_integrations.evaluation.rivals.task import Composed, Task


def spans(kitchen: Kitchen, task: Task) -> Composed:
    """The nuggets found, as slices of their chunks' entries, packed behind the prompt."""
    pieces = []
    for ref in task.spans:
        entries = kitchen.entries(task.chunk_of(ref))
        pieces.append(Cached.whole(ref, entries[ref.start : ref.stop]))
    return kitchen.lay_out(task, pieces)
