"""What is trained: LoRA weights, all weights, link embeddings. Knows no optimiser and no examples."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.adapter import BASE_FILE, WEIGHTS_FILE
from coinrag_integrations.engine.c2kv import Extractor
from coinrag_integrations.engine.links import line_breaks, save_links, with_links
from coinrag_integrations.errors import ConfigError, ModelError
from coinrag_integrations.files import share_all, write_tensors, write_text
from coinrag_integrations.training.batches import composed, losses
from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.training.samples import Sample, Slots, Source
from coinrag_integrations.training.slots import SlotLearner

RECORD_FILE = "coinrag_training.json"


class Learner(Protocol):
    """Weights, the losses under them, and how they are written.

    `reader` computes what stands behind cached KV.
    """

    weights: list[nn.Parameter]
    reader: LoadedModel

    def losses(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Mean nats a token of each sample's answer: fp32 [B]."""
        ...

    def objective(self, samples: Sequence[Sample]) -> torch.Tensor:
        """What is made small: the losses, and what else is to be learnt: fp32 [B]."""
        ...

    def save(self, folder: Path, noted: Mapping[str, Any]) -> None:
        """Write the weights as they are served, with `noted` beside them."""
        ...


def make_learner(
    model: LoadedModel,
    config: ReaderConfig,
    reader: LoadedModel | None,
    start: Extractor | None = None,
) -> Learner:
    """What a config trains of a base model; `reader` (the model with an adapter) for links and slots.

    `start` is an extractor whose weights slots begin with.

    Raises:
        ConfigError: a start is given to what is no extractor.
        ModelError: peft is needed and not installed, the model has no linear layers that it knows, or the
            start has weights of another kind.
    """
    if config.kind == "c2kv":
        learner = SlotLearner(model, config, reader or model)
        if start is not None:
            learner.start_from(start)
        return learner
    if start is not None:
        raise ConfigError(
            f"an extractor to start from is given to kind={config.kind!r}: leave it out"
        )
    if config.kind == "links":
        return _Links(model, config, reader or model)
    return _Full(model, config) if config.kind == "full" else _Lora(model, config)


class _Lora:
    """LoRA on all linear layers but the head; shares the base's parameters."""

    def __init__(self, model: LoadedModel, config: ReaderConfig) -> None:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ModelError(
                f"training needs peft: pip install 'coinrag-integrations[train]' ({error})"
            ) from error
        shared = {id(it): it for it in (*model.hf.parameters(), *model.hf.buffers())}
        lora = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules="all-linear",
            bias="none",
            task_type="CAUSAL_LM",
        )
        self.reader = model
        self.peft = get_peft_model(copy.deepcopy(model.hf, shared), lora)
        self.weights = [p for p in self.peft.parameters() if p.requires_grad]

    def losses(self, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Learner.losses`."""
        return losses(self.peft, samples, _kvs(samples), self.reader.layer_windows)

    objective = losses

    def save(self, folder: Path, noted: Mapping[str, Any]) -> None:
        """The adapter as peft writes it, in the model's dtype, and what it belongs to."""
        from safetensors.torch import load_file

        self.peft.peft_config["default"].base_model_name_or_path = self.reader.name
        self.peft.save_pretrained(folder)
        path = folder / WEIGHTS_FILE
        dtype = self.reader.layout.dtype
        write_tensors(path, {k: v.to(dtype) for k, v in load_file(path).items()})
        owner = {"weights": self.reader.weights, "dtype": str(dtype)}
        write_text(folder / BASE_FILE, json.dumps({**owner, **noted}, indent=1) + "\n")


class _Full:
    """All weights, in fp32: steps this small would be lost in the rounding of anything less.

    Passes are computed in bf16 where the model is not fp32.
    """

    def __init__(self, model: LoadedModel, config: ReaderConfig) -> None:
        self.base, self.through_cache = model, config.through_cache
        trained = copy.deepcopy(model.hf).float().requires_grad_(True)
        self.reader = replace(model, hf=trained)
        self.weights = list(trained.parameters())

    def losses(self, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Learner.losses`."""
        low = self.base.layout.dtype != torch.float32
        with torch.autocast(self.base.device.type, torch.bfloat16, enabled=low):
            kvs = [self._kv(sample.kv) for sample in samples]
            return losses(self.reader.hf, samples, kvs, self.base.layer_windows)

    objective = losses

    def save(self, folder: Path, noted: Mapping[str, Any]) -> None:
        """The model as transformers writes it, in its own dtype, with its tokenizer."""
        model = copy.deepcopy(self.base.hf)
        model.load_state_dict(self.reader.hf.state_dict())
        model.save_pretrained(folder)
        share_all(folder)
        self.base.tokenizer.hf.save_pretrained(folder)
        owner = {"base": self.base.weights, "dtype": str(self.base.layout.dtype)}
        write_text(folder / RECORD_FILE, json.dumps({**owner, **noted}, indent=1) + "\n")

    def _kv(self, kv: torch.Tensor | Source | Slots) -> torch.Tensor:
        if isinstance(kv, torch.Tensor):
            return kv
        if isinstance(kv, Slots):
            raise TypeError("slots are made by their own learner")
        with nullcontext() if self.through_cache else torch.no_grad():
            return composed(self.reader, kv)


class _Links:
    """The embeddings of link tokens, which begin as line breaks; all else is frozen."""

    def __init__(self, model: LoadedModel, config: ReaderConfig, reader: LoadedModel) -> None:
        self.beside, self.windows = reader, model.layer_windows
        self.links = nn.Parameter(line_breaks(reader, config.n_links))
        self.reader = with_links(reader, self.links)
        self.weights = [self.links]
        for weight in self.reader.hf.parameters():
            weight.requires_grad_(weight is self.links)

    def losses(self, samples: Sequence[Sample]) -> torch.Tensor:
        """See `Learner.losses`."""
        return losses(self.reader.hf, samples, _kvs(samples), self.windows)

    objective = losses

    def save(self, folder: Path, noted: Mapping[str, Any]) -> None:
        """The embeddings, and what they belong to."""
        save_links(folder, self.links, self.beside, dict(noted))


def _kvs(samples: Sequence[Sample]) -> list[torch.Tensor]:
    return [sample.kv for sample in samples if isinstance(sample.kv, torch.Tensor)]
