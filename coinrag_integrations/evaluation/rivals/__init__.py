"""Rival methods through one interface: `compose(kitchen, task)` gives what a question stands behind.

All of them get the same retrieval, the same kernels and the same decoding; what differs is which entries
stand before the question, in what context they were computed, and what is computed again.
"""

from __future__ import annotations

from coinrag_integrations.evaluation.rivals.answer import Said, likelihood_logits, say
from coinrag_integrations.evaluation.rivals.kitchen import MAX_NEW_TOKENS, Kitchen
from coinrag_integrations.evaluation.rivals.methods import (
    ABLATIONS,
    METHODS,
    RERANKED,
    Method,
    parse_method,
    swept,
)
from coinrag_integrations.evaluation.rivals.task import (
    Composed,
    Reranker,
    Search,
    Task,
    make_task,
)

__all__ = [
    "ABLATIONS",
    "MAX_NEW_TOKENS",
    "METHODS",
    "RERANKED",
    "Composed",
    "Kitchen",
    "Method",
    "Reranker",
    "Said",
    "Search",
    "Task",
    "likelihood_logits",
    "make_task",
    "parse_method",
    "say",
    "swept",
]
