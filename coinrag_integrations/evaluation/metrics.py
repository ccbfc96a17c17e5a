"""How good an answer is. Pure text.

ROUGE-L needs the package `rouge`, imported when something is scored by it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from coinrag_integrations.errors import ConfigError

if TYPE_CHECKING:
    from rouge import Rouge

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
    wanted = (" ".join(normalise(gold)) for gold in golds)
    return any(f" {gold} " in found for gold in wanted if gold)


def rouge_l(answer: str, golds: Sequence[str]) -> float:
    """The best ROUGE-L F-measure of the answer against any of the gold answers, from 0 to 1.

    As LongBench scores it: words between blanks, sentences between full stops, case and punctuation
    counted. What `rouge` cannot score is 0: no sentence at all, or one of so many words (about 900) that
    its recursion ends. An answer without a letter or a digit is 0, too.

    Raises:
        ConfigError: `rouge` is not installed.
    """
    scorer = _scorer()
    if not any(map(str.isalnum, answer)):
        return 0.0
    return max((_rouge_l(scorer, answer, gold) for gold in golds), default=0.0)


def check_rouge() -> None:
    """See whether ROUGE-L can be computed, before anything takes time.

    Raises:
        ConfigError: `rouge` is not installed.
    """
    _scorer()


def _scorer() -> Rouge:
    try:
        from rouge import Rouge
    except ImportError as error:
        raise ConfigError(
            "ROUGE-L needs the package rouge: pip install 'coinrag-integrations[eval]'"
        ) from error
    return Rouge(metrics=["rouge-l"])


def _rouge_l(scorer: Rouge, answer: str, gold: str) -> float:
    try:
        scores = scorer.get_scores([answer], [gold], avg=True)
    except (ValueError, RecursionError):
        return 0.0
    return float(scores["rouge-l"]["f"])


def _f1(found: list[str], wanted: list[str]) -> float:
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted)) if common else 0.0
