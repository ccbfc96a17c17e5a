"""A task over three documents, and what full prefill says of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.chunking import chunk_document
from coinrag_integrations.evaluation.rivals import (
    Composed,
    Kitchen,
    Task,
    likelihood_logits,
    make_task,
    parse_method,
)
from coinrag_integrations.nuggets import RuleProposer, extract_nuggets
from coinrag_integrations.types import Chunk
from tests.evaluation.example import EXAMPLE
from tests.tiny import HashEmbedder, forward

ANSWER = (40, 41, 42, 43)


def chunks_of(model: LoadedModel, size: int = 48) -> list[Chunk]:
    cut = [c for d in EXAMPLE.documents for c in chunk_document(d, model.tokenizer, size)]
    return [extract_nuggets(chunk, RuleProposer()) for chunk in cut]


def task_of(kitchen: Kitchen, *, n_chunks: int = 4, n_nuggets: int = 5, **options: Any) -> Task:
    return make_task(
        EXAMPLE.question,
        chunks_of(kitchen.model),
        kitchen.prompt,
        HashEmbedder(),
        n_chunks=n_chunks,
        n_nuggets=n_nuggets,
        **options,
    )


def compose(kitchen: Kitchen, name: str, task: Task) -> Composed:
    return parse_method(name).compose(kitchen, task)


def logits(kitchen: Kitchen, name: str | Composed, task: Task) -> torch.Tensor:
    """Logits [n, V] of each token of the answer behind a method's context."""
    composed = compose(kitchen, name, task) if isinstance(name, str) else name
    return likelihood_logits(kitchen.model, composed, task.tail, ANSWER)


def plain(
    model: LoadedModel, task: Task, context: Sequence[int], answer: Sequence[int] = ANSWER
) -> torch.Tensor:
    """The same logits from one pass of the model itself over all tokens."""
    ids = [*task.head, *context, *task.tail, *answer]
    return forward(model.hf, ids)[-len(answer) - 1 : -1].float()


def chunk_ids(task: Task) -> list[int]:
    return [i for chunk in task.chunks for i in chunk.token_ids]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
