"""Lay pieces out behind each other. Pure arithmetic: no torch, no disk, no model.

A plan has two rulers. *Logical* positions are where tokens belong in the text that the model is shown:
the question starts at `length`. *Rows* are where they lie in the buffer: first the entries that come
from a cache, then the text that is computed online, wherever it stands. The two differ once a segment
holds fewer entries than the text it stands for. RoPE only sees differences, so logical position p is
placed at `p - (length - n_rows)` and the question starts at row `n_rows`: right-aligned, and what
`generate()` assumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coinrag_integrations.errors import BudgetError, ConfigError
from coinrag_integrations.types import ChunkId, Span, SpanRef


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens to show the model that are in no chunk: prompt, titles, separators, a question."""

    ids: tuple[int, ...]

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)


Piece = Text | SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A span given its place: rows `[row, row + ref.n_entries)`, first logical position `position`.

    It takes as many positions as it has tokens. A slot stands where the last of its tokens would.
    """

    ref: SpanRef
    row: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineText:
    """Text between segments, computed with the question: its first logical position."""

    ids: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """What a question stands behind.

    `head` is the text before the first segment, whose entries come from the prompt cache; then the
    segments, with `online` text anywhere between and behind them. Instead of a head, the first `n_kept`
    rows may be left from an earlier answer. `n_entries` rows come from caches, `length` is the logical
    position of the question.
    """

    head: tuple[int, ...]
    n_kept: int = 0
    segments: tuple[Segment, ...]
    online: tuple[OnlineText, ...]
    n_entries: int
    length: int

    @property
    def n_online(self) -> int:
        """Tokens of online text."""
        return len(self.online_ids)

    @property
    def n_rows(self) -> int:
        """Rows before the question: entries and online text."""
        return self.n_entries + self.n_online

    @property
    def online_ids(self) -> tuple[int, ...]:
        """The tokens of all online text, in order."""
        return tuple(i for text in self.online for i in text.ids)

    @property
    def refs(self) -> tuple[SpanRef, ...]:
        """The spans, in order."""
        return tuple(segment.ref for segment in self.segments)

    def positions(self) -> NDArray[np.int64]:
        """The position at which each entry is placed, right-aligned: `[n_entries]`."""
        first = self.n_kept + len(self.head)
        runs = ((s.position, len(s.ref), s.ref.ratio) for s in self.segments)
        return self._placed([(0, first, 1), *runs])

    def online_positions(self) -> NDArray[np.int64]:
        """The position of each token of online text, right-aligned: `[n_online]`."""
        return self._placed([(text.position, len(text.ids), 1) for text in self.online])

    def _placed(self, runs: Sequence[tuple[int, int, int]]) -> NDArray[np.int64]:
        """Right-aligned positions of runs: the first one, tokens, and how many share an entry."""
        logical = [
            first + np.minimum(np.arange(ratio, length + ratio, ratio), length) - 1
            for first, length, ratio in runs
        ]
        return np.concatenate([*logical, np.empty(0)]).astype(np.int64) - (
            self.length - self.n_rows
        )


def plan_prefix(
    pieces: Sequence[Piece],
    *,
    max_entries: int | None = None,
    window: int | None = None,
    n_kept: int = 0,
) -> PrefixPlan:
    """Put pieces behind each other in the order given, packed without gaps, behind `n_kept` rows.

    Text before the first span becomes the head, unless there are rows before it; a plan without spans
    has no head, and all of its text is computed online.

    Raises:
        BudgetError: the pieces take more than `max_entries` rows, or stand for more than `window` tokens.
        ConfigError: slots behind kept rows, which stand at their own numbers and are not moved.
    """
    if n_kept and has_slots(pieces):
        raise ConfigError(
            f"{n_kept} kept rows cannot stand before slots: compose all of the prefix"
        )
    head = () if n_kept else head_of(pieces)
    pieces = without(pieces, len(head))
    segments: list[Segment] = []
    online: list[OnlineText] = []
    row = position = n_kept + len(head)
    for piece in pieces:
        if isinstance(piece, SpanRef):
            segments.append(Segment(ref=piece, row=row, position=position))
            row += piece.n_entries
        elif piece.ids:
            online.append(OnlineText(ids=piece.ids, position=position))
        position += len(piece)
    plan = PrefixPlan(
        head=head,
        n_kept=n_kept,
        segments=tuple(segments),
        online=tuple(online),
        n_entries=row,
        length=position,
    )
    if max_entries is not None and plan.n_rows > max_entries:
        n_spans = row - len(head) - n_kept
        raise BudgetError(
            f"{n_spans} span entries and {plan.n_rows - n_spans} tokens of other text exceed the "
            f"budget of {max_entries}: retrieve fewer spans, or raise the budget"
        )
    if window is not None and position > window:
        raise BudgetError(
            f"{plan.n_rows} rows stand for {position} tokens, more than the model's window of "
            f"{window}: retrieve fewer spans"
        )
    return plan


def head_of(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The text before the first span; nothing if there is no span."""
    first_span = next((i for i, p in enumerate(pieces) if isinstance(p, SpanRef)), 0)
    return tuple(i for p in pieces[:first_span] if isinstance(p, Text) for i in p.ids)


def has_slots(pieces: Sequence[Piece]) -> bool:
    """Whether some rows will stand for several tokens, so that all before them are moved."""
    return any(isinstance(piece, SpanRef) and piece.ratio > 1 for piece in pieces)


def without(pieces: Sequence[Piece], n: int) -> list[Piece]:
    """The pieces behind the first `n` tokens of `pieces`, none of which are in the middle of slots."""
    rest: list[Piece] = []
    for piece in pieces:
        skipped = min(n, len(piece))
        n -= skipped
        if skipped == len(piece):
            continue
        if isinstance(piece, Text):
            rest.append(Text(piece.ids[skipped:]))
        else:
            rest.append(replace(piece, start=piece.start + skipped))
    return rest


def arrange(refs: Sequence[SpanRef]) -> list[SpanRef]:
    """The order of segments: chunks by first appearance, merged spans by position."""
    by_chunk: dict[ChunkId, dict[int, list[Span]]] = {}
    for ref in refs:
        by_ratio = by_chunk.setdefault(ref.chunk_id, {})
        by_ratio.setdefault(ref.ratio, []).append(Span(ref.start, ref.stop))
    return [
        ref
        for chunk_id, by_ratio in by_chunk.items()
        for ref in sorted(
            SpanRef(chunk_id, span.start, span.stop, ratio)
            for ratio, spans in by_ratio.items()
            for span in merge(spans)
        )
    ]


def begin_alike(refs: Sequence[SpanRef], earlier: Sequence[SpanRef]) -> list[SpanRef]:
    """The spans in another order: chunks that are read as they were in `earlier` first, in its order."""
    now, then = _by_chunk(arrange(refs)), _by_chunk(arrange(earlier))
    again = [chunk_id for chunk_id in then if now.get(chunk_id) == then[chunk_id]]
    order = dict.fromkeys([*again, *now])
    return [ref for chunk_id in order for ref in now[chunk_id]]


def _by_chunk(refs: Sequence[SpanRef]) -> dict[ChunkId, list[SpanRef]]:
    found: dict[ChunkId, list[SpanRef]] = {}
    for ref in refs:
        found.setdefault(ref.chunk_id, []).append(ref)
    return found


def merge(spans: Sequence[Span]) -> list[Span]:
    """The union of spans of one chunk, as the fewest spans, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged
