"""Slots of documents: a second pass behind their cached KV. Documents are encoded as ever.

The same functions serve and train: gradients flow to what wants them. Knows no disk and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from coinrag_integrations.engine.c2kv.blocks import Blocks
from coinrag_integrations.engine.c2kv.extractor import Extractor, Init
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.hf_training import entries_behind
from coinrag_integrations.engine.kernels.reference import rotate
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.prefix import empty_kv

# Slots in one pass: of longer documents, the rows that they see are placed for one group after the other.
GROUP = 256


def slot_inputs(
    model: LoadedModel, init: Init, shared: torch.Tensor, ids: Sequence[int], blocks: Blocks
) -> torch.Tensor:
    """The input embeddings of a document's slots: [S, hidden] in the model's dtype (see `Init`)."""
    words: Callable[[torch.Tensor], torch.Tensor] = model.hf.get_input_embeddings()
    where, dtype = model.device, model.layout.dtype
    last = torch.from_numpy(blocks.positions(len(ids)))
    if init == "eos" or not ids:
        return shared.expand(len(last), -1).to(where, dtype)
    tokens = torch.tensor(ids, device=where)
    with torch.no_grad():
        if init == "last":
            own = words(tokens[last.to(where)]).float()
        else:
            block = torch.arange(len(ids), device=where) // blocks.ratio
            sums = torch.zeros((len(last), shared.shape[-1]), device=where)
            sums.index_add_(0, block, words(tokens).float())
            own = sums / block.bincount()[:, None]
    return (own + shared.to(where)).to(dtype)


def slot_entries(
    model: LoadedModel,
    projecting: PreTrainedModel,
    inputs: Sequence[torch.Tensor],
    entries: Sequence[torch.Tensor],
    blocks: Blocks,
    group: int = GROUP,
) -> list[torch.Tensor]:
    """Slots of B documents, keys before RoPE: [S, L, 2, H, D] each.

    Of each document its slots' `inputs` [S, hidden] and its own `entries` [T, L, 2, H, D], which `model`
    computed and which stay as they are; `projecting` computes the slots, at most `group` of a document
    at once. Documents do not see each other; slots of shorter ones are padded behind.
    """
    lengths, n_slots = [len(it) for it in entries], max(map(len, inputs), default=0)
    if n_slots == 0:
        return [it.new_empty(model.layout.staged(0)) for it in entries]
    padded = torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)  # [B, n, hidden]
    last = np.minimum((np.arange(n_slots) + 1) * blocks.ratio, np.array(lengths)[:, None]) - 1
    at = np.maximum(last, 0)  # [B, n]
    earlier = empty_kv(model.layout, 0, model.device, len(entries))
    found: list[torch.Tensor] = []
    for first in range(0, n_slots, group):
        stop = min(first + group, n_slots)
        tokens = blocks.tokens(first, stop, max(lengths))
        rows = torch.stack([_rows(it, tokens) for it in entries])  # [B, t, L, 2, H, D]
        theirs = placed(model, rows, np.tile(tokens, (len(entries), 1)))
        new = entries_behind(
            projecting,
            padded[:, first:stop],
            torch.cat((theirs, earlier), dim=4),
            torch.from_numpy(at[:, first:stop]).to(model.device),
            blocks.seen(first, stop, lengths, model.layer_windows, model.device),
            model.rope.turns,
        )
        found.append(new)
        if stop < n_slots:
            earlier = torch.cat((earlier, placed(model, new, at[:, first:stop])), dim=4)
    together = torch.cat(found, dim=1)
    return [it[: len(own)] for it, own in zip(together, inputs, strict=True)]


def placed(model: LoadedModel, entries: torch.Tensor, at: NDArray[np.int64]) -> torch.Tensor:
    """Entries [B, n, L, 2, H, D] turned to positions `at` [B, n]: [L, 2, B, H, n, D], in the graph."""
    keys, values = entries.flatten(0, 1).unbind(2)  # [B * n, L, H, D]
    turned = rotate(keys, model.rope.rotation(at.reshape(-1), model.device)).to(values.dtype)
    kv = torch.stack((turned, values), dim=2).reshape(entries.shape)
    return kv.permute(2, 3, 0, 4, 1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEncoder:
    """Makes slots of token sequences, for one model and extractor. `projecting` is what both make."""

    model: LoadedModel
    extractor: Extractor
    projecting: LoadedModel

    @classmethod
    def of(cls, model: LoadedModel, extractor: Extractor | None = None) -> Self:
        """With an extractor; None: untrained.

        Raises:
            ModelError: it belongs to another model.
        """
        extractor = extractor or Extractor.untrained(model)
        extractor.check(model)
        return cls(model=model, extractor=extractor, projecting=extractor.merged(model))

    def __call__(
        self,
        sequences: Sequence[Sequence[int]],
        ratio: int,
        entries: Sequence[torch.Tensor] | None = None,
        *,
        group: int = GROUP,
    ) -> list[torch.Tensor]:
        """One slot for every `ratio` tokens of each sequence: [S, L, 2, H, D], keys before RoPE.

        `entries` [T, L, 2, H, D] are the sequences' own, encoded alone; None: they are encoded now.

        Raises:
            BudgetError: a sequence does not fit the model's window.
            ConfigError: a ratio of less than 1.
        """
        blocks = Blocks(ratio=ratio, overlap=self.extractor.overlap)
        if entries is None:
            entries = encode(self.model, sequences)
        with torch.no_grad():
            inputs = [
                slot_inputs(self.model, self.extractor.init, self.extractor.shared, ids, blocks)
                for ids in sequences
            ]
            return slot_entries(
                self.model, self.projecting.hf, inputs, entries, blocks, group=group
            )


def _rows(entries: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """The entries of some tokens; zeros where a document has ended."""
    rows = entries.new_zeros((len(tokens), *entries.shape[1:]))
    there = [i for i, token in enumerate(tokens) if token < len(entries)]
    rows[there] = entries[[tokens[i] for i in there]]
    return rows
