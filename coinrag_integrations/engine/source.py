"""Where entries of one ratio come from: a store, and what is done about chunks that it cannot give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coinrag_integrations.engine.cost import CostModel
from coinrag_integrations.engine.store import KVStore, PackedChunk, Stage
from coinrag_integrations.errors import SpanError, StoreError
from coinrag_integrations.types import ChunkId, Span

# Of chunks and the bytes to read of them, those that had better be encoded anew, and why.
Decline = Callable[[Mapping[ChunkId, int]], Mapping[ChunkId, StoreError]]
# Encodes a chunk again; the spans of it that are wanted, and why they were not read.
Recompute = Callable[[ChunkId, Sequence[Span], StoreError], PackedChunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A store, how long it takes to read, and what to do instead.

    `recompute(chunk_id, spans, error)` gives what would be stored of a chunk when spans of it are
    missing or cannot be trusted; without it the store's error is raised. `decline` says which
    chunks not to read in the first place.
    """

    store: KVStore
    cost: CostModel
    recompute: Recompute | None = None
    decline: Decline | None = None

    def declined(self, stage: Stage) -> Mapping[ChunkId, StoreError]:
        """The chunks of a stage that are better encoded than read, and why."""
        if self.recompute is None or self.decline is None:
            return {}
        n_bytes: dict[ChunkId, int] = {}
        for ref in stage.refs:
            n = stage.codec.n_bytes(ref.n_entries)
            n_bytes[ref.chunk_id] = n_bytes.get(ref.chunk_id, 0) + n
        return self.decline(n_bytes)

    def mend(self, stage: Stage, failed: Mapping[int, StoreError]) -> None:
        """Fill the rows of spans that could not be read.

        Raises:
            StoreError: the first of these errors, without `recompute`.
            SpanError: a span ends after its chunk's last token, or cuts a slot.
        """
        if not failed:
            return
        if self.recompute is None:
            raise next(iter(failed.values()))
        by_chunk: dict[ChunkId, list[int]] = {}
        for index in failed:
            by_chunk.setdefault(stage.refs[index].chunk_id, []).append(index)
        for chunk_id, indices in by_chunk.items():
            spans = [Span(stage.refs[i].start, stage.refs[i].stop) for i in indices]
            fresh = self.recompute(chunk_id, spans, failed[indices[0]])
            for index, span in zip(indices, spans, strict=True):
                stored = fresh.rows(span)
                if stored is None:
                    ratio = stage.codec.ratio
                    cuts = f", or cuts one of its slots of {ratio} tokens" if ratio > 1 else ""
                    raise SpanError(
                        f"span [{span.start}, {span.stop}) ends after the {fresh.n_tokens} tokens of "
                        f"chunk {chunk_id}{cuts}"
                    )
                stage.fill(index, fresh.parts, stored)
