"""Where words stand: found exactly where scores would find them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.evaluation.errors.words import find_words, is_within, join_ranges
from coinrag_integrations.evaluation.metrics import contains_answer, normalise

TEXTS = st.lists(
    st.sampled_from(
        ["the", "a", "Roule", "roule,", "Bas-tien", "(1923)", "--", "é", " ", "\n", "."]
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize(
    ("text", "phrases", "found"),
    [
        ("It was Bastien Roule.", ("bastien roule",), ["Bastien Roule"]),
        ("By 'Bastien, the Roule'!", ("Bastien Roule",), ["Bastien, the Roule"]),
        ("Roule met Roule", ("Roule",), ["Roule", "Roule"]),
        ("Bastien Roule", ("Roule", "Bastien Roule"), ["Bastien Roule"]),
        ("Roulette", ("Roule",), []),
        ("the", ("the",), []),
        ("1,923 pipes", ("1923",), ["1,923"]),
    ],
)
def test_words_are_found_whatever_stands_around_them(text, phrases, found):
    assert [text[start:stop] for start, stop in find_words(text, phrases)] == found


@given(TEXTS, st.lists(TEXTS, max_size=3))
def test_they_are_found_where_a_score_would_find_them(text, phrases):
    found = find_words(text, phrases)
    assert bool(found) == (contains_answer(text, phrases) and bool(normalise(text)))
    assert found == sorted(found)
    for start, stop in found:
        assert 0 <= start < stop <= len(text)
        assert contains_answer(text[start:stop], phrases)


def test_ranges_are_joined_where_they_overlap_or_only_white_space_parts_them():
    assert join_ranges([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 3), (3, 4), (5, 7)]
    assert join_ranges([(0, 2), (4, 6), (7, 8)], "ab  cd.e") == [(0, 6), (7, 8)]
    assert is_within((1, 2), [(0, 1), (1, 3)])
    assert not is_within((0, 2), [(0, 1), (1, 3)])
