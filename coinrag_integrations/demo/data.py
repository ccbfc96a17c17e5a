"""The demo's documents and questions, as they ship with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from coinrag_integrations.types import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoQuestion:
    """A question, its accepted answers, and the documents that hold the facts."""

    question: str
    answers: tuple[str, ...]
    supporting: tuple[str, ...]
    hops: int


@cache
def demo_documents() -> tuple[Document, ...]:
    """About 60 articles on an archipelago that no model has read about."""
    return tuple(
        Document(document_id=row["document_id"], text=row["text"], metadata={"title": row["title"]})
        for row in _rows("corpus.jsonl")
    )


@cache
def demo_questions() -> tuple[DemoQuestion, ...]:
    """Questions about them, the clearest ten first."""
    return tuple(
        DemoQuestion(
            question=row["question"],
            answers=tuple(row["answers"]),
            supporting=tuple(row["supporting"]),
            hops=row["hops"],
        )
        for row in _rows("questions.jsonl")
    )


def _rows(name: str) -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
