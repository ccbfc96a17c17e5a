"""Handles: what we wrote is believed where it stands; everything else is read as words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.engine.handles import (
    CLOSE,
    OPEN,
    Handles,
    mark,
    strip_handles,
    without_handles,
)
from coinrag_integrations.types import Chunk, ChunkId, Nugget, Span, SpanRef

WORDS = "The organ was built by Bastien Roule in 1923 from copper pipes"
_ENDS = [i for i, letter in enumerate(WORDS) if letter == " "] + [len(WORDS)]
_OFFSETS = tuple(zip([0, *(i + 1 for i in _ENDS[:-1])], _ENDS, strict=True))
CHUNK = Chunk(
    chunk_id=ChunkId("0123456789abcdef0123456789abcdef"),
    document_id="organ",
    index=0,
    text=WORDS + ".\n",
    char_start=0,
    token_ids=tuple(range(len(_OFFSETS))),
    offsets=_OFFSETS,
    nuggets=(
        Nugget(
            text="rgan was buil",  # words may begin and end inside a token
            span=Span(1, 4),
            char_start=5,
            char_stop=18,
            match="fuzzy",
            similarity=0.9,
        ),
    ),
)
REF = SpanRef(CHUNK.chunk_id, 5, 7)
NAME = "Bastien Roule"


def handles(*chunks: Chunk, key: bytes = b"k", owner: str = "a.b fingerprint") -> Handles:
    there = chunks or (CHUNK,)
    return Handles(
        key=key,
        owners={1: owner, 4: f"{owner} in slots"},
        find=lambda digits: [chunk for chunk in there if chunk.chunk_id.startswith(digits)],
    )


def marked(ref: SpanRef = REF, words: str = NAME, **other: object) -> str:
    return mark(handles(**other).handle(ref), words)


def test_a_marked_text_is_taken_apart():
    found = handles().resolve(f"Read this: {marked()}\nWho?")
    assert found.pieces == ("Read this: ", REF, "\nWho?")
    assert (found.n_spans, found.refused) == (1, {})


@given(st.data())
def test_any_span_of_a_chunk_comes_back(data):
    start = data.draw(st.integers(0, len(CHUNK) - 1))
    span = Span(start, data.draw(st.integers(start + 1, len(CHUNK))))
    ref = CHUNK.ref(span)
    around = data.draw(st.tuples(st.text(max_size=5), st.text(max_size=5)))
    text = around[0] + mark(handles().handle(ref), CHUNK.text_of(span)) + around[1]
    pieces = [strip_handles(around[0]), ref, strip_handles(around[1])]
    assert handles().resolve(text).pieces == tuple(piece for piece in pieces if piece)


def test_the_words_of_a_nugget_and_of_a_whole_chunk_are_known():
    nugget, whole = CHUNK.ref(Span(1, 4)), CHUNK.ref()
    for ref, words in ((nugget, "rgan was buil"), (whole, CHUNK.text)):
        assert handles().resolve(marked(ref, words)).pieces == (ref,)


def test_white_space_between_spans_is_left_out_and_words_are_not():
    other = CHUNK.ref(Span(8, 9))
    two = (marked(), marked(other, "1923"))
    assert handles().resolve(" \n\n ".join(two)).pieces == (REF, other)
    assert handles().resolve(" and ".join(two)).pieces == (REF, " and ", other)
    assert handles().resolve(f"\n{marked()} ").pieces == ("\n", REF, " ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (marked(key=b"another store"), "unknown"),
        (marked(owner="another tenant"), "unknown"),
        (marked(words="Mallory Smith"), "altered"),
        (marked(words=f"{NAME} "), "altered"),
        (marked().replace(CLOSE, ""), "altered"),
        (f"{OPEN}{'a' * 24}⟧{NAME}{CLOSE}", "unknown"),
        (marked(SpanRef(CHUNK.chunk_id, 5, 8), NAME), "altered"),
        (marked(SpanRef(CHUNK.chunk_id, 5, 99), NAME), "unknown"),
        (marked(SpanRef(ChunkId("f" * 32), 5, 7)), "unknown"),
    ],
)
def test_what_cannot_be_believed_is_read_as_words(text, reason):
    found = handles().resolve(f"a {text} b")
    assert found.pieces == (f"a {strip_handles(text)} b",)
    assert found.refused == {reason: 1}


def test_a_handle_is_not_moved_to_other_words_of_the_same_length():
    text = f"{NAME} {marked().replace(NAME, '')}"
    assert handles().resolve(text).refused == {"altered": 1}


@given(st.lists(st.sampled_from([*"⟦⟧k:/ab2 \n{}", OPEN, CLOSE, marked(), NAME]), max_size=40))
def test_nothing_that_looks_like_a_handle_raises_or_is_shown(parts):
    text = "".join(parts)
    found = handles().resolve(text)
    shown = "".join(piece if isinstance(piece, str) else NAME for piece in found.pieces)
    assert "".join(shown.split()) == "".join(strip_handles(text).split())


def test_words_that_hold_look_alikes_are_still_found():
    chunk = replace(
        CHUNK, text=f"x {CLOSE} {OPEN}y⟧ z", offsets=((0, 1), (2, 6), (7, 14), (13, 15))
    )
    chunk = replace(chunk, token_ids=(1, 2, 3, 4), nuggets=())
    ref = chunk.ref()
    text = mark(handles(chunk).handle(ref), chunk.text)
    assert handles(chunk).resolve(text).pieces == (ref,)


def test_chunks_that_begin_alike_are_told_apart():
    twin = replace(CHUNK, chunk_id=ChunkId(CHUNK.chunk_id[:10] + "f" * 22))
    ref = SpanRef(twin.chunk_id, 5, 7)
    for chunks in ((CHUNK, twin), (twin, CHUNK)):
        assert handles(*chunks).resolve(marked(ref)).pieces == (ref,)


def test_spans_that_do_not_fit_into_a_handle_are_words():
    assert mark(handles().handle(SpanRef(CHUNK.chunk_id, 0, 65_536)), "long") == "long"
    assert handles().handle(SpanRef(CHUNK.chunk_id, 0, 65_535))


def test_handles_can_be_left_out():
    text = f"a {marked()} b"
    assert strip_handles(text) == f"a {NAME} b"
    assert without_handles(text).pieces == (f"a {NAME} b",)
    assert without_handles("").pieces == ()


def test_a_handle_is_short_and_safe_in_templates():
    handle = handles().handle(REF)
    assert len(handle) == len(OPEN) + 25
    assert not set(handle) & set("{}<>&%$\"'\\ \n")
