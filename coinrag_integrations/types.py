"""The values that travel between the parts: documents, chunks, spans, nuggets. Standard library only.

All ranges are half-open. Token ranges count tokens of one chunk, character ranges count Python
characters of the text they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NewType

from coinrag_integrations.errors import ConfigError, SpanError

ChunkId = NewType("ChunkId", str)
Scalar = str | int | float | bool
# Lists are of one type and not empty.
Metadata = Mapping[str, Scalar | list[str] | list[int] | list[float] | list[bool]]


_MAX_TOKENS = 2**31 - 1
_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,46}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Whose documents: what belongs to another tenant or collection is not there.

    Names are up to 48 lower-case letters, digits, `-` and `_`: they become names of folders and of
    Chroma collections. Other names are for the caller to hash.

    Raises:
        ConfigError: a name of another form.
    """

    tenant: str = "default"
    collection: str = "main"

    def __post_init__(self) -> None:
        """Refuse names that could be taken for a path, or for another name."""
        for kind, name in (("tenant", self.tenant), ("collection", self.collection)):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"the {kind} {name!r:.80} is no name: use 1 to 48 lower-case letters, digits, "
                    "'-' and '_', first and last a letter or digit"
                )

    def __str__(self) -> str:
        """Tenant and collection; no two scopes share it."""
        return f"{self.tenant}.{self.collection}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text with a stable id. Re-adding the same id replaces the document.

    `vector` is that of the whole text by the store's embedder, if it is known already: the document is
    then found by it, as long as it is one chunk. The chunks of a longer one are embedded by themselves.
    """

    document_id: str
    text: str
    metadata: Metadata = field(default_factory=dict)
    vector: Sequence[float] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open token range `[start, stop)` inside one chunk.

    Raises:
        SpanError: the range is empty, reversed, negative or beyond all chunks.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        """Refuse ranges that select nothing, or more than any text has."""
        if max(self.start, self.stop) > _MAX_TOKENS:
            raise SpanError(f"a span of more than {_MAX_TOKENS} tokens is in no chunk")
        if not 0 <= self.start < self.stop:
            raise SpanError(
                f"span [{self.start}, {self.stop}) selects no token: "
                "start must be at least 0 and smaller than stop"
            )

    def __len__(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, order=True)
class SpanRef:
    """The triple (chunk_id, start, stop), and as what its tokens are read: all that the engine is told.

    At ratio 1 they are their own entries. At ratio k they are C2KV's slots, one for every k tokens: they
    begin at a multiple of k, and end at one or with the chunk.

    Raises:
        SpanError: the range is none (see `Span`), or does not begin with a slot.
    """

    chunk_id: ChunkId
    start: int
    stop: int
    ratio: int = 1

    def __post_init__(self) -> None:
        """Refuse ranges that select nothing, and the middle of a slot."""
        Span(self.start, self.stop)
        if self.ratio < 1 or self.start % self.ratio:
            raise SpanError(
                f"span [{self.start}, {self.stop}) does not begin with a slot of {self.ratio} tokens: "
                f"use a start that is a multiple of the ratio, which is at least 1"
            )

    def __len__(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def n_entries(self) -> int:
        """Number of cached entries: tokens, or slots."""
        return -(-len(self) // self.ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nugget:
    """A span that states one fact, found verbatim or nearly so in its chunk.

    `span` counts tokens of the chunk; `char_start` and `char_stop` are the aligned characters of
    the chunk's text, so `text == chunk.text[char_start:char_stop]`. `similarity` is 1.0 for an
    exact match.
    """

    text: str
    span: Span
    char_start: int
    char_stop: int
    match: Literal["exact", "fuzzy"]
    similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A fixed window of one document's tokens: the unit that is encoded once.

    `chunk_id` is a hash of the document id and the tokens. `text` is the exact slice of the
    document that starts at character `char_start`; the chunks of a document, joined in order of
    `index`, give back its text. `offsets[i]` is the character range of token i inside `text`;
    tokens that share one character (byte-level tokenizers) share its range.
    """

    chunk_id: ChunkId
    document_id: str
    index: int
    text: str
    char_start: int
    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    nuggets: tuple[Nugget, ...] = ()
    metadata: Metadata = field(default_factory=dict)

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    def ref(self, span: Span | None = None) -> SpanRef:
        """The triple of `span`, or of the whole chunk.

        Raises:
            SpanError: the span ends after the chunk's last token.
        """
        span = span or Span(0, len(self))
        if span.stop > len(self):
            raise SpanError(
                f"span [{span.start}, {span.stop}) ends after the {len(self)} tokens of chunk "
                f"{self.chunk_id}"
            )
        return SpanRef(self.chunk_id, span.start, span.stop)

    def characters_of(self, span: Span) -> tuple[int, int]:
        """The range of `text` that the tokens of `span` cover, without surrounding gaps."""
        return self.offsets[span.start][0], self.offsets[span.stop - 1][1]

    def text_of(self, span: Span) -> str:
        """The characters that the tokens of `span` cover."""
        begin, end = self.characters_of(span)
        return self.text[begin:end]

    def span_of(self, char_start: int, char_stop: int) -> Span:
        """The tokens that touch the characters `[char_start, char_stop)`, widened to whole tokens.

        Raises:
            SpanError: no token touches them (only gaps between tokens, or an empty range).
        """
        touched = [
            i for i, (a, b) in enumerate(self.offsets) if max(a, char_start) < min(b, char_stop)
        ]
        if not touched:
            raise SpanError(
                f"no token of chunk {self.chunk_id} covers characters [{char_start}, {char_stop})"
            )
        return Span(touched[0], touched[-1] + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSpan:
    """A retrieved span: its triple, its text, and how well it matched (higher is better).

    `char_start` and `char_stop` are offsets in the whole document, so a citation can point there.
    """

    ref: SpanRef
    text: str
    score: float
    document_id: str
    char_start: int
    char_stop: int
    metadata: Metadata = field(default_factory=dict)
