"""Propose the sentences and clauses of a text by rules: no service, no model. Knows no chunk."""

# ruff: noqa: RUF001  (the rules name the punctuation of many scripts)

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.nuggets.propose import word_ranges

Range = tuple[int, int]


def _words_of(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


# Raised whenever the same text gives other candidates than before.
_VERSION = 1

_LETTER_OR_DIGIT = re.compile(r"[^\W_]")
_LINE_BREAK = re.compile(r"\r\n|[\n\r\x0b\x0c\x85\u2028\u2029]")
_LIST_MARK = re.compile(r"\s*(?:[-*+•‣◦▪·–—]\s|\d{1,3}[.)]\s|[^\W\d_]\)\s|#{1,6}\s|[>|])")
_HEADING = re.compile(r"\s*#{1,6}\s")
# A line with this many words is taken as one that was wrapped, not as a heading or a list entry.
_WRAPPED_LINE_WORDS = 8

_CLOSERS = r"[\"'”’)\]»›」』）】]*(?:\[[\w ,]{1,20}\])*"
# `spaced` stops end a sentence only before white space, so 3.14 and example.org stay whole.
_STOP = re.compile(
    rf"(?P<spaced>[.!?…‽]+){_CLOSERS}(?=\s|\Z)|[。！？｡．؟۔।॥።။។]+{_CLOSERS}",
)
_NEXT_WORD = re.compile(r"\s*[^\w\s]*(\w*)")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_ABBREVIATIONS = _words_of(
    """
    mr mrs ms mx dr prof st ste sr jr gen col lt sgt capt maj cmdr adm rev fr hon gov sen rep pres
    mt ft inc ltd co corp bros llc dept univ assn est etc al ca approx no nos vol vols ch sec fig
    figs eq pp ed eds trans op cit ibid jan feb mar apr jun jul aug sep sept oct nov dec ave blvd rd
    ph.d m.d b.a m.a hrsg bzw usw nr z.b d.h
    """
)
_NEVER_LAST = frozenset({"e.g", "i.e", "cf", "vs", "viz", "mr", "mrs", "dr", "z.b", "d.h"})
# After an abbreviation or an initial only these words are taken as the start of a sentence.
_STARTERS = _words_of(
    """
    the a an this that these those he she it they we you i his her its their our my there here
    in on at by for from with after before during since when while although though however but and
    as if both some many most all each other another one two what who where why how
    """
)

_STRONG = re.compile(r"[;:；：—؛][\"'”’)\]»]*\s*\Z|\s[-–—]+\s")
_COMMA = re.compile(r"[,，、،][\"'”’)\]»」』]*\s*\Z")
_BRACKETED = re.compile(r"\([^()]*\)|\[[^\[\]]*\]|（[^（）]*）")
_LINKS = _words_of(
    """
    and but or nor so yet because although though while whereas when whenever where wherever which
    who whom whose that if unless until since after before despite including
    und aber oder weil dass denn obwohl et mais ou donc parce qui dont pero porque sino cuando
    """
)


def _blocks(text: str) -> Iterator[Range]:
    """Paragraphs, list entries and headings. Wrapped lines of one paragraph stay together."""
    lines, start = [], 0
    for line_break in _LINE_BREAK.finditer(text):
        lines.append((start, line_break.start()))
        start = line_break.end()
    lines.append((start, len(text)))

    begin = 0
    for line, following in pairwise(lines):
        if _ends_block(text[slice(*line)], text[slice(*following)]):
            yield begin, line[1]
            begin = following[0]
    yield begin, len(text)


def _ends_block(line: str, following: str) -> bool:
    if not _LETTER_OR_DIGIT.search(line) or not _LETTER_OR_DIGIT.search(following):
        return True
    if _HEADING.match(line) or _LIST_MARK.match(following):
        return True
    goes_on = following.lstrip()[:1].islower()
    return not goes_on and len(word_ranges(line)) < _WRAPPED_LINE_WORDS


def _sentences(text: str, block: Range, *, caseless: bool) -> Iterator[Range]:
    begin, end = block
    for stop in _STOP.finditer(text, begin, end):
        if stop["spaced"] is None or _ends_sentence(text, begin, stop, end, caseless=caseless):
            yield begin, stop.end()
            begin = stop.end()
    yield begin, end


def _ends_sentence(text: str, begin: int, stop: re.Match[str], end: int, *, caseless: bool) -> bool:
    following = _NEXT_WORD.match(text, stop.end(), end)
    next_word = following[1] if following else ""
    if not next_word:
        return True
    if next_word[0].islower() and not caseless:
        return False
    if stop["spaced"] != ".":
        return True
    # No abbreviation is longer than 40 characters; the bound keeps long blocks linear.
    before = text[max(begin, stop.start() - 40) : stop.start()].split()
    last_word = re.sub(r"\A\W+", "", before[-1]).lower() if before else ""
    if last_word in _NEVER_LAST or (last_word.isdigit() and len(before) == 1):
        return False
    if last_word in _ABBREVIATIONS or _INITIALS.fullmatch(last_word):
        return next_word.lower() in _STARTERS
    return True


def _clause_border(text: str, left: Range, right: Range) -> int:
    """How good a place between two neighbouring words is to cut: 0 (any place) to 4."""
    between = text[left[0] : right[0]]
    if _STRONG.search(between):
        return 4
    comma = _COMMA.search(between) is not None and not text[right[0]].isdigit()
    link = text[slice(*right)].lower().strip("\"'“”‘’()[],") in _LINKS
    if comma and link:
        return 3
    # Scripts without spaces put one where a clause ends; `left` then is a single letter.
    pause = right[0] > left[1] and not text[left[0]].isascii() and left[1] - left[0] == 1
    if comma or link or pause:
        return 2
    return 1 if _LINE_BREAK.search(between) else 0


def _pieces(text: str, words: list[Range], low: int, high: int) -> Iterator[Range]:
    """Cut a sentence into runs of `low` to `high` words, at clause borders where there are any.

    Each cut leaves at least `low` words behind if that is possible at all; a shorter rest is
    dropped.
    """
    first = 0
    closed = [match.span() for match in _BRACKETED.finditer(text, words[0][0], words[-1][1])]
    while (left := len(words) - first) > high:
        aim = left / math.ceil(left / high)
        last_cut = min(high, left - low)
        cuts = range(low, last_cut + 1) if last_cut >= low else range(high, high + 1)

        def worth(cut: int, first: int = first, aim: float = aim) -> tuple[int, float]:
            border = _clause_border(text, words[first + cut - 1], words[first + cut])
            position = words[first + cut][0]
            if any(start < position < stop for start, stop in closed):
                border = min(border, 1)
            return border, -abs(cut - aim)

        cut = max(cuts, key=worth)
        yield words[first][0], words[first + cut - 1][1]
        first += cut
    if left >= low:
        yield words[first][0], words[-1][1]


def _words(text: str, start: int, stop: int) -> list[Range]:
    """The words that hold a letter or a digit: a lone dash or bullet is none."""
    return [
        (start + a, start + b)
        for a, b in word_ranges(text[start:stop])
        if _LETTER_OR_DIGIT.search(text, start + a, start + b)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleProposer:
    """Proposes sentences of `min_words` to `max_words` words; longer ones are cut into clauses.

    Shorter sentences (headings, captions, exclamations) are left out, unless the whole text is
    that short: then it is its own single candidate.

        >>> RuleProposer().propose("Dr. Ng lives in Oslo now. Her cat, a tabby, is 3.5 years old.")
        ['Dr. Ng lives in Oslo now.', 'Her cat, a tabby, is 3.5 years old.']

    Raises:
        ConfigError: not `1 <= min_words <= max_words`.
    """

    min_words: int = 5
    max_words: int = 30

    def __post_init__(self) -> None:
        """Refuse bounds that no piece can meet."""
        if not 1 <= self.min_words <= self.max_words:
            raise ConfigError(
                f"min_words={self.min_words} and max_words={self.max_words} admit no nugget: "
                "min_words must be at least 1 and at most max_words"
            )

    @property
    def proposer_id(self) -> str:
        """The version of the rules and their bounds."""
        return f"rules-{_VERSION}:{self.min_words}-{self.max_words}"

    def propose(self, text: str) -> list[str]:
        """The candidates, in the order of the text."""
        return [text[start:stop] for start, stop in self.ranges(text)]

    def ranges(self, text: str) -> list[tuple[int, int]]:
        """The character ranges of the candidates: ordered, without overlap."""
        words = _words(text, 0, len(text))
        if not words:
            return []
        if len(words) < self.min_words:
            return [(words[0][0], words[-1][1])]
        caseless = text.islower()
        return [
            piece
            for block in _blocks(text)
            for sentence in _sentences(text, block, caseless=caseless)
            if (found := _words(text, *sentence))
            for piece in _pieces(text, found, self.min_words, self.max_words)
        ]
