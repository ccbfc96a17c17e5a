"""Which metric a data set is scored by, and how long its answers may be. Knows no answers.

Names are those of data sets, with or without "longbench:" or "longbench-" before them. Metrics and lengths
are LongBench's; a data set that it does not have is scored by F1, with short answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Metric = Literal["f1", "rouge-l"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What is scored: so many tokens, or the first line of them, by which metric.

    LongBench cuts only `triviaqa` and `samsum` at the first line. Here every answer that F1 scores is cut:
    what a model says behind its answer would cost precision, whatever the method.
    """

    metric: Metric = "f1"
    max_new_tokens: int = 32
    first_line: bool = True


_SHORT = Scoring()
_SUMMARY = Scoring(metric="rouge-l", max_new_tokens=512, first_line=False)
SCORING: Mapping[str, Scoring] = {
    "hotpotqa": _SHORT,
    "2wikimqa": _SHORT,
    "musique": _SHORT,
    "triviaqa": _SHORT,
    "multifieldqa_en": Scoring(max_new_tokens=64),
    "narrativeqa": Scoring(max_new_tokens=128),
    "qasper": Scoring(max_new_tokens=128),
    "gov_report": _SUMMARY,
    "multi_news": _SUMMARY,
    "qmsum": _SUMMARY,
    "samsum": Scoring(metric="rouge-l", max_new_tokens=128),
}


def scoring_of(name: str) -> Scoring:
    """How answers to a data set's questions are scored."""
    return SCORING.get(name.removeprefix("longbench:").removeprefix("longbench-"), _SHORT)


def metric_of(name: str) -> Metric:
    """The metric of a data set: F1 unless LongBench scores it by ROUGE-L."""
    return scoring_of(name).metric
