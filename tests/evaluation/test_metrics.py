"""How good an answer is: against numbers by hand, and against what LongBench computes them with."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.metrics import (
    check_rouge,
    contains_answer,
    rouge_l,
    token_f1,
)

WORDS = st.lists(st.sampled_from(["a", "b", "c", "d.", "é", "."]), max_size=12).map(" ".join)


def longbench_rouge(answer: str, golds: list[str]) -> float:
    from rouge import Rouge

    best = 0.0
    for gold in golds:
        try:
            found = Rouge().get_scores([answer], [gold], avg=True)["rouge-l"]["f"]
        except ValueError:
            found = 0.0
        best = max(best, found)
    return best


def test_f1_counts_words_without_case_articles_and_punctuation():
    assert token_f1("The Eiffel Tower!", ["eiffel tower"]) == 1
    assert token_f1("a b c", ["b x", "b c d"]) == pytest.approx(0.8)  # the article does not count
    assert token_f1("", ["b"]) == token_f1("b", []) == token_f1("the", ["a"]) == 0
    assert contains_answer("In Paris, of course.", ["Rome", "paris"])


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence():
    assert rouge_l("the cat sat", ["the cat sat"]) == pytest.approx(1)
    # "the cat" of three words and of four: 2/3 and 2/4.
    assert rouge_l("the cat ran", ["the black cat sat"]) == pytest.approx(4 / 7)
    assert rouge_l("cat the", ["the cat"]) == pytest.approx(1 / 2)
    assert rouge_l("the cat", ["a dog", "the cat sat", "cat"]) == pytest.approx(4 / 5)


@given(WORDS.filter(lambda text: any(map(str.isalnum, text))), st.lists(WORDS, max_size=3))
def test_rouge_l_is_what_longbench_computes(answer, golds):
    assert rouge_l(answer, golds) == longbench_rouge(answer, golds)


def test_rouge_l_takes_any_script():
    assert rouge_l("Łódź liegt in Polen", ["Łódź liegt in Polen"]) == pytest.approx(1)
    assert rouge_l("東京 は 首都", ["東京 は 首都 です"]) == pytest.approx(6 / 7)
    assert rouge_l("🙂 oui", ["🙂 non"]) == pytest.approx(1 / 2)


@pytest.mark.parametrize("answer", ["", " ", "\n", ".", "...", "!?", "- -", ". . "])
def test_an_answer_without_words_scores_nothing(answer):
    assert rouge_l(answer, ["One - two. ", "!?", "- -", "", "."]) == 0


@pytest.mark.parametrize("gold", ["", " ", "."])
def test_a_gold_answer_without_words_gives_nothing(gold):
    assert rouge_l("yes", [gold]) == 0
    assert rouge_l("yes", []) == 0


def test_a_long_answer_is_scored():
    gold = " ".join(f"Sentence {i} of a report says {i * i}." for i in range(40))
    sentences = [f"Sentence {i} of another text says {i + 1}." for i in range(290)]
    answer = " ".join(sentences)
    assert len(answer.split()) > 2_000
    assert 0 < rouge_l(answer, [gold]) < 1


def test_a_sentence_that_never_ends_scores_nothing():
    answer = " ".join(f"w{i}" for i in range(2_000))
    assert rouge_l(answer, ["w1 w2 w3"]) == 0
    assert rouge_l(answer, ["w1 w2 w3", "nothing else. w5"]) == 0


def test_only_rouge_needs_its_package(monkeypatch):
    check_rouge()
    monkeypatch.setitem(sys.modules, "rouge", None)
    assert token_f1("yes", ["yes"]) == 1
    for needs_it in (check_rouge, lambda: rouge_l("yes", ["yes"]), lambda: rouge_l("", [])):
        with pytest.raises(ConfigError, match=r"coinrag-integrations\[eval\]"):
            needs_it()
