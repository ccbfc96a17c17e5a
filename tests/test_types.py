from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.errors import CoinRAGError, ConfigError, SpanError
from coinrag_integrations.types import Chunk, ChunkId, Scope, Span, SpanRef

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


END = string.ascii_lowercase + string.digits
names = st.builds(
    lambda first, middle, last: first + middle + last if middle is not None else first,
    st.sampled_from(END),
    st.none() | st.text(END + "-_", max_size=46),
    st.sampled_from(END),
)


@given(a=st.tuples(names, names), b=st.tuples(names, names))
def test_scopes_are_equal_and_called_the_same_only_if_both_names_are(a, b):
    scopes = [Scope(tenant=tenant, collection=collection) for tenant, collection in (a, b)]
    assert (str(scopes[0]) == str(scopes[1])) == (scopes[0] == scopes[1]) == (a == b)


def test_names_that_look_alike_together_are_told_apart():
    pairs = [("a", "b-c"), ("a-b", "c"), ("a_b", "c"), ("a", "b_c"), ("ab", "c"), ("a", "bc")]
    assert len({str(Scope(tenant=a, collection=b)) for a, b in pairs}) == len(pairs)


EVIL = [
    *(
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/a",
        "a\\b",
        "a.b",
        ".a",
        "a.",
        "~",
        "a b",
        " a",
        "a ",
        "%2e%2e",
    ),
    *("a\n", "\na", "a\0", "A", "Ä", "ä", "a\u0301", "-a", "a-", "_a", "a_", "-", "_", "a:b", "a*"),
    *(
        "\u0661",
        "\uff0e\uff0e",
        "c$",
        "a" * 49,
        "\u202ea",
        "\ud83c",
        "a;b",
        "a'b",
        'a"b',
        "a|b",
        "{a}",
    ),
]


@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_names_that_could_be_taken_for_something_else_are_refused(name):
    with pytest.raises(ConfigError, match=r"the tenant .* is no name: use 1 to 48 lower-case"):
        Scope(tenant=name)
    with pytest.raises(ConfigError, match=r"the collection .* is no name"):
        Scope(collection=name)


@pytest.mark.parametrize("name", ["a", "0", "a" * 48, "a-b_c", "a--b", "2024_q1", "default"])
def test_usual_names_are_taken_as_they_are(name):
    assert str(Scope(tenant=name, collection=name)) == f"{name}.{name}"
