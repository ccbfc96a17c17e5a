"""Entries of which a part is computed anew with the question: CacheBlend and EPIC's LegoLink."""

from __future__ import annotations

from dataclasses import replace

from coinrag_integrations.engine.plan import Text
from coinrag_integrations.evaluation.rivals.independent import chunk_bos
from coinrag_integrations.evaluation.rivals.kitchen import Cached, Kitchen
from coinrag_integrations.evaluation.rivals.task import Blend, Composed, Task
from coinrag_integrations.types import Span


def cacheblend(kitchen: Kitchen, task: Task, *, ratio: float = 0.16) -> Composed:
    """Recompute the `ratio` of tokens whose values deviate most (arXiv 2405.16444).

    From entries encoded behind BOS, as its scripts do: layers 0 and 1 compute all tokens; those whose
    fresh values in layer 1 are farthest from the cached ones, and the question, go on through all
    other layers. Masks are exact by position; the question is always computed. 1.0 is full prefill.
    """
    composed = chunk_bos(kitchen, task)
    ids = tuple(i for chunk in task.chunks for i in chunk.token_ids)
    # One entry of 0.3 * 10 tokens must not be lost to rounding.
    return replace(composed, blend=Blend(ids=ids, n_chosen=int(ratio * len(ids) + 1e-9)))


def legolink(kitchen: Kitchen, task: Task, *, k: int = 16) -> Composed:
    """Recompute the first `k` tokens of every chunk (EPIC, arXiv 2410.15332).

    They were the attention sink of a chunk that was encoded alone. Recomputed tokens are online text in
    front of the rest, in one pass with the question, each seeing all that stands before it. The first
    chunk was encoded without our prompt, so it is mended too. From the longest chunk's length on
    this is full prefill.
    """
    pieces: list[Cached | Text] = []
    for chunk in task.chunks:
        n = min(k, len(chunk))
        pieces.append(Text(chunk.token_ids[:n]))
        if n < len(chunk):
            rest = kitchen.entries(chunk)[n:]
            pieces.append(Cached.whole(chunk.ref(Span(n, len(chunk))), rest))
    return kitchen.lay_out(task, pieces)
