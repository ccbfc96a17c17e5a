"""As what found chunks and nuggets are read: whole, as nuggets, as C2KV's slots, or as some of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from coinrag_integrations.retrieval.config import Form
from coinrag_integrations.types import Chunk, ChunkId, ScoredSpan, Span

OF_CHUNKS: tuple[Form, ...] = ("chunks", "c2kv", "hybrid")  # the others are made of nuggets


def of_chunks(form: Form, chunks: Sequence[ScoredSpan], ratio: int, n_raw: int) -> list[ScoredSpan]:
    """Whole chunks, best first, in a form that needs no nuggets: "chunks", "c2kv" or "hybrid"."""
    n_whole = {"chunks": len(chunks), "c2kv": 0, "hybrid": n_raw}[form]
    slots = (replace(it, ref=replace(it.ref, ratio=ratio)) for it in chunks[n_whole:])
    return [*chunks[:n_whole], *slots]


def of_nuggets(
    form: Form,
    nuggets: Sequence[ScoredSpan],
    chunk: Callable[[ChunkId], Chunk | None],
    ratio: int,
) -> list[ScoredSpan]:
    """Nuggets, best first, in a form that is made of them.

    "spans" are themselves. "slots" are those whose block of tokens meets a nugget. "background" are the
    nuggets, and slots of all blocks of their chunks that meet none: a chunk's are in the order of its
    text, and chunks in that of their best nuggets. `chunk` gives the chunks that they lie in; those that
    are not there any more (None) are left out.
    """
    if form == "spans":
        return list(nuggets)
    by_chunk: dict[ChunkId, list[ScoredSpan]] = {}
    for nugget in nuggets:
        by_chunk.setdefault(nugget.ref.chunk_id, []).append(nugget)
    made: list[ScoredSpan] = []
    for chunk_id, own in by_chunk.items():
        if (whole := chunk(chunk_id)) is None:
            continue
        met = {block for it in own for block in _blocks(it, ratio)}
        wanted = met if form == "slots" else {*range(-(-len(whole) // ratio))} - met
        score = {block: it.score for it in reversed(own) for block in _blocks(it, ratio)}
        slots = [
            _span(whole, run, ratio, own[0], max((score.get(b, 0.0) for b in run), default=0.0))
            for run in _runs(sorted(wanted))
        ]
        if form == "background":
            slots = sorted([*own, *slots], key=lambda it: it.ref)
        made += slots
    return made


def _blocks(span: ScoredSpan, ratio: int) -> range:
    """The blocks that a span meets."""
    return range(span.ref.start // ratio, -(-span.ref.stop // ratio))


def _runs(blocks: Sequence[int]) -> Iterator[range]:
    """Blocks that follow each other, together."""
    first = 0
    for i, block in enumerate(blocks):
        if i + 1 == len(blocks) or blocks[i + 1] != block + 1:
            yield range(blocks[first], block + 1)
            first = i + 1


def _span(chunk: Chunk, run: range, ratio: int, like: ScoredSpan, score: float) -> ScoredSpan:
    """Slots of a run of blocks, with the words that they stand for."""
    span = Span(run.start * ratio, min(run.stop * ratio, len(chunk)))
    begin, end = chunk.characters_of(span)
    return replace(
        like,
        ref=replace(chunk.ref(span), ratio=ratio),
        text=chunk.text_of(span),
        score=score,
        char_start=chunk.char_start + begin,
        char_stop=chunk.char_start + end,
    )
