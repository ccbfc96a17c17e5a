"""How good an answer is. Pure text."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as LongBench compares them."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """The best F1 of the answer's words against any of the gold answers, from 0 to 1."""
    return max((_f1(normalise(answer), normalise(gold)) for gold in golds), default=0.0)


def contains_answer(answer: str, golds: Sequence[str]) -> bool:
    """Whether the answer's words hold one of the gold answers as a whole."""
    found = f" {' '.join(normalise(answer))} "
    return any(f" {' '.join(normalise(gold))} " in found for gold in golds)


def _f1(found: list[str], wanted: list[str]) -> float:
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0
