"""A few questions on a few short passages."""

from __future__ import annotations

from coinrag_integrations.engine import EngineConfig
from coinrag_integrations.evaluation.cost.building import distinct
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.types import Document
from tests.tiny import TEXT

ENGINE = EngineConfig(chunk_tokens=48, load="read")
TEXTS = [TEXT.replace("1923", str(1900 + i)) for i in range(3)]


def example(number: int) -> Example:
    """Each with a passage of its own and one that all share."""
    texts = (TEXTS[0], TEXTS[number % len(TEXTS)])
    return Example(
        question=f"Who built the organ in {1900 + number}?",
        answers=("Bastien Roule",),
        documents=tuple(
            Document(document_id=f"{number}/{i}", text=text) for i, text in enumerate(texts)
        ),
        supporting=frozenset(),
    )


EXAMPLES = [example(number) for number in range(4)]
DOCUMENTS = distinct([document for it in EXAMPLES for document in it.documents])
