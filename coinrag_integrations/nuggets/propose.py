"""What a proposer of nuggets is, and what counts as a word. Knows no chunk and no token."""

# ruff: noqa: RUF001  (brackets and quotes of many scripts)

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

# Letters of the scripts that put no space between words: Thai, Lao, Myanmar, Khmer, kana, Han.
# Their combining marks are left out on purpose, so that a mark stays with its letter.
_UNSPACED = (
    "\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e46\u0e81-\u0eb0\u0eb2\u0eb3\u0ebd-\u0ec6"
    "\u1000-\u102a\u103f\u1780-\u17b3\u3005\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d\U00020000-\U0003fffd"
)
_OPENERS = "(\\[（［「『〈《【“‘"
_WORD = re.compile(rf"[{_OPENERS}]*[{_UNSPACED}][^\s{_UNSPACED}{_OPENERS}]*|[^\s{_UNSPACED}]+")
_SPACED_LETTER = re.compile(rf"[^\W_{_UNSPACED}]")


def word_ranges(text: str) -> list[tuple[int, int]]:
    """The character ranges of the words of `text`, in order.

    A word is what stands between white space; in scripts without spaces each letter is one, with
    the marks and the punctuation that follow it.
    """
    return [match.span() for match in _WORD.finditer(text)]


def cuts_a_word(text: str, position: int) -> bool:
    """Whether both characters beside `position` belong to one word."""
    return (
        0 < position < len(text)
        and _SPACED_LETTER.match(text, position - 1) is not None
        and _SPACED_LETTER.match(text, position) is not None
    )


class NuggetProposer(Protocol):
    """Suggests strings of a text that may be nuggets. Alignment decides which of them are."""

    @property
    def proposer_id(self) -> str:
        """Names everything that changes what is proposed; part of cache keys."""
        ...

    def propose(self, text: str) -> Sequence[str]:
        """Candidates in any order; the same string twice means two occurrences."""
        ...


@runtime_checkable
class RangeProposer(NuggetProposer, Protocol):
    """A proposer that also knows where its candidates stand, so nothing needs to be searched."""

    def ranges(self, text: str) -> Sequence[tuple[int, int]]:
        """The half-open character ranges of the candidates."""
        ...
