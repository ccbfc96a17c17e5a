"""Rival methods through one interface: `compose(kitchen, task)` gives what a question stands behind.

All of them get the same retrieval, the same kernels and the same decoding; what differs is which entries
stand before the question, in what context they were computed, and what is computed again.
"""

from __future__ import annotations

from coinrag_integrations.evaluation.rivals.answer import Said, likelihood_logits, say
from coinrag_integrations.evaluation.rivals.kitchen import MAX_NEW_TOKENS, Kitchen
from coinrag_integrations.evaluation.rivals.methods import METHODS, Method, parse_method
from coinrag_integrations.evaluation.rivals.task import Composed, Task, make_task

__all__ = [
    "MAX_NEW_TOKENS",
    "METHODS",
    "Composed",
    "Kitchen",
    "Method",
    "Said",
    "Task",
    "likelihood_logits",
    "make_task",
    "parse_method",
    "say",
]
