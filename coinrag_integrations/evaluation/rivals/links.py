"""KVLink: tokens behind every chunk that tie it to those before (arXiv 2502.16002)."""

from __future__ import annotations

from coinrag_integrations.engine.plan import Text
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.rivals.kitchen import Cached, Kitchen
from coinrag_integrations.evaluation.rivals.task import Composed, Task

LINKS = 5  # behind a chunk, as KVLink has them


def kvlink(kitchen: Kitchen, task: Task, *, links: int | None = None) -> Composed:
    """Chunks encoded alone, each followed by `links` tokens that are computed with the question.

    They see everything before them; positions count them. The kitchen's trained ones are used (None:
    all of them), the same behind every chunk; where there are none, a line break stands for each of
    `LINKS`. Without links this is `chunk`.

    Raises:
        ConfigError: fewer were trained.
    """
    ids = _link_ids(kitchen, links)
    pieces: list[Cached | Text] = []
    for chunk in task.chunks:
        pieces.append(Cached.whole(chunk.ref(), kitchen.entries(chunk)))
        if ids:
            pieces.append(Text(ids))
    return kitchen.lay_out(task, pieces)


def _link_ids(kitchen: Kitchen, links: int | None) -> tuple[int, ...]:
    if kitchen.links:
        n = len(kitchen.links) if links is None else links
        if n > len(kitchen.links):
            raise ConfigError(
                f"{n} link tokens behind each chunk, but only {len(kitchen.links)} were trained: "
                f"use kvlink:{len(kitchen.links)}"
            )
        return kitchen.links[:n]
    (line_break, *_) = kitchen.model.tokenizer.encode("\n").ids
    return (line_break,) * (LINKS if links is None else links)
