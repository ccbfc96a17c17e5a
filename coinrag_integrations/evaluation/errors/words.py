"""Where words stand in a text, compared as scores compare them. Pure text."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence

from coinrag_integrations.evaluation.metrics import contains_answer, normalise

Range = tuple[int, int]
_TOKEN = re.compile(r"\S+")


def find_words(text: str, phrases: Sequence[str]) -> list[Range]:
    """The characters `[start, stop)` where any of the phrases stands as whole words, in order.

    Case, punctuation and articles do not count; occurrences that overlap are one.
    """
    if not contains_answer(text, phrases):
        return []
    words = [
        (word, *_core(token.group(), token.start()))
        for token in _TOKEN.finditer(text)
        for word in normalise(token.group())
    ]
    found = []
    for phrase in filter(None, map(normalise, phrases)):
        for i in range(len(words) - len(phrase) + 1):
            here = words[i : i + len(phrase)]
            if [word for word, *_ in here] == phrase:
                found.append((here[0][1], here[-1][2]))
    return join_ranges(found)


def join_ranges(ranges: Iterable[Range], text: str | None = None) -> list[Range]:
    """The union of ranges in order; with `text` also over white space between them."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if joined and (
            start < joined[-1][1] or (text is not None and not text[joined[-1][1] : start].strip())
        ):
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def is_within(inner: Range, outer: Iterable[Range]) -> bool:
    """Whether one of the outer ranges holds the inner one."""
    return any(start <= inner[0] and inner[1] <= stop for start, stop in outer)


def _core(token: str, at: int) -> Range:
    """A token's characters without the punctuation around them."""
    start = at + len(token) - len(token.lstrip(string.punctuation))
    return start, at + len(token.rstrip(string.punctuation))
