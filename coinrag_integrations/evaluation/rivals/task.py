"""What every rival is given, and what it gives back. Knows no method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np

from coinrag_integrations.engine.plan import arrange
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.prompt import Prompt
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.codecs import rank_spans
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.types import Chunk, SpanRef

Search = Literal["two-stage", "one-stage", "reranked"]
CANDIDATES = 4  # nuggets that a reranker sees, as a multiple of those wanted
T = TypeVar("T")


class Reranker(Protocol):
    """What reads question and text together, as `retrieval.CrossEncoder` does."""

    @property
    def name(self) -> str:
        """What it is."""
        ...

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        """How well each text answers the question."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question and what retrieval found for it, the same for every method.

    `head` and `tail` are the prompt's tokens before and behind the context; `chunks` those of stage
    one, best first; `spans` those of stage two, in the engine's order, merged where they touch;
    `ranked` all nuggets of these chunks, best first.
    """

    question: str
    head: tuple[int, ...]
    tail: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    spans: tuple[SpanRef, ...]
    ranked: tuple[SpanRef, ...]

    def nearest(self, n: int | None = None) -> tuple[SpanRef, ...]:
        """The n best nuggets as `spans` has them; None: `spans` itself."""
        return self.spans if n is None else tuple(arrange(self.ranked[:n]))

    def chunk_of(self, ref: SpanRef) -> Chunk:
        """The chunk that a span lies in.

        Raises:
            ConfigError: it is none of the task's.
        """
        for chunk in self.chunks:
            if chunk.chunk_id == ref.chunk_id:
                return chunk
        raise ConfigError(f"chunk {ref.chunk_id} is none of the {len(self.chunks)} that were found")

    def ids_of(self, ref: SpanRef) -> tuple[int, ...]:
        """The tokens of a span."""
        return self.chunk_of(ref).token_ids[ref.start : ref.stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """CacheBlend's first pass: the tokens `ids` of the entries behind the head, of which the
    `n_chosen` whose values deviate most are computed anew.
    """

    ids: tuple[int, ...]
    n_chosen: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """APE's attention: the rows of the contexts are a part of their own, with temperature and scale."""

    rows: slice
    temperature: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """What a question stands behind.

    Text that is still to be computed is the online text of the prefix's plan. `n_context` rows between
    prompt and question are seen by the answer ("active tokens", whether read or computed);
    `bytes_read` is what a store would read for them. A method that does more than a plain pass behind
    a prefix says so: `blend`, or attention in two parts (`apart`).
    """

    prefix: Prefix
    n_context: int
    bytes_read: int
    blend: Blend | None = None
    apart: Apart | None = None


def make_task(
    question: str,
    chunks: Sequence[Chunk],
    prompt: Prompt,
    embedder: Embedder,
    *,
    n_chunks: int,
    n_nuggets: int,
    search: Search = "two-stage",
    reranker: Reranker | None = None,
) -> Task:
    """Search among these chunks alone, without an index.

    "two-stage" is what `SpanIndex.search` does. "one-stage" looks for the nearest nuggets of all chunks,
    and its chunks are those that hold them. "reranked" lets a cross-encoder order the chunks, then
    `CANDIDATES` times as many nuggets as are wanted.

    Raises:
        ConfigError: "reranked" without a reranker.
    """
    if search == "one-stage":
        ranked = rank_spans(question, chunks, embedder)
        wanted = dict.fromkeys(ref.chunk_id for ref in ranked[:n_nuggets])
        by_id = {chunk.chunk_id: chunk for chunk in chunks}
        found = [by_id[chunk_id] for chunk_id in wanted]
        ranked = [ref for ref in ranked if ref.chunk_id in wanted]
    elif search == "reranked":
        if reranker is None:
            raise ConfigError("a reranked search needs a reranker: give --reranker")
        found = _by_score(chunks, reranker.score(question, [c.text for c in chunks]))[:n_chunks]
        ranked = rank_spans(question, found, embedder)[: CANDIDATES * n_nuggets]
        texts = {c.ref(n.span): n.text for c in found for n in c.nuggets}
        texts |= {c.ref(): c.text for c in found if not c.nuggets}
        ranked = _by_score(ranked, reranker.score(question, [texts[ref] for ref in ranked]))
    else:
        found = nearest_chunks(question, chunks, embedder, n_chunks)
        ranked = rank_spans(question, found, embedder)
    if not any(chunk.nuggets for chunk in found):
        n_nuggets = len(ranked)  # chunks stand for themselves, and stage one has chosen these
    return Task(
        question=question,
        head=prompt.head,
        tail=prompt.tail(question),
        chunks=tuple(found),
        spans=tuple(arrange(ranked[:n_nuggets])),
        ranked=tuple(ranked),
    )


def nearest_chunks(
    question: str, chunks: Sequence[Chunk], embedder: Embedder, n_chunks: int
) -> list[Chunk]:
    """Stage one among these chunks, best first."""
    if not chunks:
        return []
    vectors = embedder.embed_documents([chunk.text for chunk in chunks])
    scores = (np.asarray(vectors) @ embedder.embed_query(question)).round(6).tolist()
    ranked = sorted(zip(scores, chunks, strict=True), key=lambda row: (-row[0], row[1].ref()))
    return [chunk for _, chunk in ranked[:n_chunks]]


def _by_score(items: Sequence[T], scores: Sequence[float]) -> list[T]:
    """Best first; equally good ones as they were."""
    order = sorted(range(len(items)), key=lambda i: -scores[i])
    return [items[i] for i in order]
