"""Text that is prefilled: nothing at all, everything, everything behind a cached prompt, nuggets."""

from __future__ import annotations

from coinrag_integrations.engine.plan import Text
from coinrag_integrations.evaluation.rivals.kitchen import Kitchen
from coinrag_integrations.evaluation.rivals.task import Composed, Task


def none(kitchen: Kitchen, task: Task) -> Composed:
    """The question behind the cached prompt, without any context: what the model knows by itself."""
    return kitchen.lay_out(task, [])


def full(kitchen: Kitchen, task: Task) -> Composed:
    """Prompt, chunks and question computed anew: the reference."""
    return kitchen.lay_out(task, _chunks(task), cached_head=False)


def prefix(kitchen: Kitchen, task: Task) -> Composed:
    """Prefix caching: the prompt's head is cached, which is all that two questions share."""
    return kitchen.lay_out(task, _chunks(task))


def text(kitchen: Kitchen, task: Task, *, nuggets: int | None = None) -> Composed:
    """The words of the spans, prefilled: what selection alone is worth, at equal tokens."""
    return kitchen.lay_out(task, [Text(task.ids_of(ref)) for ref in task.nearest(nuggets)])


def _chunks(task: Task) -> list[Text]:
    return [Text(chunk.token_ids) for chunk in task.chunks]
