"""Reader adapters: LoRA weights for what is computed online. Cached KV is the base model's.

A folder in peft's form (adapter_config.json, adapter_model.safetensors) is merged into copies of the
linear layers it names; everything else is shared with the base model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from coinrag_integrations.engine import packed
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.errors import ModelError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# What the weights belong to; written by our training beside peft's own files.
BASE_FILE = "coinrag_adapter.json"
_PREFIX = "base_model.model."
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    SafetensorError,
)
# Settings of peft that change what the weights mean, with the only values that are served.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none",),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA weights: for a module's name A [r, in] and B [out, r], to be added as scale * B A.

    `digest` names their bytes. `base` is the hash of the weights and the dtype that they were trained
    over (`LoadedModel.weights`), where that is known.
    """

    folder: Path
    digest: str
    scale: float
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    base: tuple[str, str] | None

    @classmethod
    def load(cls, folder: str | Path) -> Adapter:
        """Read a folder.

        Raises:
            ModelError: it is not there, damaged, or no plain LoRA.
        """
        folder = Path(folder).expanduser()
        try:
            config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            tensors = load_file(folder / WEIGHTS_FILE)
            base = folder / BASE_FILE
            owner = json.loads(base.read_text(encoding="utf-8")) if base.exists() else {}
            for key, served in _PLAIN.items():
                if config.get(key, served[0]) not in served:
                    raise ModelError(
                        f"the adapter {folder} has {key}={config[key]!r}: only plain LoRA is served"
                    )
            rank = int(config["r"])
            scale = float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)
            pairs = _pairs(tensors)
            known = (str(owner["weights"]), str(owner["dtype"])) if owner else None
        except _UNREADABLE as error:
            raise ModelError(
                f"there is no adapter in {folder} that can be read ({type(error).__name__}: {error}): "
                f"expected {CONFIG_FILE} and {WEIGHTS_FILE} as peft writes them"
            ) from error
        digest = xxhash.xxh3_128((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
        return cls(
            folder=folder, digest=f"{digest}:{scale:g}", scale=scale, pairs=pairs, base=known
        )


def with_adapter(model: LoadedModel, adapter: Adapter) -> LoadedModel:
    """The model with the adapter merged in. Shares every parameter that the adapter leaves alone.

    Raises:
        ModelError: the adapter belongs to another model.
    """
    dtype = str(model.layout.dtype)
    if (
        adapter.base is not None
        and adapter.base != (model.weights, dtype)
        and adapter.base[1] == dtype
    ):
        raise ModelError(
            f"the adapter {adapter.folder} was trained over other weights than those of {model.name!r}: "
            "use the model that it was trained for, or train it anew"
        )
    modules, changed = dict(model.hf.named_modules()), {}
    embeddings = model.hf.get_input_embeddings().weight
    for name, (a, b) in adapter.pairs.items():
        module, shape = modules.get(name), (b.shape[0], a.shape[1])
        fits = isinstance(module, nn.Linear) and module.weight.shape == shape
        if not isinstance(module, nn.Linear) or not fits or module.weight is embeddings:
            raise ModelError(
                f"the adapter {adapter.folder} does not fit {model.name!r}, which has no linear layer "
                f"{name!r} of {shape} with weights of its own: use the model that it was trained for"
            )
        weight = module.weight
        with torch.no_grad():
            change = adapter.scale * (b.to(weight.device).float() @ a.to(weight.device).float())
            changed[f"{name}.weight"] = (weight.float() + change).to(weight.dtype)
    return with_weights(model, changed, adapter.digest)


def with_weights(
    model: LoadedModel, weights: Mapping[str, torch.Tensor], digest: str
) -> LoadedModel:
    """The model with other weights for some of its parameters, by name. Shares every other one."""
    own = dict(model.hf.named_parameters())
    shared: dict[int, Any] = {id(it): it for it in (*own.values(), *model.hf.buffers())}
    for name, weight in weights.items():
        shared[id(own[name])] = nn.Parameter(weight.to(own[name]), requires_grad=False)
    reader = copy.deepcopy(model.hf, shared).eval()
    if packed.is_packed(model.hf):
        packed.pack_linears(reader)
    return replace(model, hf=reader, adapter=digest)


def _pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of every module."""
    a: dict[str, torch.Tensor] = {}
    b: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.removeprefix(_PREFIX).rpartition(".lora_")
        if kind not in ("A.weight", "B.weight") or tensor.ndim != 2:
            raise ValueError(f"{key!r} is no matrix of a LoRA")
        (a if kind[0] == "A" else b)[name] = tensor
    if not a or a.keys() != b.keys() or any(a[n].shape[0] != b[n].shape[1] for n in a):
        raise ValueError("the matrices A and B do not belong together")
    return {name: (a[name], b[name]) for name in a}
