"""Examples as training sees them: distractors from other rows, noise, another order. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.types import Document

_DRAWS = 20  # of a passage, before an example stays without it


def mixed(examples: Sequence[Example], config: ReaderConfig) -> Iterator[Example]:
    """Examples in a random order, each with `n_passages` passages in a random order; without end.

    Passages of other examples fill up what an example lacks, and take the place of all that help where
    noise wants it. The same seed gives the same examples.
    """
    random = Random(config.seed)
    order = list(range(len(examples)))
    while True:
        random.shuffle(order)
        for i in order:
            yield _example(examples, i, config, random)


def _example(examples: Sequence[Example], i: int, config: ReaderConfig, random: Random) -> Example:
    example = examples[i]
    kept = list(example.chosen(config.n_passages))
    is_known = bool(example.supporting) or len(kept) == 1
    helpful = example.supporting or {kept[0].document_id}
    if is_known and random.random() < config.noise:
        kept = [document for document in kept if document.document_id not in helpful]
    there = {document.text for document in example.documents}
    for _ in range(_DRAWS * config.n_passages):  # there may be hardly any others
        if len(kept) >= config.n_passages:
            break
        other = random.choice(random.choice(examples).documents)
        if other.text not in there:
            there.add(other.text)
            kept.append(other)
    random.shuffle(kept)
    return replace(example, documents=tuple(kept or list[Document](example.documents)))
