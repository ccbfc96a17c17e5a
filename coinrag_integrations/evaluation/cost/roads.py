"""Questions asked of one store by several roads to an answer, some at once, and what they took.

"full" prefills the text of the retrieved chunks, "chunk" reads their KV, "text" prefills the words of
their nuggets, "spans" reads the nuggets' KV. Each retrieves for itself, as if it were the only one.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from coinrag_integrations.engine import Text
from coinrag_integrations.engine.plan import Piece, arrange
from coinrag_integrations.engine.timings import Timings
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.evaluation.metrics import token_f1
from coinrag_integrations.rag import CoinRAG, Mode

Road = Literal["full", "text", "chunk", "spans"]
ROADS: tuple[Road, ...] = ("full", "text", "chunk", "spans")
_MODES: Mapping[Road, Mode] = {"full": "full", "chunk": "chunk", "spans": "coinrag"}
_BLOCK = 8  # questions of each thread before it is another road's turn
_WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question answered by one road.

    `answer_s` and `ttft_ms` run from the question, with retrieval; `machine_s` is its share, by
    `answer_s`, of the time that the machine was busy with it and those that were answered beside it.
    """

    f1: float
    answer_s: float
    machine_s: float
    ttft_ms: float
    timings: Timings


def ask_all(
    rag: CoinRAG,
    examples: Sequence[Example],
    roads: Sequence[Road],
    concurrency: Sequence[int],
    *,
    cold: bool = False,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> dict[int, dict[Road, list[Asked]]]:
    """Every question by every road, so many at once; by concurrency and road, in the examples' order.

    The roads take turns, in an order that is drawn for every block of questions. With `cold` the
    operating system forgets the KV files before each turn.
    """
    turns, done = random.Random(seed), 0
    found: dict[int, dict[Road, list[Asked]]] = {}
    for n in concurrency:
        found[n] = {road: [] for road in roads}
        with _threads(n) as pool:
            for road in roads:
                _ask_block(rag, road, examples[: max(n, _WARM_UPS)], pool)
            for block in blocks(examples, n):
                for road in turns.sample(roads, len(roads)):
                    if cold:
                        _drop_from_cache(rag)
                    found[n][road] += _ask_block(rag, road, block, pool)
                    done += len(block)
                    if on_progress is not None:
                        on_progress(done)
    return found


def blocks(examples: Sequence[Example], n: int) -> Iterator[Sequence[Example]]:
    """One question at a time; for n threads some for each, as all wait for a block's last answer."""
    n_blocks = len(examples) if n == 1 else max(len(examples) // (n * _BLOCK), 1)
    ends = [len(examples) * i // n_blocks for i in range(n_blocks + 1)]
    for start, end in itertools.pairwise(ends):
        yield examples[start:end]


@contextmanager
def _threads(n: int) -> Iterator[ThreadPoolExecutor]:
    """So many threads, which drop what they have not begun when somebody interrupts."""
    pool = ThreadPoolExecutor(n, thread_name_prefix="coinrag-ask")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _ask_block(
    rag: CoinRAG, road: Road, block: Sequence[Example], pool: ThreadPoolExecutor
) -> list[Asked]:
    begin = time.perf_counter()
    rows = list(pool.map(lambda example: _ask(rag, road, example), block))
    wall, busy = time.perf_counter() - begin, sum(row.answer_s for row in rows)
    return [replace(row, machine_s=wall * row.answer_s / busy) for row in rows]


def _ask(rag: CoinRAG, road: Road, example: Example) -> Asked:
    begin = time.perf_counter()
    if road == "text":
        text, timings = _ask_words(rag, example.question)
    else:
        reply = rag.ask(example.question, _MODES[road])
        text, timings = reply.text, reply.answer.timings
    seconds = time.perf_counter() - begin
    return Asked(
        f1=token_f1(text, example.answers),
        answer_s=seconds,
        machine_s=seconds,
        ttft_ms=seconds * 1e3 - timings.decode_ms,
        timings=timings,
    )


def _ask_words(rag: CoinRAG, question: str) -> tuple[str, Timings]:
    """Answer from the tokens of what "spans" would read, in the same order, without any KV."""
    begin = time.perf_counter()
    refs = arrange([span.ref for span in rag.retrieve(question)])
    retrieve_ms = (time.perf_counter() - begin) * 1e3
    engine = rag.engine
    chunks = {ref.chunk_id: engine.catalog.chunk(ref.chunk_id) for ref in refs}
    words: list[Piece] = [
        Text(chunks[ref.chunk_id].token_ids[ref.start : ref.stop]) for ref in refs
    ]
    prompt = engine.prompt
    stream = engine.stream_pieces(
        [Text(prompt.head), *words, Text(prompt.tail(question))], rag.generation
    )
    for _ in stream:
        pass
    return stream.answer.text, replace(stream.answer.timings, retrieve_ms=retrieve_ms)


def _drop_from_cache(rag: CoinRAG) -> None:
    """Have the operating system forget the KV files; what it has yet to write it keeps."""
    for chunk_id in rag.engine.store:
        file = os.open(rag.engine.store.path(chunk_id), os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
