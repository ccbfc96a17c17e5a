"""What documents are made of, before anything is encoded: characters, tokens, chunks, nuggets.

Everything is tokenised, unless the documents hold more text than is worth it; the nugget rules run on
some of the chunks. What is looked at is what has the smallest hashes: an even sample, and the same one
in every run.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import xxhash

from coinrag_integrations.engine.plan import arrange
from coinrag_integrations.errors import DocumentError
from coinrag_integrations.nuggets import NuggetProposer, extract_nuggets
from coinrag_integrations.retrieval import RetrievalConfig
from coinrag_integrations.retrieval.config import Form
from coinrag_integrations.retrieval.forms import OF_CHUNKS, of_chunks, of_nuggets
from coinrag_integrations.types import Chunk, Document, ScoredSpan, Span, SpanRef

MAX_CHARACTERS = 16_000_000  # seconds of tokenising; up to four times that many bytes of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenisedText:
    """One document's size: its characters, and the tokens of each of its chunks."""

    n_characters: int
    chunk_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was counted.

    `n_documents` and `n_characters` are of all documents, `texts` of those that were tokenised.
    `chunks` are a sample of the chunks of `texts`, with nuggets, and `covered` the token ranges of
    each that would be stored. Seconds are what reading all documents, cutting `texts` and finding
    the nuggets of `chunks` took.
    """

    n_documents: int
    n_characters: int
    texts: tuple[TokenisedText, ...]
    chunks: tuple[Chunk, ...]
    covered: tuple[tuple[Span, ...], ...]
    read_seconds: float
    cut_seconds: float
    nugget_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What retrieval could find for a question: chunks, and nuggets in them, best first."""

    chunks: tuple[Chunk, ...]
    nuggets: tuple[ScoredSpan, ...]

    def refs(self, form: Form, ratio: int = 1, n_raw: int = 1) -> list[SpanRef]:
        """What is read of it in a form, merged."""
        if form in OF_CHUNKS:
            whole = [_scored(chunk, Span(0, len(chunk))) for chunk in self.chunks]
            spans = of_chunks(form, whole, ratio, n_raw)
        else:
            by_id = {chunk.chunk_id: chunk for chunk in self.chunks}
            spans = of_nuggets(form, self.nuggets, by_id.get, ratio)
        return arrange([span.ref for span in spans])


def survey(
    documents: Iterable[Document],
    cut: Callable[[Document], Sequence[Chunk]],
    proposer: NuggetProposer,
    covered: Callable[[Chunk], Sequence[Span]],
    *,
    n_sample: int | None = 64,
    max_characters: int = MAX_CHARACTERS,
) -> Survey:
    """Read all documents, tokenise at most `max_characters` of them, look into `n_sample` chunks.

    `cut` and `covered` are what the store would do (`Engine.chunk`, `Engine.covered`). `n_sample`
    None looks into every chunk.

    Raises:
        DocumentError: there is no text in the documents.
    """
    begin = time.perf_counter()
    held, n_documents, n_characters = _held(documents, max_characters)
    read = time.perf_counter()
    texts: list[TokenisedText] = []
    every = _cut(held, cut, texts)
    by_hash = sorted(every, key=_id) if n_sample is None else heapq.nsmallest(n_sample, every, _id)
    done = time.perf_counter()
    if not by_hash:
        raise DocumentError("there is nothing to estimate from: no document holds any text")
    chunks = tuple(extract_nuggets(chunk, proposer) for chunk in by_hash)
    return Survey(
        n_documents=n_documents,
        n_characters=n_characters,
        texts=tuple(texts),
        chunks=chunks,
        covered=tuple(tuple(covered(chunk)) for chunk in chunks),
        read_seconds=read - begin,
        cut_seconds=done - read,
        nugget_seconds=time.perf_counter() - done,
    )


def draw_questions(chunks: Sequence[Chunk], retrieval: RetrievalConfig, n: int) -> list[Found]:
    """What retrieval could find for `n` questions.

    Any chunk is taken to be as good as any other. A chunk without nuggets stands for itself, as in
    `SpanIndex.search`.
    """
    random = Random(0)
    drawn = []
    for _ in range(n):
        found = random.sample(chunks, min(retrieval.n_chunks, len(chunks)))
        nuggets = [nugget for chunk in found for nugget in _nuggets(chunk)]
        chosen = random.sample(nuggets, min(retrieval.n_nuggets, len(nuggets)))
        drawn.append(Found(chunks=tuple(found), nuggets=tuple(chosen)))
    return drawn


def _nuggets(chunk: Chunk) -> list[ScoredSpan]:
    spans = [nugget.span for nugget in chunk.nuggets] or [Span(0, len(chunk))]
    return [_scored(chunk, span) for span in spans]


def _scored(chunk: Chunk, span: Span) -> ScoredSpan:
    begin, end = chunk.characters_of(span)
    return ScoredSpan(
        ref=chunk.ref(span),
        text=chunk.text_of(span),
        score=0.0,
        document_id=chunk.document_id,
        char_start=chunk.char_start + begin,
        char_stop=chunk.char_start + end,
    )


def _held(documents: Iterable[Document], max_characters: int) -> tuple[list[Document], int, int]:
    """An even sample of at most so many characters (at least one document); how many in all."""
    heap: list[tuple[int, int, Document]] = []  # largest hash first
    n_documents = n_characters = n_held = 0
    for document in documents:
        hashed = xxhash.xxh3_64_intdigest(document.document_id.encode(errors="replace"))
        heapq.heappush(heap, (-hashed, n_documents, document))
        n_documents += 1
        n_characters += len(document.text)
        n_held += len(document.text)
        while n_held > max_characters and len(heap) > 1:
            n_held -= len(heapq.heappop(heap)[2].text)
    return [document for _, _, document in heap], n_documents, n_characters


def _cut(
    documents: Iterable[Document],
    cut: Callable[[Document], Sequence[Chunk]],
    texts: list[TokenisedText],
) -> Iterator[Chunk]:
    """All chunks, one document at a time; the documents' sizes go to `texts`."""
    for document in documents:
        chunks = cut(document)
        sizes = tuple(map(len, chunks))
        texts.append(TokenisedText(n_characters=len(document.text), chunk_tokens=sizes))
        yield from chunks


def _id(chunk: Chunk) -> str:
    """A chunk's id, which is a hash."""
    return chunk.chunk_id
