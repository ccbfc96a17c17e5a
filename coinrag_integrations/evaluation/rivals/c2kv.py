"""C2KV: one slot for every k tokens of a chunk (arXiv 2607.17715), and chunks of both kinds."""

from __future__ import annotations

from coinrag_integrations.engine.c2kv import Blocks
from coinrag_integrations.evaluation.rivals.kitchen import Cached, Kitchen
from coinrag_integrations.evaluation.rivals.task import Composed, Task
from coinrag_integrations.types import Chunk


def c2kv(kitchen: Kitchen, task: Task, *, k: int = 4) -> Composed:
    """Every chunk's slots, made by the kitchen's extractor, in any order."""
    return kitchen.lay_out(task, [slots(kitchen, chunk, k) for chunk in task.chunks])


def untrained(kitchen: Kitchen, task: Task, *, k: int = 4) -> Composed:
    """Every chunk's slots as the model's own projections make them: the extractor before training."""
    pieces = [slots(kitchen, chunk, k, "c2kv-untrained") for chunk in task.chunks]
    return kitchen.lay_out(task, pieces)


def hybrid(kitchen: Kitchen, task: Task, *, k: int = 4) -> Composed:
    """The best chunk as it is, the others' slots: exact words survive where they are most needed."""
    raw = [Cached.whole(chunk.ref(), kitchen.entries(chunk)) for chunk in task.chunks[:1]]
    return kitchen.lay_out(task, [*raw, *(slots(kitchen, chunk, k) for chunk in task.chunks[1:])])


def slots(kitchen: Kitchen, chunk: Chunk, k: int, kind: str = "c2kv") -> Cached:
    """A chunk's slots, each at the position of its block's last token."""
    encoder = kitchen.slots if kind == "c2kv" else kitchen.untrained_slots
    entries = kitchen.offline(
        (chunk.chunk_id, kind, k),
        lambda: encoder([chunk.token_ids], k, [kitchen.entries(chunk)])[0].contiguous(),
    )
    return Cached.fewer(chunk, entries, Blocks(ratio=k).positions(len(chunk)))
