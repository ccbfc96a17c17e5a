"""Why an answer is wrong: one class for each, from what was read and what was said. Knows no model.

The classes are the failures that the CoinRAG paper (2608.07458) names (weighted distraction, recall lost
in extraction, missing bridge passages) and what is left beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from coinrag_integrations.evaluation.errors.evidence import Evidence, ShownChunk
from coinrag_integrations.evaluation.errors.words import Range, find_words, is_within, join_ranges
from coinrag_integrations.evaluation.metrics import contains_answer, normalise, token_f1

RIGHT_F1 = 0.5

Error = Literal[
    "right",
    "empty",
    "not_verbatim",
    "never_extracted",
    "bridge_missing",
    "missed",
    "distracted",
    "misread",
    "ungrounded",
]
# An answer is of the first class that fits.
ERRORS: Mapping[Error, str] = {
    "right": f"The answer holds a gold answer, or its F1 is at least {RIGHT_F1}.",
    "empty": "Nothing was answered.",
    "not_verbatim": "No passage holds a gold answer word for word: yes and no, or something to work out.",
    "never_extracted": "A passage holds a gold answer, but no nugget does: recall lost in extraction.",
    "bridge_missing": "Of several supporting passages, one was not read at all: no bridge to the answer.",
    "missed": "A gold answer could have been read, but was not: retrieval chose something else.",
    "distracted": "A gold answer was read, but what was said stands elsewhere in what was read.",
    "misread": "A gold answer was read, and what was said stands beside it, in the same nugget or chunk.",
    "ungrounded": "A gold answer was read, but what was said stands nowhere in what was read.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a method reads: the nuggets loaded, whole chunks, or nothing.

    `n_nuggets` is how many of the nearest nuggets, None: those that the search's spans cover.
    """

    what: Literal["nuggets", "chunks", "nothing"]
    n_nuggets: int | None = None

    @property
    def unit(self) -> str:
        """One piece of it, in words."""
        return self.what.removesuffix("s")


class Piece(NamedTuple):
    """Characters `[start, stop)` of the chunk of a number that were read at one go."""

    chunk: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An answer's class.

    `n_gold` of the pieces that were read hold a gold answer; those in `said` hold none, but what was said
    instead: the weight on either side. `note` says in words what there is to know beside the class.
    """

    error: Error
    n_gold: int = 0
    said: tuple[Piece, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Evidence, and where gold answers stand in it: `gold` are character ranges of each chunk."""

    evidence: Evidence
    gold: tuple[tuple[Range, ...], ...]
    is_verbatim: bool

    @classmethod
    def of(cls, evidence: Evidence) -> Case:
        """Look for the gold answers; those that a chunk's border cuts count as standing in a passage."""
        gold = tuple(tuple(find_words(c.text, evidence.answers)) for c in evidence.chunks)
        return cls(
            evidence=evidence,
            gold=gold,
            is_verbatim=any(gold)
            or any(contains_answer(text, evidence.answers) for text in _documents(evidence)),
        )

    def explain(self, answer: str, reading: Reading) -> Finding:
        """The class of an answer that was given after such a reading."""
        golds = self.evidence.answers
        pieces = list(self._pieces(reading))
        n_gold = sum(map(self._has_gold, pieces))
        if not normalise(answer):
            return Finding(error="empty", n_gold=n_gold)
        if contains_answer(answer, golds) or token_f1(answer, golds) >= RIGHT_F1:
            note = "nothing that was read holds a gold answer" if pieces and not n_gold else ""
            return Finding(error="right", n_gold=n_gold, note=note)
        if not self.is_verbatim:
            return Finding(error="not_verbatim")
        if reading.what == "nuggets" and not self._is_extracted:
            return Finding(error="never_extracted")
        if pieces and (unread := self._unread(reading)):
            return Finding(error="bridge_missing", n_gold=n_gold, note=unread)
        if not n_gold:
            return Finding(error="missed", note=self._where() if pieces else "")
        wanted = said_words(answer, self.evidence.question)
        holding = [piece for piece in pieces if wanted <= set(normalise(self._text(piece)))]
        said = tuple(piece for piece in holding if not self._has_gold(piece))
        if said:
            other, unit = f"other {reading.unit}", reading.unit
            note = f"said in {_count(len(said), other)}, gold in {_count(n_gold, unit)}"
            return Finding(error="distracted", n_gold=n_gold, said=said, note=note)
        return Finding(error="misread" if holding else "ungrounded", n_gold=n_gold)

    @property
    def _is_extracted(self) -> bool:
        """Whether nuggets hold a gold answer, perhaps several that follow each other."""
        return any(
            is_within(found, join_ranges(((n.start, n.stop) for n in chunk.nuggets), chunk.text))
            for chunk, gold in zip(self.evidence.chunks, self.gold, strict=True)
            for found in gold
        )

    def _pieces(self, reading: Reading) -> Iterable[Piece]:
        """What was read.

        Nuggets that hold a gold answer only together, as they follow each other, are one piece.
        """
        for i, (chunk, gold) in enumerate(zip(self.evidence.chunks, self.gold, strict=True)):
            ranges = read_ranges(chunk, reading)
            runs = join_ranges(ranges, chunk.text)
            torn = [run for run in runs if any(_is_torn(found, run, ranges) for found in gold)]
            whole = [one for one in ranges if not is_within(one, torn)]
            yield from (Piece(i, start, stop) for start, stop in whole + torn)

    def _text(self, piece: Piece) -> str:
        return self.evidence.chunks[piece.chunk].text[piece.start : piece.stop]

    def _has_gold(self, piece: Piece) -> bool:
        return any(
            is_within(found, [(piece.start, piece.stop)]) for found in self.gold[piece.chunk]
        )

    def _unread(self, reading: Reading) -> str:
        """Which of several supporting documents was not read, and where it was lost."""
        chunks: dict[str, list[ShownChunk]] = {}
        for chunk in self.evidence.chunks:
            if chunk.is_supporting:
                chunks.setdefault(chunk.document_id, []).append(chunk)
        if len(chunks) < 2:
            return ""
        lost = []
        for document_id, its in chunks.items():
            if not any(read_ranges(chunk, reading) for chunk in its):
                is_found = any(chunk.rank is not None for chunk in its)
                why = "found, but no nugget of it read" if is_found else "not found"
                lost.append(f"{document_id}: {why}")
        return "; ".join(lost)

    def _where(self) -> str:
        """Whether a chunk with a gold answer was found."""
        found = any(
            gold and chunk.rank is not None
            for chunk, gold in zip(self.evidence.chunks, self.gold, strict=True)
        )
        return f"a chunk that holds a gold answer was {'found' if found else 'not found'}"


def read_ranges(chunk: ShownChunk, reading: Reading) -> list[Range]:
    """The characters of a chunk that a method reads."""
    if reading.what == "chunks":
        return [] if chunk.rank is None else [(0, len(chunk.text))]
    if reading.what == "nothing":
        return []
    n = reading.n_nuggets
    return [
        (nugget.start, nugget.stop)
        for nugget in chunk.nuggets
        if (nugget.is_loaded if n is None else nugget.rank is not None and nugget.rank <= n)
    ]


def said_words(answer: str, question: str) -> set[str]:
    """The words of an answer, those of the question left out if there are others."""
    words = set(normalise(answer))
    return words - set(normalise(question)) or words


def count_errors(errors: Iterable[tuple[str, str, Error]]) -> dict[str, dict[str, dict[str, int]]]:
    """How often each class is there, by data set and method, every class among them."""
    counts: dict[str, dict[str, dict[str, int]]] = {}
    for data, method, error in errors:
        of_method = counts.setdefault(data, {}).setdefault(method, {})
        if not of_method:
            of_method.update(dict.fromkeys(ERRORS, 0))
        of_method[error] += 1
    return counts


def _documents(evidence: Evidence) -> Iterable[str]:
    texts: dict[str, list[str]] = {}
    for chunk in evidence.chunks:
        texts.setdefault(chunk.document_id, []).append(chunk.text)
    return map("".join, texts.values())


def _is_torn(found: Range, run: Range, ranges: Sequence[Range]) -> bool:
    """Whether a run holds what none of the ranges holds alone."""
    return is_within(found, [run]) and not is_within(found, ranges)


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
