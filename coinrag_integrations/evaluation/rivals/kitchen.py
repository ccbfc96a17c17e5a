"""Where rivals are prepared: a model, what was computed offline, and one way to lay it out.

What a method may compute before it knows the question (entries of chunks, in one context or another) is
kept in memory; laying it out goes through the engine's own kernels, so that all methods compose equally
fast. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.c2kv import Extractor, SlotEncoder
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import Implementation, choose_kernels
from coinrag_integrations.engine.links import link_ids
from coinrag_integrations.engine.plan import OnlineText, PrefixPlan, Segment, Text
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from coinrag_integrations.engine.prompt import PromptTemplate, build_prompt
from coinrag_integrations.evaluation.rivals.task import Composed, Task
from coinrag_integrations.types import Chunk, SpanRef

MAX_NEW_TOKENS = 32  # LongBench's limit for multi-hop questions

# What a chunk sees while it is encoded: nothing; one BOS token, whose row is then dropped (CacheBlend's
# scripts); the prompt's head, whose rows are then dropped.
Context = Literal["alone", "bos", "prompt"]
# Where cached pieces stand: behind each other; each where it was encoded alone, at 0 (the question
# behind all of them); side by side behind the prompt (the question behind the longest).
Order = Literal["packed", "stale", "parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cached:
    """Entries [n, L, 2, H, D] that stand for `width` tokens.

    Entry i is turned to position `at[i]` behind the piece's first; a mask by position has them at
    the end of the piece's width. (In layers with a window that is right for whole pieces only.)
    """

    ref: SpanRef
    entries: torch.Tensor
    at: NDArray[np.int64]
    width: int

    @classmethod
    def whole(cls, ref: SpanRef, entries: torch.Tensor) -> Cached:
        """An entry for each token."""
        return cls(ref=ref, entries=entries, at=np.arange(len(entries)), width=len(entries))

    @classmethod
    def fewer(cls, chunk: Chunk, entries: torch.Tensor, at: NDArray[np.int64]) -> Cached:
        """Some entries that stand for a whole chunk."""
        ref = SpanRef(chunk.chunk_id, len(chunk) - len(entries), len(chunk))
        return cls(ref=ref, entries=entries, at=at, width=len(chunk))

    def __len__(self) -> int:
        """Entries."""
        return len(self.entries)


class Kitchen:
    """A model with its prompt, and what has been prepared offline.

    `model` encodes what is cached; `reader` computes all else: the same, or the model with a reader
    adapter merged in. `links` are the ids of trained link tokens, where the reader has some (see
    `engine.links`). `head` are the prompt's entries [P, L, 2, H, D]; `slots` makes C2KV's slots with an
    extractor (None: untrained).
    """

    def __init__(
        self,
        model: LoadedModel,
        template: PromptTemplate | None = None,
        *,
        reader: LoadedModel | None = None,
        extractor: Extractor | None = None,
        kernels: Implementation = "auto",
    ) -> None:
        """Encode the prompt's head.

        Raises:
            ModelError: the extractor belongs to another model.
        """
        self.model, self.reader = model, reader or model
        self.links = link_ids(self.reader)
        self._extractor = extractor
        if extractor is not None:
            extractor.check(model)
        self.prompt = build_prompt(model.tokenizer, template or PromptTemplate())
        self.kernels = choose_kernels(kernels, model.device)
        self.head = encode(model, [self.prompt.head])[0].contiguous()  # [P, L, 2, H, D]
        self._offline: dict[Hashable, torch.Tensor] = {}

    def offline(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` gave when it was first asked for under `key`: not to be written to."""
        if key not in self._offline:
            self._offline[key] = make()
        return self._offline[key]

    def forget(self) -> None:
        """Free all that was prepared, but for the prompt's head."""
        self._offline.clear()

    def entries(self, chunk: Chunk, context: Context = "alone") -> torch.Tensor:
        """A chunk's entries [T, L, 2, H, D], encoded once in each context."""
        return self.offline(
            (chunk.chunk_id, context), lambda: self.encode(chunk.token_ids, context)
        )

    def encode(self, ids: Sequence[int], context: Context = "alone") -> torch.Tensor:
        """The entries [T, L, 2, H, D] of tokens in a context; one by one, so that none is padded."""
        if context == "bos":
            return encode(self.model, [(self.bos, *ids)])[0][1:].contiguous()
        behind = self._placed_head if context == "prompt" else None
        return encode(self.model, [ids], behind)[0].contiguous()

    @cached_property
    def slots(self) -> SlotEncoder:
        """What makes slots of chunks."""
        return SlotEncoder.of(self.model, self._extractor)

    @cached_property
    def untrained_slots(self) -> SlotEncoder:
        """What makes slots before any training."""
        return SlotEncoder.of(self.model)

    @cached_property
    def bos(self) -> int:
        """The token that opens a text; where the tokenizer has none, the prompt's first."""
        bos = self.model.tokenizer.hf.bos_token_id
        return int(self.prompt.head[0] if bos is None else bos)

    def lay_out(
        self,
        task: Task,
        pieces: Sequence[Cached | Text],
        *,
        order: Order = "packed",
        cached_head: bool = True,
    ) -> Composed:
        """Put pieces behind the prompt's head: cached ones in rows, text to be computed online.

        Without `cached_head` the head is computed online too, and nothing may be cached.
        """
        head = task.head if cached_head else ()
        plan, turns = plan_pieces(
            head, pieces if cached_head else [Text(task.head), *pieces], order
        )
        cached = [piece for piece in pieces if isinstance(piece, Cached)]
        room = plan.n_online + len(task.tail) + MAX_NEW_TOKENS
        device = self.model.device
        kv = empty_kv(self.model.layout, plan.n_entries + room, device)
        if plan.n_entries:
            staged = torch.cat([self.head, *(piece.entries for piece in cached)])
            rotation = self.model.rope.rotation(turns, device)
            self.kernels.place(staged, rotation, kv, torch.arange(plan.n_entries, device=device))
        n_head = len(task.head)
        n_cached = sum(map(len, cached))
        return Composed(
            prefix=Prefix(kv=kv, plans=(plan,)),
            n_context=plan.n_rows - n_head,
            bytes_read=n_cached * self.model.layout.bytes_per_entry,
        )

    @cached_property
    def _placed_head(self) -> torch.Tensor:
        """What chunks see in context "prompt": [L, 2, 1, H, P, D]."""
        n, device = len(self.head), self.model.device
        placed = empty_kv(self.model.layout, n, device)
        rotation = self.model.rope.rotation(range(n), device)
        self.kernels.place(self.head, rotation, placed, torch.arange(n, device=device))
        return placed


def plan_pieces(
    head: tuple[int, ...], pieces: Sequence[Cached | Text], order: Order
) -> tuple[PrefixPlan, NDArray[np.int64]]:
    """The plan of pieces behind a head, and the position to turn each cached key to: [n_entries]."""
    segments: list[Segment] = []
    online: list[OnlineText] = []
    turns = [np.arange(len(head))]
    row = position = end = len(head)
    for piece in pieces:
        start = {"packed": position, "stale": 0, "parallel": len(head)}[order]
        if isinstance(piece, Text):
            online.append(OnlineText(ids=piece.ids, position=position))
        else:
            n, width = len(piece), piece.width
            segments.append(Segment(ref=piece.ref, row=row, position=start + width - n))
            turns.append(start + piece.at)
            row += n
        width = len(piece) if isinstance(piece, Text) else piece.width
        if order == "parallel":
            end = max(end, start + width)
        else:
            position += width
            end = position
    plan = PrefixPlan(
        head=head, segments=tuple(segments), online=tuple(online), n_entries=row, length=end
    )
    return plan, np.concatenate(turns) - (plan.length - plan.n_rows)
