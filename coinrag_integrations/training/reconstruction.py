"""How well the reader says a chunk again behind its slots: C2KV's reconstruction loss.

In the paper's code it is a first stage (weight 1, of every document the first 127 tokens) or stands beside
the answer's (0.1, all tokens of some documents), and what is said again begins with a marker, an
embedding that is trained for it. Here the reader is frozen and nothing is trained that is not served: a
chunk begins with its own first token, which is given, and all others are predicted. It is one chunk of a
sample, the first; which one that is, is chance, as they stand in a random order. The prompt's head
stands before its slots, as it does wherever they are read; other chunks are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from coinrag_integrations.engine.c2kv import Blocks
from coinrag_integrations.training.batches import losses
from coinrag_integrations.training.samples import Sample, Slots


def reconstruction(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    kvs: Sequence[torch.Tensor],
    windows: Sequence[int | None],
) -> torch.Tensor:
    """Mean nats a token of each sample's first chunk behind its own slots: fp32 [B].

    `kvs` [L, 2, 1, H, N, D] are the samples' composed entries, slots among them. A chunk of one token has
    none to predict: 0.
    """
    again = [
        (number, line, kv[..., : len(line.rows), :])
        for number, (sample, kv) in enumerate(zip(samples, kvs, strict=True))
        for line in _said_again(sample)
    ]
    loss = torch.zeros(len(samples), device=kvs[0].device)
    if again:
        numbers, lines, theirs = zip(*again, strict=True)
        loss[list(numbers)] = losses(model, lines, theirs, windows)
    return loss


def _said_again(sample: Sample) -> list[Sample]:
    """The first chunk's tokens behind the head and its slots; none of a chunk of one token."""
    slots = sample.kv
    if not isinstance(slots, Slots):
        raise TypeError("only slots are read to say a chunk again")
    ids = slots.chunks[0]
    if len(ids) == 1:
        return []
    rows = sample.rows[: len(slots.head) + Blocks(ratio=slots.ratio).n_slots(len(ids))]
    at = tuple(range(rows[-1] + 1, rows[-1] + 1 + len(ids)))
    return [Sample(kv=slots, ids=ids, n_answer=len(ids) - 1, rows=rows, at=at)]
