"""KVLink: tokens behind every chunk that tie it to those before (arXiv 2502.16002)."""

from __future__ import annotations

from coinrag_integrations.engine.plan import Text
from coinrag_integrations.evaluation.rivals.kitchen import Cached, Kitchen
from coinrag_integrations.evaluation.rivals.task import Composed, Task


def kvlink(kitchen: Kitchen, task: Task, *, links: int = 5) -> Composed:
    """Chunks encoded alone, each followed by `links` tokens that are computed with the question.

    They see everything before them; positions count them. KVLink trains an embedding for
    each; untrained, a line break stands for all of them. Without links this is `chunk`.
    """
    (line_break, *_) = kitchen.model.tokenizer.encode("\n").ids
    pieces: list[Cached | Text] = []
    for chunk in task.chunks:
        pieces.append(Cached.whole(chunk.ref(), kitchen.entries(chunk)))
        if links:
            pieces.append(Text((line_break,) * links))
    return kitchen.lay_out(task, pieces)
