"""As what chunks and nuggets are read: which tokens, in which order, with which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.retrieval import RetrievalConfig
from coinrag_integrations.retrieval.forms import of_chunks, of_nuggets
from coinrag_integrations.types import Chunk, ChunkId, ScoredSpan, Span

RATIOS = st.sampled_from([2, 3, 4, 8, 32])


def chunk_of(name: str, n_tokens: int, char_start: int = 100) -> Chunk:
    """Tokens of one to three letters, with a space between them."""
    words = [chr(97 + i % 26) * (1 + i % 3) for i in range(n_tokens)]
    offsets, at = [], 0
    for word in words:
        offsets.append((at, at + len(word)))
        at += len(word) + 1
    return Chunk(
        chunk_id=ChunkId(name * 32),
        document_id=f"document {name}",
        index=0,
        text=" ".join(words),
        char_start=char_start,
        token_ids=tuple(range(n_tokens)),
        offsets=tuple(offsets),
    )


def scored(chunk: Chunk, start: int, stop: int, score: float = 0.5) -> ScoredSpan:
    span = Span(start, stop)
    begin = chunk.char_start + chunk.offsets[start][0]
    text = chunk.text_of(span)
    return ScoredSpan(
        ref=chunk.ref(span),
        text=text,
        score=score,
        document_id=chunk.document_id,
        char_start=begin,
        char_stop=begin + len(text),
        metadata={"title": chunk.document_id},
    )


@st.composite
def searches(draw: st.DrawFn) -> tuple[dict[ChunkId, Chunk], list[ScoredSpan]]:
    """Nuggets of a few chunks, best first; those of a chunk may overlap and repeat."""
    chunks = {}
    nuggets = []
    for name in "ab"[: draw(st.integers(1, 2))]:
        chunk = chunk_of(name, draw(st.integers(1, 40)))
        chunks[chunk.chunk_id] = chunk
        for start in draw(st.lists(st.integers(0, len(chunk) - 1), min_size=1, max_size=4)):
            stop = draw(st.integers(start + 1, len(chunk)))
            nuggets.append((chunk, start, stop))
    order = draw(st.permutations(nuggets))
    return chunks, [scored(*it, score=1 - i / 10) for i, it in enumerate(order)]


def tokens(spans: list[ScoredSpan], chunk: Chunk) -> list[int]:
    """The tokens that the spans of a chunk read, one by one."""
    own = [it.ref for it in spans if it.ref.chunk_id == chunk.chunk_id]
    return [token for ref in own for token in range(ref.start, ref.stop)]


def is_met(token: int, nuggets: list[ScoredSpan], chunk: Chunk, ratio: int) -> bool:
    """Whether the block of a token has a token of a nugget."""
    block = token // ratio
    mates = range(block * ratio, min((block + 1) * ratio, len(chunk)))
    return any(mate in tokens(nuggets, chunk) for mate in mates)


@given(searches(), RATIOS)
def test_slots_cover_exactly_the_blocks_that_meet_nuggets(found, ratio):
    chunks, nuggets = found
    slots = of_nuggets("slots", nuggets, chunks.__getitem__, ratio)
    assert {it.ref.ratio for it in slots} == {ratio}
    for chunk in chunks.values():
        wanted = [t for t in range(len(chunk)) if is_met(t, nuggets, chunk, ratio)]
        assert tokens(slots, chunk) == wanted  # each once, in the order of the text


@given(searches(), RATIOS)
def test_a_background_is_the_nuggets_and_the_blocks_that_meet_none(found, ratio):
    chunks, nuggets = found
    made = of_nuggets("background", nuggets, chunks.__getitem__, ratio)
    raw = [it for it in made if it.ref.ratio == 1]
    slots = [it for it in made if it.ref.ratio != 1]
    assert sorted(raw, key=str) == sorted(nuggets, key=str)
    for chunk in chunks.values():
        rest = [t for t in range(len(chunk)) if not is_met(t, nuggets, chunk, ratio)]
        assert tokens(slots, chunk) == rest
        starts = [it.ref.start for it in made if it.ref.chunk_id == chunk.chunk_id]
        assert starts == sorted(starts)
    # Chunks stand in the order of their best nuggets, each in one piece.
    order = list(dict.fromkeys(it.ref.chunk_id for it in nuggets))
    assert [it.ref.chunk_id for it in made] == sorted(
        (it.ref.chunk_id for it in made), key=order.index
    )


@given(searches(), RATIOS, st.sampled_from(["slots", "background"]))
def test_slots_have_the_words_and_the_place_that_they_stand_for(found, ratio, form):
    chunks, nuggets = found
    for it in of_nuggets(form, nuggets, chunks.__getitem__, ratio):
        chunk = chunks[it.ref.chunk_id]
        assert it.text == chunk.text_of(Span(it.ref.start, it.ref.stop))
        at = slice(it.char_start - chunk.char_start, it.char_stop - chunk.char_start)
        assert chunk.text[at] == it.text
        assert (it.document_id, it.metadata) == (chunk.document_id, {"title": chunk.document_id})
        assert it.ref.stop % it.ref.ratio == 0 or it.ref.stop == len(chunk)


def test_slots_score_as_the_best_nugget_that_they_meet():
    chunk = chunk_of("a", 20)
    nuggets = [scored(chunk, 9, 11, 0.9), scored(chunk, 1, 2, 0.8), scored(chunk, 11, 15, 0.1)]
    slots = of_nuggets("slots", nuggets, {chunk.chunk_id: chunk}.__getitem__, 4)
    assert [(it.ref.start, it.ref.stop, it.score) for it in slots] == [(0, 4, 0.8), (8, 16, 0.9)]
    made = of_nuggets("background", nuggets, {chunk.chunk_id: chunk}.__getitem__, 4)
    assert [(it.ref.start, it.ref.ratio, it.score) for it in made] == [
        (1, 1, 0.8),
        (4, 4, 0.0),
        (9, 1, 0.9),
        (11, 1, 0.1),
        (16, 4, 0.0),
    ]


def test_chunks_are_read_whole_as_slots_or_the_best_of_them_whole():
    chunks = [chunk_of(name, n) for name, n in (("a", 9), ("b", 8), ("c", 3))]
    found = [scored(chunk, 0, len(chunk)) for chunk in chunks]
    ratios = {
        (form, n_raw): [it.ref.ratio for it in of_chunks(form, found, 4, n_raw)]
        for form, n_raw in (("chunks", 1), ("c2kv", 1), ("hybrid", 0), ("hybrid", 1), ("hybrid", 9))
    }
    assert ratios == {
        ("chunks", 1): [1, 1, 1],
        ("c2kv", 1): [4, 4, 4],
        ("hybrid", 0): [4, 4, 4],
        ("hybrid", 1): [1, 4, 4],
        ("hybrid", 9): [1, 1, 1],
    }
    (_, second, _) = of_chunks("c2kv", found, 4, 0)
    assert (second.text, second.ref.stop, second.ref.n_entries) == (chunks[1].text, 8, 2)


def test_nuggets_alone_are_as_they_were_found():
    chunk = chunk_of("a", 9)
    nuggets = [scored(chunk, 5, 8), scored(chunk, 0, 2)]
    assert of_nuggets("spans", nuggets, {}.__getitem__, 4) == nuggets
    assert of_nuggets("background", [], {}.__getitem__, 4) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"form": "slot"}, "spans, chunks, c2kv, hybrid, slots, background"),
        ({"ratio": 1}, "ratio=1"),
        ({"ratio": 4.0}, "ratio=4.0"),
        ({"n_raw": -1}, "n_raw=-1"),
        ({"n_raw": "2"}, "n_raw='2'"),
        ({"n_chunks": 0}, "n_chunks=0 must be a whole number of at least 1"),
        ({"n_nuggets": None}, "n_nuggets=None"),
    ],
)
def test_forms_that_are_none_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        RetrievalConfig(**options)
