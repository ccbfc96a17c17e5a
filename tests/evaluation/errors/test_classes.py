"""Why answers are wrong: each class from passages that show it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.evaluation.errors.classes import (
    ERRORS,
    RIGHT_F1,
    Case,
    Reading,
    count_errors,
    said_words,
)
from coinrag_integrations.evaluation.metrics import contains_answer, token_f1
from tests.evaluation.errors.passages import GOLD, QUESTION, chunk, evidence

NUGGETS, CHUNKS, NOTHING = (Reading(what=what) for what in ("nuggets", "chunks", "nothing"))
LOADED = chunk("[[Bastien Roule built it.]] [[Ida Merle paid for it.]] [It plays.]")
HELPS = {"is_supporting": True}


def explain(answer, *chunks, reading=NUGGETS, **options):
    return Case.of(evidence(*chunks, **options)).explain(answer, reading)


@pytest.mark.parametrize(
    ("error", "answer", "chunks"),
    [
        ("right", "It was Bastien Roule, they say.", [LOADED]),
        ("right", "Roule", [LOADED]),
        ("empty", " \n", [LOADED]),
        ("empty", "The.", [LOADED]),
        ("not_verbatim", "Ida Merle", [chunk("[[Ida Merle paid.]]")]),
        ("never_extracted", "Ida Merle", [chunk("Bastien Roule built it. [[Ida Merle paid.]]")]),
        ("never_extracted", "Ida Merle", [chunk("Bastien [Roule] [[Ida Merle]]", rank=None)]),
        ("missed", "Ida Merle", [chunk("[Bastien Roule built it.] [[Ida Merle paid.]]")]),
        ("missed", "Ida Merle", [chunk("[Bastien] [Roule] [[Ida Merle paid.]]")]),
        ("missed", "Ida", [chunk("[Bastien Roule]", rank=None), chunk("[[Ida Merle paid.]]")]),
        ("distracted", "Ida Merle", [LOADED]),
        ("distracted", "Merle Ida", [LOADED]),
        ("misread", "1923", [chunk("[[Bastien Roule built it in 1923.]]")]),
        ("misread", "1923", [chunk("[[Bastien]] [[Roule built it in 1923.]]")]),
        ("ungrounded", "Zacharias", [LOADED]),
        ("ungrounded", "plays", [LOADED]),
    ],
)
def test_an_answer_is_of_the_first_class_that_fits(error, answer, chunks):
    assert explain(answer, *chunks).error == error


def test_a_bridge_is_missing_where_one_of_several_supporting_passages_was_not_read():
    gold = replace(LOADED, **HELPS)
    unfound = chunk("[The organ is old.]", None, document_id="b", **HELPS)
    left = replace(unfound, rank=2)
    read = chunk("[[The organ is old.]]", 2, document_id="b", **HELPS)
    assert explain("Ida Merle", gold, unfound).note == "b: not found"
    assert explain("Ida Merle", gold, left).note == "b: found, but no nugget of it read"
    for passages, reading, error in (
        ((gold, unfound), NUGGETS, "bridge_missing"),
        ((gold, left), NUGGETS, "bridge_missing"),
        ((gold, unfound), CHUNKS, "bridge_missing"),
        ((gold, unfound), NOTHING, "missed"),
        ((gold, left), CHUNKS, "distracted"),
        ((gold, read), NUGGETS, "distracted"),
        ((gold, left, read), NUGGETS, "distracted"),
        ((unfound,), NUGGETS, "not_verbatim"),
        ((gold, replace(unfound, is_supporting=False)), NUGGETS, "ungrounded"),
    ):
        assert explain("old", *passages, reading=reading).error == error, (passages, reading)
    one = chunk("[Bastien Roule]", None, **HELPS)
    assert explain("Ida", one, chunk("[[Ida]]")).error == "missed", "one passage needs no bridge"


def test_the_weight_of_a_distraction_is_counted():
    it = explain(
        "Ida Merle",
        chunk("[[Bastien Roule built it.]] [[Ida Merle paid.]] [Ida Merle left.]"),
        chunk("[[Ida Merle was born here.]] [[Bastien Roule and Ida Merle met.]]", 2),
    )
    assert (it.error, it.n_gold) == ("distracted", 2)
    assert [(piece.chunk, piece.start) for piece in it.said] == [(0, 24), (1, 0)]
    assert it.note == "said in 2 other nuggets, gold in 2 nuggets"


def test_methods_are_judged_by_what_they_read():
    one = chunk("[Bastien Roule built it.] [[Ida Merle paid.]]")
    other = chunk("Otto Vance [[sang]].", 2)
    unfound = chunk("[[Bastien Roule]]", None)
    assert explain("Otto Vance", one, other).error == "missed"
    assert explain("Otto Vance", one, other, reading=CHUNKS).error == "distracted"
    assert explain("Ida Merle", one, other, reading=CHUNKS).error == "misread"
    assert explain("Ida Merle", unfound, other, reading=CHUNKS).error == "missed"
    assert explain("Ida Merle", one, other, reading=NOTHING).error == "missed"
    unextracted = chunk("Bastien Roule built it. [[Ida Merle paid.]]")
    assert explain("Otto", unextracted, reading=NUGGETS).error == "never_extracted"
    assert explain("Otto", unextracted, reading=CHUNKS).error == "ungrounded"
    assert explain("Otto", unextracted, reading=NOTHING).error == "missed"
    nearest = Reading(what="nuggets", n_nuggets=1)
    assert explain("Ida Merle", LOADED, reading=nearest).error == "ungrounded", "second of two"


def test_a_right_answer_says_when_it_was_not_read():
    unread = chunk("[Bastien Roule built it.] [[Ida Merle paid.]]")
    assert explain(GOLD, unread).note == "nothing that was read holds a gold answer"
    assert explain(GOLD, LOADED).note == ""
    assert explain(GOLD, unread, reading=NOTHING).note == ""


def test_an_answer_that_a_chunks_border_cuts_stands_in_a_passage():
    halves = chunk("[[It was Bastien ]]"), chunk("[[Roule.]]", 2)
    assert explain("Ida", *halves).error == "never_extracted"
    apart = halves[0], replace(halves[1], document_id="b")
    assert explain("Ida", *apart).error == "not_verbatim"


def test_words_of_the_question_are_not_what_was_said():
    assert said_words("The organ of Ida", QUESTION) == {"of", "ida"}
    assert said_words("The organ", QUESTION) == {"organ"}


WORDS = st.lists(st.sampled_from(["Bastien", "Roule", "Ida", "organ", "the", "."]), max_size=6)
MARKS = st.sampled_from(["{}", "[{}]", "[[{}]]"])


@st.composite
def chunks(draw):
    parts = draw(st.lists(st.tuples(WORDS, MARKS), min_size=1, max_size=4))
    marked = " ".join(mark.format(" ".join(["x", *words])) for words, mark in parts)
    supporting = draw(st.sampled_from([None, True, False]))
    rank = draw(st.sampled_from([None, 1]))
    return chunk(marked, rank, document_id=draw(st.sampled_from("ab")), is_supporting=supporting)


@given(
    st.lists(chunks(), max_size=4), WORDS.map(" ".join), st.sampled_from([NUGGETS, CHUNKS, NOTHING])
)
def test_every_answer_has_a_class_that_keeps_its_word(found, answer, reading):
    case = Case.of(evidence(*found))
    it = case.explain(answer, reading)
    assert it.error in ERRORS
    is_right = contains_answer(answer, [GOLD]) or token_f1(answer, [GOLD]) >= RIGHT_F1
    assert (it.error == "right") == is_right
    if it.error in ("distracted", "misread", "ungrounded"):
        assert it.n_gold > 0
    assert bool(it.said) == (it.error == "distracted")
    if it.error == "never_extracted":
        assert reading is NUGGETS
    if it.error == "not_verbatim":
        assert not any(contains_answer(one.text, [GOLD]) for one in found)


def test_counts_hold_every_class():
    counts = count_errors(
        [("x", "spans", "missed"), ("x", "spans", "missed"), ("y", "full", "right")]
    )
    assert list(counts["x"]["spans"]) == list(ERRORS)
    assert counts["x"]["spans"]["missed"] == 2
    assert sum(counts["y"]["full"].values()) == counts["y"]["full"]["right"] == 1
    assert "full" not in counts["x"]
