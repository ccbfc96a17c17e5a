"""APE: contexts side by side, seen through a temperature and a scale (arXiv 2502.05431)."""

from __future__ import annotations

from dataclasses import replace

from coinrag_integrations.evaluation.rivals.independent import whole
from coinrag_integrations.evaluation.rivals.kitchen import Kitchen
from coinrag_integrations.evaluation.rivals.task import Apart, Composed, Task


def ape(kitchen: Kitchen, task: Task, *, temperature: float = 0.9, scale: float = 0.9) -> Composed:
    """Chunks encoded behind the prompt, all starting where it ends; the question behind the longest.

    Attention has two parts, the contexts' (logits divided by the temperature) and all other's, joined
    by their log-sum-exps, of which the contexts' is multiplied by scale times temperature (as
    in the authors' code). With both at 1 this is parallel windows with plain attention.

    Attention is computed with an explicit softmax in plain torch: its time is an upper bound.
    """
    composed = kitchen.lay_out(task, whole(kitchen, task, "prompt"), order="parallel")
    rows = slice(len(task.head), composed.prefix.n_entries)
    return replace(composed, apart=Apart(rows=rows, temperature=temperature, scale=scale))
