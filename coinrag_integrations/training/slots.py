"""C2KV's extractor as what is trained: slots in the graph, a frozen reader, a full-context teacher."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.c2kv import Blocks, Extractor
from coinrag_integrations.engine.c2kv.extraction import placed, slot_entries, slot_inputs
from coinrag_integrations.engine.c2kv.extractor import (
    base_of,
    first_embedding,
    projections,
    save_extractor,
)
from coinrag_integrations.errors import ModelError
from coinrag_integrations.training.batches import divergences, losses, nats, online_logits
from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.training.reconstruction import reconstruction
from coinrag_integrations.training.samples import Sample, Slots


class _Changed(nn.Module):
    """A linear layer and a low-rank change beside it: x [..., in] -> [..., out]; B begins as zero."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        n_out, n_in = linear.weight.shape
        device = linear.weight.device
        self.linear, self.scale = linear, scale
        self.a = nn.Parameter(torch.empty((rank, n_in)))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))  # as peft begins
        self.a.data = self.a.data.to(device)
        self.b = nn.Parameter(torch.zeros((n_out, rank), device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives, and the change."""
        change = (
            x @ self.a.T.to(x.dtype) @ self.b.T.to(x.dtype)
        )  # as it is served, and fast in bf16
        return self.linear(x) + self.scale * change  # type: ignore[no-any-return]


class _Copied(nn.Module):
    """A linear layer copied whole: x [..., in] -> [..., out]. Weights are fp32, passes in x's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        own = {
            name: nn.Parameter(weight.detach().to(torch.float32, copy=True))
            for name, weight in linear.named_parameters()
        }
        self.weight, self.bias = own["weight"], own.get("bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer gives by the copied weights."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.weight.to(x.dtype), bias)


class SlotLearner:
    """Changes or copies of what projects queries, keys and values, and the shared vector; fp32.

    All else is frozen. `reader` reads the slots, and is the teacher behind the same chunks whole.
    """

    def __init__(self, model: LoadedModel, config: ReaderConfig, reader: LoadedModel) -> None:
        """Begin untrained."""
        self.base, self.reader, self.config = model, reader, config
        for weight in (*model.hf.parameters(), *reader.hf.parameters()):
            weight.requires_grad_(False)
        shared = {id(it): it for it in (*model.hf.parameters(), *model.hf.buffers())}
        self.projecting = copy.deepcopy(model.hf, shared)
        self.changes: dict[str, _Changed | _Copied] = {}
        for name, linear in projections(replace(model, hf=self.projecting)).items():
            parent, _, child = name.rpartition(".")
            change = (
                _Copied(linear) if config.copies else _Changed(linear, config.rank, config.scale)
            )
            setattr(self.projecting.get_submodule(parent), child, change)
            self.changes[name] = change
        self.shared = nn.Parameter(first_embedding(model, config.init))
        weights = (weight for it in self.changes.values() for weight in it.parameters())
        self.weights = [self.shared, *(weight for weight in weights if weight.requires_grad)]

    def start_from(self, extractor: Extractor) -> None:
        """Take the weights of one that was trained before, for the same model.

        Raises:
            ModelError: its weights are of another kind or rank, or it is another model's.
        """
        extractor.check(self.base)
        theirs = dict(extractor.copies)
        for name, (a, b) in extractor.pairs.items():
            theirs |= {
                f"{name}.a": a,
                f"{name}.b": b.float() * (extractor.scale / self.config.scale),
            }
        own = {
            f"{name}.{part}": weight
            for name, change in self.changes.items()
            for part, weight in change.named_parameters()
            if weight.requires_grad
        }
        fits = {name: it.shape for name, it in theirs.items()} == {
            name: it.shape for name, it in own.items()
        }
        if extractor.init != self.config.init or not fits:
            raise ModelError(
                "the extractor to start from has another init, another rank, or copies where this one "
                "has none: train as it was trained, or start without it"
            )
        with torch.no_grad():
            self.shared.copy_(extractor.shared)
            for name, weight in own.items():
                weight.copy_(theirs[name])

    def losses(self, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Learner.losses`."""
        kvs = [self.composed(slots) for slots in _slots(samples)]
        return losses(self.reader.hf, samples, kvs, self.base.layer_windows)

    def objective(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The `terms`, each with its weight."""
        weighted = [getattr(self.config, name) * it for name, it in self.terms(samples).items()]
        return torch.stack(weighted).sum(0)

    def terms(self, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
        """What is taught with a weight that is not 0, by the weight's name: fp32 [B] each.

        "ce": the answer's cross-entropy; "kl", "kl_question": how far the reader is from what it says
        behind whole chunks, at the answer's tokens and at the question's; "reconstruction": see there.
        """
        config, windows = self.config, self.base.layer_windows
        kvs, asked = [self.composed(it) for it in _slots(samples)], config.kl_question > 0
        found: dict[str, torch.Tensor] = {}
        if config.reconstruction:
            found["reconstruction"] = reconstruction(self.reader.hf, samples, kvs, windows)
        if not config.ce and not config.kl and not asked:
            return found
        logits, answers, questions = online_logits(
            self.reader.hf, samples, kvs, windows, with_questions=asked
        )
        if config.ce:
            found["ce"] = nats(logits, answers)
        if not config.kl and not asked:
            return found
        teacher = self.teacher(samples, with_questions=asked)
        for name, where in (("kl", answers), ("kl_question", questions)):
            if getattr(config, name):
                found[name] = divergences(logits, teacher, where)
        return found

    @torch.no_grad()
    def teacher(self, samples: Sequence[Sample], *, with_questions: bool = False) -> torch.Tensor:
        """What the reader says behind the same chunks whole: logits as of `online_logits`."""
        wholes = [self.whole(slots) for slots in _slots(samples)]
        unpacked = [_behind(s, kv.shape[4]) for s, kv in zip(samples, wholes, strict=True)]
        windows = self.base.layer_windows
        return online_logits(
            self.reader.hf, unpacked, wholes, windows, with_questions=with_questions
        )[0]

    def save(self, folder: Path, noted: Mapping[str, Any]) -> None:
        """The extractor in the model's dtype, and what it belongs to."""
        dtype, changes = self.base.layout.dtype, self.changes.items()
        extractor = Extractor(
            base=base_of(self.base),
            init=self.config.init,
            shared=self.shared,
            scale=self.config.scale,
            pairs={
                name: (it.a.to(dtype), it.b.to(dtype))
                for name, it in changes
                if isinstance(it, _Changed)
            },
            copies={
                f"{name}.{part}": weight.to(dtype)
                for name, it in changes
                if isinstance(it, _Copied)
                for part, weight in it.named_parameters()
            },
            ratios=tuple(sorted(set(self.config.ratios))),
            overlap=self.config.overlap,
            digest="",
        )
        save_extractor(folder, extractor, {"adapter": self.reader.adapter, **noted})

    def composed(self, slots: Slots) -> torch.Tensor:
        """Head and slots as they are served, in the graph: [L, 2, 1, H, N, D]."""
        blocks = Blocks(ratio=slots.ratio, overlap=self.config.overlap)
        inputs = [
            slot_inputs(self.base, self.config.init, self.shared, ids, blocks)
            for ids in slots.chunks
        ]
        made = slot_entries(self.base, self.projecting, inputs, slots.entries, blocks)
        return placed(self.base, torch.cat((slots.head, *made))[None], np.array([slots.turns]))

    def whole(self, slots: Slots) -> torch.Tensor:
        """Head and whole chunks: [L, 2, 1, H, N, D]."""
        entries = torch.cat((slots.head, *slots.entries))
        return placed(self.base, entries[None], np.arange(len(entries))[None])


def _slots(samples: Sequence[Sample]) -> list[Slots]:
    return [sample.kv for sample in samples if isinstance(sample.kv, Slots)]


def _behind(sample: Sample, n_rows: int) -> Sample:
    """The sample right behind so many entries."""
    rows, at = range(n_rows), range(n_rows, n_rows + len(sample.ids))
    return replace(sample, rows=tuple(rows), at=tuple(at))
