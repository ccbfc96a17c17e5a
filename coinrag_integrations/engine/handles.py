"""Spans inside ordinary text: a handle in front of the span's own words, which are always there too.

A handle names a span and proves that we wrote it: a keyed hash over the scope, the fingerprint and the
triple. It is believed only in front of exactly the words that are stored, of a document that is there.
In every other case it is dropped and the words are read as words, so a forged, altered, stale or
foreign handle costs speed and nothing else. Knows texts, not tokens.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from coinrag_integrations.types import Chunk, Span, SpanRef

# Nothing in them is changed by templates, by HTML escaping or by white space being tidied.
# ⟦k:…⟧ and ⟦/k⟧; in front of words that are read as slots of 4 tokens ⟦k4:…⟧.
OPEN, CLOSE = "\u27e6k:", "\u27e6/k\u27e7"
_NAME = "([0-9]{0,2}):([a-z2-7]{24})"
_HANDLE = re.compile(f"\u27e6k{_NAME}\u27e7")
_MARKED = re.compile("(\u27e6k[0-9]{0,2}:[a-z2-7]{24}\u27e7.*?\u27e6/k\u27e7)", re.DOTALL)
_ANY = re.compile("\u27e6k[0-9]{0,2}:[^\u27e6\u27e7\n]{0,64}\u27e7|\u27e6/k\u27e7")
# Bytes of a handle: the chunk id's first ones, start, length, and the keyed hash. 24 letters.
_ID, _START, _LENGTH, _PROOF = 5, 3, 2, 5

Reason = Literal["unknown", "altered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A text taken apart: words, and the spans whose handles were believed.

    `refused` counts handles that were not: "unknown" (not ours, of another scope or fingerprint, or of
    a document that is gone), "altered" (in front of other words).
    """

    pieces: tuple[str | SpanRef, ...]
    refused: dict[Reason, int] = field(default_factory=dict)

    @property
    def n_spans(self) -> int:
        """How many handles were believed."""
        return sum(isinstance(piece, SpanRef) for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handles:
    """Writes and reads the handles of one scope and its fingerprints.

    `find` gives the chunks that are there whose id begins with some hexadecimal digits. `owners`, one for
    each ratio that spans can be read at, are hashed under `key`, a secret of the store.
    """

    key: bytes
    owners: Mapping[int, str]
    find: Callable[[str], Sequence[Chunk]]

    def handle(self, ref: SpanRef) -> str:
        """What stands in front of the words of a span; empty for what no handle can name.

        That is spans of more than 65,535 tokens, and those at a ratio that the store does not have.
        """
        name = self.name(ref)
        return f"{OPEN[:-1]}{name}\u27e7" if name else ""

    def name(self, ref: SpanRef) -> str:
        """What names a span, where its tokens are shown instead of its words: ":…", or "4:…" at ratio 4.

        Empty as for `handle`.
        """
        if ref.ratio not in self.owners:
            return ""
        try:
            place = ref.start.to_bytes(_START, "big") + len(ref).to_bytes(_LENGTH, "big")
        except OverflowError:
            return ""
        body = bytes.fromhex(ref.chunk_id)[:_ID] + place + self._proof(ref)
        ratio = "" if ref.ratio == 1 else ref.ratio
        return f"{ratio}:{base64.b32encode(body).decode().lower()}"

    def resolve(self, text: str) -> Resolved:
        """Take a text apart. Never raises because of what a handle says.

        Words between two spans are left out if they are only white space.
        """
        pieces: list[str | SpanRef] = []
        refused: Counter[Reason] = Counter()
        words, at = "", 0
        while found := _HANDLE.search(text, at):
            words += text[at : found.start()]
            result = self._read(found[0][2:-1], text, found.end())
            if isinstance(result, str):
                refused[result] += 1
                at = found.end()
                continue
            ref, at = result
            pieces += [words, ref]
            words = ""
        pieces.append(words + text[at:])
        return Resolved(pieces=tuple(_tidy(pieces)), refused=dict(refused))

    def named(self, name: str) -> Iterator[tuple[Chunk, SpanRef]]:
        """Spans of documents that are there, that we named so. Whoever asks compares words or tokens."""
        found = re.fullmatch(_NAME, name)
        if found is None:
            return
        ratio, body = int(found[1] or 1), base64.b32decode(found[2].upper())
        start = int.from_bytes(body[_ID : _ID + _START], "big")
        length = int.from_bytes(body[_ID + _START : -_PROOF], "big")
        if not length or ratio not in self.owners or start % ratio:
            return
        for chunk in self.find(body[:_ID].hex()):
            ref = SpanRef(chunk.chunk_id, start, start + length, ratio)
            if hmac.compare_digest(self._proof(ref), body[-_PROOF:]) and ref.stop <= len(chunk):
                yield chunk, ref

    def _read(self, name: str, text: str, begin: int) -> tuple[SpanRef, int] | Reason:
        """The span of a handle whose words begin at `begin`, and where they have ended; or why not."""
        reason: Reason = "unknown"
        for chunk, ref in self.named(name):
            reason = "altered"
            for words in _words_of(chunk, ref):
                end = begin + len(words)
                if text.startswith(words, begin) and text.startswith(CLOSE, end):
                    return ref, end + len(CLOSE)
        return reason

    def _proof(self, ref: SpanRef) -> bytes:
        said = f"{self.owners[ref.ratio]}\n{ref.chunk_id}:{ref.start}:{ref.stop}"
        return hmac.digest(self.key, said.encode(), "sha256")[:_PROOF]


def mark(handle: str, words: str) -> str:
    """The words of a span with its handle around them; as they are if there is none."""
    return f"{handle}{words}{CLOSE}" if handle and words else words


def strip_handles(text: str) -> str:
    """The text without handles, and without what looks like one: for other models, and for people."""
    return _ANY.sub("", text)


def split_marked(text: str) -> list[tuple[str, bool]]:
    """A text in parts, and whether each is a passage with a handle around it; joined, it is the text."""
    return [(part, i % 2 == 1) for i, part in enumerate(_MARKED.split(text)) if part]


def without_handles(text: str) -> Resolved:
    """Read a text as words only."""
    words = strip_handles(text)
    return Resolved(pieces=(words,) if words else ())


def owner_of(scope: object, fingerprint: str) -> str:
    """What the handles of a scope and a fingerprint are hashed with."""
    return hashlib.sha256(f"{scope}\n{fingerprint}".encode()).hexdigest()


def _words_of(chunk: Chunk, ref: SpanRef) -> Iterator[str]:
    """The texts that a span is handed out with."""
    span = Span(ref.start, ref.stop)
    yield from dict.fromkeys(n.text for n in chunk.nuggets if n.span == span)
    if len(span) == len(chunk):
        yield chunk.text
    yield chunk.text_of(span)


def _tidy(pieces: Sequence[str | SpanRef]) -> Iterator[str | SpanRef]:
    """Without handles that were not believed, and without mere white space between spans."""
    last = len(pieces) - 1
    for i, piece in enumerate(pieces):
        if isinstance(piece, SpanRef):
            yield piece
            continue
        words = strip_handles(piece)
        if words and (words.strip() or i in (0, last)):
            yield words
