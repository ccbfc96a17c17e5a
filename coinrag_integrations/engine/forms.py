"""What is cached of a chunk: its tokens' own entries, and C2KV's slots, each in a store of its own.

A form is named by its ratio: 1 for entries, k for slots of k tokens. Knows no prompts and no plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from coinrag_integrations.engine.c2kv.extraction import SlotEncoder
from coinrag_integrations.engine.cost import CostModel
from coinrag_integrations.engine.encoder import Encoder, batches
from coinrag_integrations.engine.plan import merge
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.errors import RemoteError, StoreError
from coinrag_integrations.types import Chunk, Span

Coverage = Literal["nuggets", "all"]
# Of a chunk, by ratio: its kv [T, L, 2, H, D], its slots [S, L, 2, H, D].
Forms = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkForms:
    """Makes and stores all forms of chunks. `stores` has that of the entries, and one for each ratio.

    `slots` makes the slots of all ratios, of entries that `encoder` made.
    """

    encoder: Encoder
    slots: SlotEncoder | None
    stores: Mapping[int, KVStore]
    coverage: Coverage
    batch_tokens: int

    def encode(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Forms]]:
        """Each chunk in all forms, a batch at a time, chunks of like length together.

        Raises:
            BudgetError: a chunk does not fit the model's window.
        """
        for batch in self.batches(chunks):
            ids = [chunk.token_ids for chunk in batch]
            made = {1: self.encoder(ids)}
            for ratio in self.stores:
                if ratio != 1 and self.slots is not None:
                    made[ratio] = self.slots(ids, ratio, made[1])
            for i, chunk in enumerate(batch):
                yield chunk, {ratio: kvs[i] for ratio, kvs in made.items()}

    def batches(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """The chunks that are encoded together, of like length."""
        by_length = sorted(chunks, key=len, reverse=True)  # little padding in any batch
        for run in batches(map(len, by_length), self.batch_tokens):
            yield [by_length[i] for i in run]

    def one(self, ids: Sequence[int], ratio: int, cost: CostModel) -> torch.Tensor:
        """One form of a chunk; how long slots took is noted in `cost`."""
        begin = time.perf_counter()
        (kv,) = self.encoder([ids])  # which notes its own
        if ratio == 1 or self.slots is None:
            return kv
        (slots,) = self.slots([ids], ratio, [kv])
        if slots.is_cuda:
            torch.cuda.synchronize(slots.device)
        cost.observe_encode(len(ids), time.perf_counter() - begin)
        return slots

    def store(self, chunk: Chunk, forms: Forms, *, anew: bool = False) -> None:
        """Write of each form what the coverage asks for, unless it is there: then only `anew`."""
        for ratio, kv in forms.items():
            if anew or len(forms) == 1 or not self.is_stored(chunk, ratio):
                self.stores[ratio].put(chunk.chunk_id, kv, self.covered(chunk, ratio), len(chunk))

    def covered(self, chunk: Chunk, ratio: int = 1) -> list[Span]:
        """The token ranges to store: the nuggets' union, all if there are none; all of slots."""
        if ratio > 1 or self.coverage == "all" or not chunk.nuggets:
            return [Span(0, len(chunk))] if len(chunk) else []
        return merge([nugget.span for nugget in chunk.nuggets])

    def is_stored(self, chunk: Chunk, ratio: int) -> bool:
        """Whether a store holds, readable, every token that the coverage asks for.

        Raises:
            RemoteError: the remote storage cannot be reached.
        """
        store = self.stores[ratio]
        try:
            stored = store.header(chunk.chunk_id).ranges
        except RemoteError:
            raise
        except StoreError:
            return False
        wanted = self.covered(chunk, ratio)
        covered = all(any(a.start <= b.start and b.stop <= a.stop for a in stored) for b in wanted)
        return covered and store.is_uploaded(chunk.chunk_id)

    def n_bytes(self) -> int:
        """Bytes of all local chunk files."""
        return sum(store.n_bytes() for store in self.stores.values())

    def close(self) -> None:
        """Close the stores."""
        for store in self.stores.values():
            store.close()
