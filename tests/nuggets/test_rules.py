import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.nuggets.propose import RangeProposer, word_ranges
from coinrag_integrations.nuggets.rules import RuleProposer

PROSE = """\
Grace O'Malley was head of the O'Malley dynasty in the west of Ireland, and the daughter of \
Eoghan Dubhdara. In Irish folklore she is commonly known as Granuaile; she was well educated, \
and is said to have spoken Latin with Queen Elizabeth I in 1593. Upon her father's death she \
took over active leadership of the lordship by land and sea, despite having a brother, Dónal an \
Phíopa. Marriage to Dónal an Chogaidh brought her greater wealth and influence, reportedly \
owning as much as 1,000 head of cattle and horses. She died at Rockfleet. Her ships carried 2.5 \
tons of salt each."""

SCRAPS = (
    *("word", "and", "The", "end.", "(see", "it)", "Dr.", "U.S.", "3.14", ",", "x;", '"Go."', "—"),
    *("# ", "- ", "\n", "\n\n", "\u2028", "東京は", "。", "ไทย", "؟", "\ud800"),
)
ANY_TEXT = st.text(max_size=300) | st.lists(st.sampled_from(SCRAPS), max_size=120).map(" ".join)


def n_words(text: str) -> int:
    return sum(any(c.isalnum() for c in text[a:b]) for a, b in word_ranges(text))


@given(ANY_TEXT, st.integers(1, 8), st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_candidates_are_verbatim_ordered_disjoint_and_in_range(text, low, more):
    proposer = RuleProposer(min_words=low, max_words=low + more)
    ranges = proposer.ranges(text)
    assert proposer.propose(text) == [text[a:b] for a, b in ranges]
    assert all(0 <= a < b <= len(text) for a, b in ranges)
    assert all(b <= c for (_, b), (c, _) in pairwise(ranges))
    if n_words(text) >= low:
        assert all(low <= n_words(text[a:b]) <= low + more for a, b in ranges)
    else:
        assert len(ranges) == any(c.isalnum() for c in text)


@given(st.integers(31, 200))
@settings(max_examples=50, deadline=None)
def test_no_word_of_a_long_sentence_is_lost(n):
    text = " ".join(f"w{i}" for i in range(n))
    pieces = RuleProposer().propose(text)
    assert " ".join(pieces) == text


def test_prose_is_covered_to_seven_tenths_and_more():
    assert sum(map(len, RuleProposer().propose(PROSE))) >= 0.7 * len(PROSE)


def test_a_short_sentence_is_left_out_of_a_longer_text():
    assert "She died at Rockfleet." not in RuleProposer().propose(PROSE)


@pytest.mark.parametrize(
    "sentence",
    [
        "Mr. Smith met Dr. Jones at St. Mary's.",
        "The U.S. Congress met there again in May.",
        "J. R. R. Tolkien wrote it in the war.",
        "It cost $3.14 or 1,000.50 yen per item.",
        "Some animals, e.g. The Lion King's, can sing well.",
        "See vol. 3, pp. 12 and 13 of it.",
        'He said "go home, all of you!" and left.',
        "It is found at example.org or under version 2.0.1 there.",
        "Martin Luther King Jr. Day is in January.",
        "Wait... there is more of it to come.",
        "Founded by Warner Bros. Records in the last year.",
    ],
)
def test_a_full_stop_inside_a_sentence_does_not_end_it(sentence):
    text = f"{sentence} And then another sentence follows it."
    assert RuleProposer().propose(text)[0] == sentence


@pytest.mark.parametrize(
    "text",
    [
        "He said this to all of them.| The others did not believe it.",
        '"Go home now, all of you."| "Why should we go?" she asked.',
        "(It was late in the day.)| Then they left the old house.",
        "It was sold in the end.[3][citation needed]| The new owner was not known.",
        "They came from the U.S.| The others came from the north.",
        "Is this really what you want?!| Nobody knows it any more now.",
        "It was the year of 1897.| 35 people lived there at first.",
        "he came home late at night.| he left again in the morning.",
        "هل تعرف من كتب هذا الكتاب؟| كتبه رجل من مدينة بغداد.",
        "दिल्ली भारत की राजधानी है।| यहाँ बहुत लोग रहते हैं।",
        "東京は日本の首都である。|人口は多いそうである！|「大きい」と彼は言った。",
        "The town lies by the sea.\n|\n| It has a small harbour today.",
    ],
)
def test_sentences_end_where_they_should(text):
    expected = [part.strip() for part in text.split("|") if part.strip()]
    assert RuleProposer().propose(text.replace("|", "")) == expected


def test_lists_and_headings_stand_alone_and_wrapped_lines_stay_together():
    text = (
        "# The history of the town\n\nThe town was founded long ago\nin 1897 by monks.\n"
        "- The first item has five words\n* the second item has six words\n"
        "Heading\nThis line is long enough to have been wrapped\nParis being the next word.\n"
        "=====\n1. a numbered item with words\n2. another numbered item with words"
    )
    assert RuleProposer().propose(text) == [
        "The history of the town",
        "The town was founded long ago\nin 1897 by monks.",
        "The first item has five words",
        "the second item has six words",
        "This line is long enough to have been wrapped\nParis being the next word.",
        "1. a numbered item with words",
        "2. another numbered item with words",
    ]


def test_a_long_sentence_is_cut_at_its_strongest_clause_border():
    left = "The castle was built by the king of that time in the north of the country"
    right = "it was given to the bishop, and his people lived in it for two hundred years"
    assert RuleProposer().propose(f"{left}; {right}.") == [f"{left};", f"{right}."]


def test_brackets_are_kept_whole_where_another_cut_is_possible():
    inside = "(which, as we know, was old; and cold, and wet, and dark)"
    text = f"The house by the sea in the far west {inside} was sold to a man who had no idea of it."
    pieces = RuleProposer(max_words=25).propose(text)
    assert len(pieces) == 2
    assert any(inside in piece for piece in pieces)


def test_unspaced_scripts_are_cut_into_pieces_in_range():
    text = (
        "人口は約千四百万人で、世界最大の都市圏を形成しており、政治と経済の中心として知られている。"
    )
    pieces = RuleProposer().propose(text)
    assert "".join(pieces) == text
    assert pieces[0].endswith("、")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t", []),
        ("... — !", []),
        ("Hello", ["Hello"]),
        ("  Hello, world!\n", ["Hello, world!"]),
        ("Hello. World.", ["Hello. World."]),
        ("42", ["42"]),
    ],
)
def test_a_text_shorter_than_the_minimum_is_its_own_candidate(text, expected):
    assert RuleProposer().propose(text) == expected


@pytest.mark.parametrize(("low", "high"), [(0, 5), (6, 5), (-1, -1)])
def test_impossible_bounds_are_refused(low, high):
    with pytest.raises(ConfigError, match="admit no nugget"):
        RuleProposer(min_words=low, max_words=high)


def test_the_id_names_the_bounds_and_the_protocol_is_met():
    assert isinstance(RuleProposer(), RangeProposer)
    assert RuleProposer().proposer_id != RuleProposer(max_words=20).proposer_id


def test_a_long_text_without_sentence_ends_is_not_slow():
    text = "He went to the U.S. and came (back again " * 5000
    start = time.perf_counter()
    assert RuleProposer().ranges(text)
    # Takes 0.15 s on an idle core; quadratic work would take minutes.
    assert time.perf_counter() - start < 5
