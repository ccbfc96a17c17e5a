"""A little task that tiny models can learn."""

from __future__ import annotations

from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.training import ReaderConfig
from coinrag_integrations.types import Document

COLOURS = ["red", "blue", "green", "white"]
CONFIG = ReaderConfig(
    rank=8,
    alpha=32,
    learning_rate=0.02,
    batch=4,
    n_examples=96,
    n_held_out=6,
    check_every=4,
    n_passages=3,
    n_nuggets=4,
)


def example(i: int) -> Example:
    thing, colour = f"boat {i}", COLOURS[i % 4]
    texts = (f"The {thing} is painted {colour} every spring.", f"Ferry {i} leaves at noon.")
    documents = tuple(Document(document_id=f"{i}/{j}", text=text) for j, text in enumerate(texts))
    return Example(
        question=f"Which colour is {thing}?",
        answers=(colour,),
        documents=documents,
        supporting=frozenset({f"{i}/0"}),
    )


EXAMPLES = [example(i) for i in range(60)]
