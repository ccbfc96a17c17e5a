"""Lay spans out behind the prompt. Pure arithmetic: no torch, no disk, no model.

A plan has two rulers. *Logical* positions are where entries belong in the text that the model is
shown: the question starts at `length`. *Rows* are where they lie in the buffer: `n_entries` of them.
The two differ once a segment holds fewer entries than the text it stands for. RoPE only sees
differences, so the entry at logical position p is placed at `p - (length - n_entries)` and the
question starts at row `n_entries`: right-aligned, and what `generate()` assumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coinrag_integrations.errors import BudgetError
from coinrag_integrations.types import ChunkId, Span, SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A span given its place: rows `[row, row + len(ref))`, first logical position `position`."""

    ref: SpanRef
    row: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """The prompt's entries and, behind them, the segments in order."""

    n_prompt: int
    segments: tuple[Segment, ...]
    n_entries: int
    length: int

    def positions(self) -> NDArray[np.int64]:
        """The position at which each row is placed, right-aligned: `[N]`, the last below N."""
        logical = [np.arange(self.n_prompt)]
        logical += [np.arange(s.position, s.position + len(s.ref)) for s in self.segments]
        return np.concatenate(logical).astype(np.int64) - (self.length - self.n_entries)


def plan_prefix(
    refs: Sequence[SpanRef], *, n_prompt: int, max_entries: int | None = None
) -> PrefixPlan:
    """Put `refs` (best first) behind a prompt of `n_prompt` entries, packed without gaps.

    Chunks come in the order of their best span, spans of one chunk in the order of its text;
    overlapping or touching spans are merged.

    Raises:
        BudgetError: prompt and spans take more than `max_entries`.
    """
    segments, row = [], n_prompt
    for ref in arrange(refs):
        segments.append(Segment(ref=ref, row=row, position=row))
        row += len(ref)
    if max_entries is not None and row > max_entries:
        raise BudgetError(
            f"{row - n_prompt} span entries and {n_prompt} prompt entries exceed the budget of "
            f"{max_entries}: retrieve fewer spans, or raise the budget"
        )
    return PrefixPlan(n_prompt=n_prompt, segments=tuple(segments), n_entries=row, length=row)


def arrange(refs: Sequence[SpanRef]) -> list[SpanRef]:
    """The order of segments: chunks by first appearance, merged spans by position."""
    by_chunk: dict[ChunkId, list[Span]] = {}
    for ref in refs:
        by_chunk.setdefault(ref.chunk_id, []).append(Span(ref.start, ref.stop))
    return [
        SpanRef(chunk_id, span.start, span.stop)
        for chunk_id, spans in by_chunk.items()
        for span in merge(spans)
    ]


def merge(spans: Sequence[Span]) -> list[Span]:
    """The union of spans of one chunk, as the fewest spans, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged
