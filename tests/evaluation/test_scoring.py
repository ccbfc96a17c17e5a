"""Which metric a data set is scored by."""

from __future__ import annotations

import pytest

from coinrag_integrations.evaluation.longbench import NAMES
from coinrag_integrations.evaluation.scoring import SCORING, Scoring, metric_of, scoring_of


@pytest.mark.parametrize(
    ("name", "metric", "max_new_tokens"),
    [
        ("hotpotqa", "f1", 32),
        ("2wikimqa", "f1", 32),
        ("musique", "f1", 32),
        ("triviaqa", "f1", 32),
        ("multifieldqa_en", "f1", 64),
        ("narrativeqa", "f1", 128),
        ("qasper", "f1", 128),
        ("samsum", "rouge-l", 128),
        ("gov_report", "rouge-l", 512),
        ("multi_news", "rouge-l", 512),
        ("qmsum", "rouge-l", 512),
    ],
)
def test_metrics_and_lengths_are_longbenchs(name, metric, max_new_tokens):
    for title in (name, f"longbench:{name}", f"longbench-{name}"):
        found = scoring_of(title)
        assert (found.metric, found.max_new_tokens) == (metric, max_new_tokens)
        assert metric_of(title) == metric


def test_only_summaries_have_more_than_a_line():
    assert {name for name, it in SCORING.items() if not it.first_line} == {
        "gov_report",
        "multi_news",
        "qmsum",
    }


def test_other_data_is_scored_by_f1():
    for name in ("demo", "2wiki", "mine", ""):
        assert scoring_of(name) == Scoring(metric="f1", max_new_tokens=32, first_line=True)


def test_everything_that_is_read_has_its_scoring():
    assert set(NAMES) <= set(SCORING)
