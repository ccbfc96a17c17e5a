from __future__ import annotations

import pytest

from coinrag_integrations.errors import CoinRAGError, SpanError
from coinrag_integrations.types import Chunk, ChunkId, Span, SpanRef

CHUNK = Chunk(
    chunk_id=ChunkId("c"),
    document_id="d",
    index=0,
    text="one two  three",
    char_start=0,
    token_ids=(1, 2, 3),
    offsets=((0, 3), (4, 7), (9, 14)),
)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 3), (4, 3), (-1, 2), (-3, -1)])
def test_ranges_that_select_nothing_are_refused_everywhere(start, stop):
    with pytest.raises(SpanError, match="selects no token"):
        Span(start, stop)
    with pytest.raises(SpanError, match="selects no token"):
        SpanRef(ChunkId("c"), start, stop)
    assert issubclass(SpanError, ValueError)
    assert issubclass(SpanError, CoinRAGError)


def test_lengths_count_tokens_and_order_is_by_start():
    assert len(Span(3, 7)) == len(SpanRef(ChunkId("c"), 3, 7)) == 4
    assert sorted([Span(3, 5), Span(1, 9), Span(1, 2)]) == [Span(1, 2), Span(1, 9), Span(3, 5)]


def test_characters_are_widened_to_whole_tokens_and_gaps_belong_to_none():
    assert CHUNK.span_of(1, 2) == Span(0, 1)
    assert CHUNK.span_of(2, 5) == Span(0, 2)
    assert CHUNK.span_of(0, 14) == Span(0, 3)
    assert CHUNK.text_of(Span(0, 2)) == "one two"
    for start, stop in ((3, 4), (7, 9), (14, 20)):
        with pytest.raises(SpanError):
            CHUNK.span_of(start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (2, 2), (3, 3), (7, 4), (6, 5)])
def test_no_token_touches_an_empty_range_of_characters(start, stop):
    with pytest.raises(SpanError, match="no token"):
        CHUNK.span_of(start, stop)
