"""Chunks to keys and values: one forward pass a chunk, batched. Writes nothing to disk."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from coinrag_integrations.engine import hf
from coinrag_integrations.engine.cost import CostModel
from coinrag_integrations.engine.kernels import Kernels
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.prefix import empty_kv
from coinrag_integrations.engine.prompt_cache import PromptCache
from coinrag_integrations.errors import BudgetError

Context = Literal["alone", "after_prompt"]


def encode(
    model: LoadedModel,
    sequences: Sequence[Sequence[int]],
    behind: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Keys before RoPE and values of several token sequences: `[T, L, 2, H, D]` each.

    The sequences do not see each other. `behind` [L, 2, 1, H, P, D] is a placed prefix that each of
    them sees (context "after_prompt"); without it they are encoded alone, from position 0.
    Shorter ones are padded on the right, where causal attention keeps padding out of sight.

    Raises:
        BudgetError: a sequence does not fit the model's window.
    """
    n_behind = 0 if behind is None else behind.shape[4]
    longest = max(map(len, sequences), default=0)
    if n_behind + longest > model.window:
        raise BudgetError(
            f"a chunk of {longest} tokens behind {n_behind} prompt tokens does not fit the model's "
            f"window of {model.window}: use smaller chunks"
        )
    if longest == 0:
        return [torch.empty(model.layout.staged(0), dtype=model.layout.dtype) for _ in sequences]
    ids = torch.zeros((len(sequences), longest), dtype=torch.long)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    shape = (len(sequences), *model.layout.staged(longest))
    out = torch.empty(shape, dtype=model.layout.dtype, device=model.device)
    hf.capture(model.hf, ids.to(model.device), out, model.rope.turns, behind)
    return [kv[: len(sequence)] for kv, sequence in zip(out, sequences, strict=True)]


@dataclass(kw_only=True)
class Encoder:
    """Encodes token sequences as the chunks of one store are: alone, or `after` the prompt's head."""

    model: LoadedModel
    after: tuple[int, ...]
    prompts: PromptCache
    kernels: Kernels
    cost: CostModel

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The kv [T, L, 2, H, D] of each sequence. Notes how long it took.

        Raises:
            BudgetError: a sequence does not fit the model's window.
        """
        behind, begin = self._behind, time.perf_counter()
        kvs = encode(self.model, sequences, behind)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self.cost.observe_encode(sum(map(len, sequences)), time.perf_counter() - begin)
        return kvs

    @cached_property
    def _behind(self) -> torch.Tensor | None:
        """What chunks see while they are encoded: the placed head, or nothing."""
        if not self.after:
            return None
        device = self.model.device
        head = self.prompts.get(self.after).to(device)
        placed = empty_kv(self.model.layout, len(head), device)
        rows = torch.arange(len(head), device=device)
        rotation = self.model.rope.rotation(range(len(head)), device)
        self.kernels.place(head, rotation, placed, rows)
        return placed


def batches(lengths: Iterable[int], max_tokens: int) -> Iterator[range]:
    """Consecutive runs whose padded size stays within `max_tokens` (always at least one item)."""
    start, longest = 0, 0
    stop = 0
    for stop, length in enumerate(lengths):
        longest = max(longest, length)
        if stop > start and longest * (stop - start + 1) > max_tokens:
            yield range(start, stop)
            start, longest = stop, length
    if longest:
        yield range(start, stop + 1)
