"""Find candidates in a chunk and turn them into token spans. Knows no proposer and no tokenizer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rapidfuzz import fuzz, process

from coinrag_integrations.errors import ConfigError, SpanError
from coinrag_integrations.nuggets.propose import cuts_a_word, word_ranges
from coinrag_integrations.types import Chunk, Nugget, Span

# Windows may be this much longer or shorter than the candidate, in words.
_REACH_SHARE = 0.2
_MAX_REACH_WORDS = 5
# So many of the best windows of the candidate's own size are refined.
_N_REFINED = 3

_SPACE = re.compile(r"\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A candidate that was not found, why, and how similar the best window was (0.0 if none)."""

    text: str
    reason: str
    similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Nuggets in the order of the text, one a span, and the candidates that became none."""

    nuggets: tuple[Nugget, ...]
    abandoned: tuple[Abandoned, ...]


def align(chunk: Chunk, candidates: Sequence[str], *, threshold: float = 0.7) -> Alignment:
    """Find each candidate: verbatim, else as the most similar run of whole words.

    Equal candidates take successive occurrences. A similarity is the share of characters that
    two strings have in common in order (`rapidfuzz.fuzz.ratio` / 100, white space squeezed).

    Raises:
        ConfigError: the threshold is not above 0 and at most 1.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(f"threshold={threshold} must be above 0 and at most 1, for example 0.7")
    windows = _Windows.of(chunk.text)
    exact: dict[str, list[_Place]] = {}
    uses: Counter[str] = Counter()
    outcomes: list[Nugget | Abandoned] = []
    for candidate in candidates:
        wanted = candidate.strip()
        if not wanted:
            outcomes.append(_empty(candidate))
            continue
        if wanted not in exact:
            exact[wanted] = _occurrences(chunk.text, wanted)
        if places := exact[wanted]:
            place = places[min(uses[wanted], len(places) - 1)]
            uses[wanted] += 1
        else:
            place = windows.most_similar(wanted)
        if place.similarity >= threshold:
            outcomes.append(_settle(chunk, candidate, place))
        else:
            outcomes.append(_dissimilar(candidate, place.similarity, threshold))
    return _collect(outcomes)


def align_ranges(chunk: Chunk, ranges: Iterable[tuple[int, int]]) -> Alignment:
    """Turn character ranges of the chunk's text into nuggets; white space at their ends is cut.

    Raises:
        SpanError: a range is reversed or leaves the text.
    """
    outcomes: list[Nugget | Abandoned] = []
    for start, stop in ranges:
        if not 0 <= start <= stop <= len(chunk.text):
            raise SpanError(
                f"characters [{start}, {stop}) are no range of the {len(chunk.text)} characters "
                f"of chunk {chunk.chunk_id}: offsets must count characters of the chunk's text"
            )
        text = chunk.text[start:stop]
        if not text.strip():
            outcomes.append(_empty(text))
            continue
        start += len(text) - len(text.lstrip())
        stop -= len(text) - len(text.rstrip())
        outcomes.append(_settle(chunk, text, _Place(start, stop, "exact", 1.0)))
    return _collect(outcomes)


class _Place(NamedTuple):
    """Characters of a chunk's text, and how well they match what was looked for."""

    start: int
    stop: int
    match: Literal["exact", "fuzzy"]
    similarity: float


def _settle(chunk: Chunk, candidate: str, place: _Place) -> Nugget | Abandoned:
    try:
        span = chunk.span_of(place.start, place.stop)
    except SpanError:
        return Abandoned(text=candidate, reason="no token covers it", similarity=place.similarity)
    return Nugget(
        text=chunk.text[place.start : place.stop],
        span=span,
        char_start=place.start,
        char_stop=place.stop,
        match=place.match,
        similarity=place.similarity,
    )


def _empty(candidate: str) -> Abandoned:
    return Abandoned(text=candidate, reason="empty", similarity=0.0)


def _dissimilar(candidate: str, similarity: float, threshold: float) -> Abandoned:
    n_words = len(word_ranges(candidate))
    return Abandoned(
        text=candidate,
        reason=(
            f"no window of about {n_words} words is similar enough: best {similarity:.2f}, "
            f"threshold {threshold:.2f}"
        ),
        similarity=similarity,
    )


def _collect(outcomes: Iterable[Nugget | Abandoned]) -> Alignment:
    """One nugget a span, the most similar one, sorted by position."""
    best: dict[Span, Nugget] = {}
    abandoned: list[Abandoned] = []
    for outcome in outcomes:
        if isinstance(outcome, Abandoned):
            abandoned.append(outcome)
        elif outcome.span not in best or outcome.similarity > best[outcome.span].similarity:
            best[outcome.span] = outcome
    nuggets = tuple(best[span] for span in sorted(best))
    return Alignment(nuggets=nuggets, abandoned=tuple(abandoned))


def _occurrences(text: str, wanted: str) -> list[_Place]:
    """Where `wanted` stands, without overlap; places that cut no word, if there are such."""
    found = [match.span() for match in re.finditer(re.escape(wanted), text)]
    whole = [
        (start, stop)
        for start, stop in found
        if not cuts_a_word(text, start) and not cuts_a_word(text, stop)
    ]
    return [_Place(start, stop, "exact", 1.0) for start, stop in whole or found]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Windows:
    """Runs of whole words of a text, compared with its white space squeezed to single spaces."""

    squeezed: str
    squeezed_words: list[tuple[int, int]]
    words: list[tuple[int, int]]

    @classmethod
    def of(cls, text: str) -> _Windows:
        squeezed = _SPACE.sub(" ", text)
        return cls(squeezed=squeezed, squeezed_words=word_ranges(squeezed), words=word_ranges(text))

    def text(self, first: int, n_words: int) -> str:
        last = first + n_words - 1
        return self.squeezed[self.squeezed_words[first][0] : self.squeezed_words[last][1]]

    def most_similar(self, wanted: str) -> _Place:
        """The best window, or a place of similarity 0.0 if the text has no words.

        Windows of the candidate's own size are compared first; only around the best of them are
        windows a few words longer, shorter or shifted, which keeps the search linear.
        """
        wanted = _SPACE.sub(" ", wanted)
        n_words, total = len(word_ranges(wanted)), len(self.words)
        size = min(n_words, total)
        if size == 0:
            return _Place(0, 0, "fuzzy", 0.0)
        rough = [self.text(first, size) for first in range(total - size + 1)]
        top = process.extract(wanted, rough, scorer=fuzz.ratio, limit=_N_REFINED)

        reach = min(max(1, round(_REACH_SHARE * n_words)), _MAX_REACH_WORDS)
        around = {
            (first, length)
            for _, _, middle in top
            for first in range(max(0, middle - reach), min(total, middle + reach + 1))
            for length in range(max(1, size - reach), min(size + reach, total - first) + 1)
        }
        # Of equally similar windows the one nearest the candidate's size wins, then the first.
        ordered = sorted(around, key=lambda key: (abs(key[1] - n_words), key))
        near = {key: self.text(*key) for key in ordered}
        _, score, (first, length) = process.extractOne(wanted, near, scorer=fuzz.ratio)
        return _Place(self.words[first][0], self.words[first + length - 1][1], "fuzzy", score / 100)
