import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.errors import ConfigError, SpanError
from coinrag_integrations.nuggets.align import align, align_ranges
from coinrag_integrations.types import Chunk, ChunkId, Span

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat,",
    "Ní",
    "Mháille",
    "(see",
    "it)",
    "東京",
    "a\u0301b",
    "\n",
]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map(" ".join)


def chunk_of(text: str, pattern: str = r"\w+|[^\w\s]") -> Chunk:
    offsets = tuple(match.span() for match in re.finditer(pattern, text))
    return Chunk(
        chunk_id=ChunkId("c1"),
        document_id="d1",
        index=0,
        text=text,
        char_start=0,
        token_ids=tuple(range(len(offsets))),
        offsets=offsets,
    )


def check_laws(chunk, alignment):
    spans = [nugget.span for nugget in alignment.nuggets]
    assert spans == sorted(set(spans))
    for nugget in alignment.nuggets:
        assert nugget.text == chunk.text[nugget.char_start : nugget.char_stop]
        covered = chunk.offsets[nugget.span.start][0], chunk.offsets[nugget.span.stop - 1][1]
        assert covered[0] <= nugget.char_start < nugget.char_stop <= covered[1]
        assert nugget.match == "fuzzy" or nugget.similarity == 1.0


def test_the_papers_example_is_found_with_its_similarity():
    name = "Grace O'Malley (Irish: Gráinne Ní Mháille)"
    text = f"The pirate queen was born as {name}, head of the dynasty in the west."
    # The example with the comma that follows it: 43 characters, two of which differ.
    wanted = "Grace O'Malley (Irish: Grainne Ni Mháille),"
    (nugget,) = align(chunk_of(text), [wanted]).nuggets
    assert nugget.text == f"{name},"
    assert nugget.match == "fuzzy"
    assert nugget.similarity == pytest.approx(0.953, abs=0.001)


def test_a_fuzzy_match_is_the_whole_words_most_like_the_candidate():
    text = "It is said that the old bridge was opened to traffic in 1894 by the Prince of Wales."
    (nugget,) = align(chunk_of(text), ["The bridge was opened to the traffic in 1894"]).nuggets
    assert nugget.text == "bridge was opened to traffic in 1894"
    assert 0.85 < nugget.similarity < 1


def test_other_white_space_is_not_a_difference():
    chunk = chunk_of("one two\n   three four five")
    (nugget,) = align(chunk, ["two three four"]).nuggets
    assert nugget.text == "two\n   three four"
    assert (nugget.match, nugget.similarity) == ("fuzzy", 1.0)


def test_what_is_not_in_the_chunk_is_abandoned_with_a_reason():
    chunk = chunk_of("The bridge was opened in 1894 by the Prince of Wales.")
    alignment = align(chunk, ["Bananas grow quickly under tropical sun", " \n", ""])
    assert alignment.nuggets == ()
    unlike, blank, empty = alignment.abandoned
    assert 0 < unlike.similarity < 0.7
    assert f"best {unlike.similarity:.2f}, threshold 0.70" in unlike.reason
    assert blank.reason == empty.reason == "empty"


def test_the_threshold_decides():
    chunk = chunk_of("The bridge was opened in 1894 by the Prince of Wales.")
    wanted = ["The bridge was closed in 1895"]
    similarity = align(chunk, wanted).nuggets[0].similarity
    assert align(chunk, wanted, threshold=similarity).nuggets
    assert align(chunk, wanted, threshold=similarity + 0.001).abandoned


@pytest.mark.parametrize("threshold", [0, -0.1, 1.1, float("nan"), 70])
def test_a_threshold_outside_its_range_is_refused(threshold):
    with pytest.raises(ConfigError, match="threshold"):
        align(chunk_of("text"), [], threshold=threshold)


def test_equal_candidates_take_successive_occurrences():
    chunk = chunk_of("so it goes, and so it goes, and so it goes")
    alignment = align(chunk, ["so it goes"] * 2)
    assert [nugget.char_start for nugget in alignment.nuggets] == [0, 16]
    # A fourth occurrence does not exist: it repeats the third and is dropped.
    assert len(align(chunk, ["so it goes"] * 4).nuggets) == 3


def test_an_occurrence_that_cuts_no_word_is_preferred():
    (nugget,) = align(chunk_of("part of the art"), ["art"]).nuggets
    assert nugget.char_start == 12
    (inside,) = align(chunk_of("partly"), ["art"]).nuggets
    assert (inside.text, inside.span) == ("art", Span(0, 1))


def test_one_nugget_a_span_and_the_best_one():
    chunk = chunk_of("The bridge was opened in 1894")
    alignment = align(chunk, ["The bridge was opened in 1895", "The bridge was opened in 1894"])
    assert [nugget.match for nugget in alignment.nuggets] == ["exact"]


def test_characters_without_a_token_are_abandoned():
    chunk = chunk_of("alpha beta ~~~ gamma", pattern=r"\w+")
    (left,) = align(chunk, ["~~~"]).abandoned
    assert left.reason == "no token covers it"
    (left,) = align_ranges(chunk, [(11, 14)]).abandoned
    assert left.reason == "no token covers it"


def test_a_chunk_without_words_or_tokens_has_no_nuggets():
    for text in ("", " \n"):
        alignment = align(chunk_of(text), ["anything", "x"])
        assert alignment.nuggets == ()
        assert [left.similarity for left in alignment.abandoned] == [0.0, 0.0]


def test_a_candidate_longer_than_the_chunk_is_compared_with_all_of_it():
    alignment = align(chunk_of("four words are here"), ["four words are here now"])
    assert alignment.nuggets[0].span == Span(0, 4)


def test_ranges_are_taken_as_they_are_without_outer_space():
    chunk = chunk_of("so it goes, and so it goes")
    alignment = align_ranges(chunk, [(15, 26), (0, 10), (11, 12), (0, 11)])
    check_laws(chunk, alignment)
    assert [nugget.char_start for nugget in alignment.nuggets] == [0, 0, 16]
    assert [left.reason for left in alignment.abandoned] == ["empty"]


@pytest.mark.parametrize("bad", [(-1, 3), (2, 1), (0, 99)])
def test_ranges_outside_the_text_are_refused(bad):
    with pytest.raises(SpanError, match="offsets must count characters"):
        align_ranges(chunk_of("short text"), [bad])


@given(TEXT, st.data())
@settings(max_examples=150, deadline=None)
def test_every_verbatim_candidate_is_found(text, data):
    chunk = chunk_of(text, pattern=r"\S")
    cuts = st.integers(0, len(text))
    candidates = [
        text[min(cut) : max(cut)]
        for cut in data.draw(st.lists(st.tuples(cuts, cuts), max_size=6))
        if text[min(cut) : max(cut)].strip()
    ]
    alignment = align(chunk, candidates)
    check_laws(chunk, alignment)
    assert alignment.abandoned == ()
    found = {nugget.text for nugget in alignment.nuggets}
    assert found == {candidate.strip() for candidate in candidates}


@given(st.text(max_size=80) | TEXT, st.lists(st.text(max_size=60) | TEXT, max_size=5))
@settings(max_examples=200, deadline=None)
def test_any_candidates_are_placed_or_abandoned(text, candidates):
    for pattern in (r"\w+|[^\w\s]", r"\S+\s?", r".", r"[a-z]"):
        chunk = chunk_of(text, pattern)
        alignment = align(chunk, candidates)
        assert len(alignment.nuggets) + len(alignment.abandoned) <= len(candidates)
        assert all(left.reason for left in alignment.abandoned)
        if pattern != "[a-z]":  # tokens that leave gaps cannot cover the characters in them
            spans = [nugget.span for nugget in alignment.nuggets]
            assert spans == sorted(set(spans))
            for nugget in alignment.nuggets:
                assert nugget.text == text[nugget.char_start : nugget.char_stop]


def test_forty_bad_candidates_cost_little():
    text = " ".join(f"word{i * 7919 % 997} stands" for i in range(256))
    bad = [" ".join(f"other{i * j % 89}" for j in range(13)) for i in range(1, 41)]
    chunk = chunk_of(text)
    start = time.perf_counter()
    alignment = align(chunk, bad)
    # Takes 15 ms on an idle core; the bound leaves room for a busy one.
    assert time.perf_counter() - start < 0.5
    assert len(alignment.abandoned) == 40
