"""What to do about spans that cannot be read, or not fast enough: encode their chunk again.

What is encoded again is stored again, if that mends something and nobody else is writing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from coinrag_integrations.engine.chunking import has_its_tokens
from coinrag_integrations.engine.cost import CostModel
from coinrag_integrations.engine.forms import ChunkForms
from coinrag_integrations.engine.store import Catalog, Disk, KVStore, PackedChunk, Remote
from coinrag_integrations.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    RemoteError,
    SlowReadError,
    StoreError,
)
from coinrag_integrations.types import Chunk, ChunkId, Scope, Span

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Chunks of one store, in the form of one `ratio`, and how to make them."""

    ratio: int
    forms: ChunkForms
    catalog: Catalog
    disk: Disk
    scope: Scope
    remote: Remote | None
    cost: CostModel
    chunk_tokens: int

    @property
    def store(self) -> KVStore:
        """Where chunks are stored in this form."""
        return self.forms.stores[self.ratio]

    def decline(self, n_bytes: Mapping[ChunkId, int]) -> Mapping[ChunkId, StoreError]:
        """The chunks that are faster encoded than read from where they are, and by how much."""
        if self.remote is not None and not self.cost.knows_encoding:
            for _ in range(2):  # the first one pays for what is set up once
                self._encode(range(min(_PROBE_TOKENS, self.chunk_tokens)))
        if not self.cost.knows_encoding:
            return {}
        tiers = {chunk_id: self.store.tier(chunk_id) for chunk_id in n_bytes}
        return self.cost.slow_reads(tiers, n_bytes, self.chunk_tokens)

    def recompute(self, chunk_id: ChunkId, spans: Sequence[Span], error: StoreError) -> PackedChunk:
        """Encode a chunk again from its stored tokens; mend its file unless it is in order.

        Raises:
            ChunkNotFoundError, CorruptChunkError: as for `chunk`.
        """
        if isinstance(error, RemoteError):
            logger.warning("encoding chunk %s again: %s", chunk_id, error)
        chunk = self.chunk(chunk_id)
        kv = self._encode(chunk.token_ids)
        packed = self.store.pack(kv, self.forms.covered(chunk, self.ratio), len(chunk))
        outside = any(packed.rows(span) is None for span in spans)
        if self._needs_mending(chunk, error):
            self._mend(chunk_id, packed, error)
        return self.store.pack(kv, [Span(0, len(chunk))], len(chunk)) if outside else packed

    def chunk(self, chunk_id: ChunkId) -> Chunk:
        """A chunk out of the catalog, whose tokens are those that its id was made of.

        Raises:
            ChunkNotFoundError: it is not there.
            CorruptChunkError: its tokens are others.
        """
        chunk = self.catalog.chunk(chunk_id)
        if not has_its_tokens(chunk, self.scope):
            raise CorruptChunkError(
                f"the tokens of chunk {chunk_id} in {self.catalog.path} are damaged: delete document "
                f"{chunk.document_id!r} and add it again"
            )
        return chunk

    def _needs_mending(self, chunk: Chunk, error: StoreError) -> bool:
        """Whether a chunk that was encoded again should be stored."""
        if isinstance(error, RemoteError | SlowReadError):
            return False  # what is stored is in order, only far away
        is_missing = isinstance(error, ChunkNotFoundError)
        return not (is_missing and self.forms.is_stored(chunk, self.ratio))

    def _encode(self, ids: Sequence[int]) -> torch.Tensor:
        return self.forms.one(ids, self.ratio, self.cost)

    def _mend(self, chunk_id: ChunkId, packed: PackedChunk, error: StoreError) -> None:
        """Store what had to be encoded again, unless somebody else is writing."""
        with self.disk.if_free() as free:
            # The document may have been deleted since its tokens were read.
            if not free or not self.catalog.has_chunk(chunk_id):
                return
            logger.info("encoded chunk %s again: %s", chunk_id, error)
            try:
                self.store.put_packed(chunk_id, packed)
            except StoreError as refusal:
                logger.warning("could not mend chunk %s: %s", chunk_id, refusal)


def repairs_of(
    forms: ChunkForms,
    catalog: Catalog,
    disk: Disk,
    scope: Scope,
    remote: Remote | None,
    chunk_tokens: int,
) -> dict[int, Repair]:
    """Repairs of each form, by ratio. What slots take to make is measured apart."""
    return {
        ratio: Repair(
            ratio=ratio,
            forms=forms,
            catalog=catalog,
            disk=disk,
            scope=scope,
            remote=remote,
            cost=forms.encoder.cost if ratio == 1 else CostModel(),
            chunk_tokens=chunk_tokens,
        )
        for ratio in forms.stores
    }
