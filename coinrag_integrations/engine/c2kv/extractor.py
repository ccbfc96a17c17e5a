"""The weights of C2KV's slots: a frozen model's projections, changed or copied, and one embedding.

Only queries, keys and values of slots are projected by other weights; all else is the model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from coinrag_integrations.engine.adapter import Adapter, with_adapter, with_weights
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.errors import ConfigError, ModelError, UnsupportedModelError
from coinrag_integrations.files import write_tensors, write_text

CONFIG_FILE, WEIGHTS_FILE = "coinrag_c2kv.json", "c2kv.safetensors"
# What a slot's input embedding is, beside the shared vector: that of its block's last token, nothing (the
# vector starts as the embedding of EOS, as in the paper), or the mean of its block's (residual
# "embed-mean" of the paper's code).
Init = Literal["last", "eos", "mean"]
# As families call the layers that make queries, keys and values; some make all three at once.
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")
_SHARED = "shared"
_COPIED = (".weight", ".bias")
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extractor:
    """What turns blocks of a document into slots, for one model.

    `shared` [hidden] fp32 is added to every slot's input embedding (see `Init`); `pairs` has A [r, in] and
    B [out, r] for the names of projections, to be added as scale * B A; `copies` has whole parameters in
    place of the model's, by their names (`<projection>.weight`, `.bias`), as in the paper. Neither, if
    it is untrained. `base` is the hash of the weights and the dtype that it belongs to, `ratios` what it
    was trained for, `overlap` see `Blocks`. `digest` names all of it.
    """

    base: tuple[str, str]
    init: Init
    shared: torch.Tensor
    scale: float
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    copies: Mapping[str, torch.Tensor]
    ratios: tuple[int, ...]
    overlap: int
    digest: str

    @classmethod
    def untrained(cls, model: LoadedModel, *, init: Init = "last", overlap: int = 0) -> Extractor:
        """Slots as the model itself projects them: what training begins with.

        Raises:
            ConfigError: no such `init`.
        """
        return cls(
            base=base_of(model),
            init=init,
            shared=first_embedding(model, init),
            scale=1.0,
            pairs={},
            copies={},
            ratios=(),
            overlap=overlap,
            digest=f"untrained:{init}:{overlap}",
        )

    @classmethod
    def load(cls, folder: str | Path, model: LoadedModel) -> Extractor:
        """Read a folder that `save_extractor` wrote.

        Raises:
            ModelError: there is none that can be read, or it was trained for another model.
        """
        folder = Path(folder).expanduser()
        try:
            noted = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            content = (folder / WEIGHTS_FILE).read_bytes()
            tensors = load(content)
            shared = tensors.pop(_SHARED).float()
            copies = {name: tensors.pop(name) for name in sorted(tensors) if name.endswith(_COPIED)}
            names = {name.rpartition(".")[0] for name in tensors}
            pairs = {name: (tensors.pop(f"{name}.a"), tensors.pop(f"{name}.b")) for name in names}
            if tensors or any(a.shape[0] != b.shape[1] for a, b in pairs.values()):
                raise ValueError("matrices that do not belong together")
            meaning = {key: noted[key] for key in ("init", "scale", "overlap")}
            extractor = cls(
                base=(str(noted["weights"]), str(noted["dtype"])),
                init=_known(noted["init"]),
                shared=shared,
                scale=float(noted["scale"]),
                pairs=dict(sorted(pairs.items())),
                copies=copies,
                ratios=tuple(map(int, noted["ratios"])),
                overlap=int(noted["overlap"]),
                digest=xxhash.xxh3_128(
                    content + json.dumps(meaning, sort_keys=True).encode()
                ).hexdigest(),
            )
        except (*_UNREADABLE, IndexError) as error:
            raise ModelError(
                f"there is no C2KV extractor in {folder} that can be read ({type(error).__name__}: "
                f"{error}): expected {CONFIG_FILE} and {WEIGHTS_FILE}, as `coinrag train c2kv` writes them"
            ) from error
        extractor.check(model, f"the C2KV extractor in {folder}")
        return extractor

    def check(self, model: LoadedModel, what: str = "the C2KV extractor") -> None:
        """Whether it belongs to a model.

        Raises:
            ModelError: it does not.
        """
        weights, dtype = self.base
        # Rounded to another dtype, the same weights have another hash.
        if dtype == str(model.layout.dtype) and weights != model.weights:
            raise ModelError(
                f"{what} was trained for other weights than those of {model.name!r}: use the model "
                "that it was trained for, or train it anew"
            )
        theirs = {_SHARED: first_embedding(model, "eos").shape}
        for layer, module in projections(model).items():
            theirs |= {f"{layer}.{part}": it.shape for part, it in module.named_parameters()}
        ours = {_SHARED: self.shared.shape} | {name: it.shape for name, it in self.copies.items()}
        shapes = {name: torch.Size((len(b), a.shape[1])) for name, (a, b) in self.pairs.items()}
        ours |= {f"{name}.weight": shape for name, shape in shapes.items()}
        for name, shape in ours.items():
            if theirs.get(name) != shape:
                other = theirs.get(name)
                has = "the model has none" if other is None else f"the model's {tuple(other)}"
                raise ModelError(
                    f"{what} does not fit {model.name!r}: {name} is {tuple(shape)}, {has}; use the "
                    "model that it was trained for"
                )

    def merged(self, model: LoadedModel) -> LoadedModel:
        """What computes slots: the model with the copies and changes in it, all else shared."""
        if self.copies:
            model = with_weights(model, self.copies, self.digest)
        if not self.pairs:
            return model
        changes = Adapter(
            folder=Path("C2KV"),
            digest=self.digest,
            scale=self.scale,
            pairs=self.pairs,
            base=self.base,
        )
        return with_adapter(model, changes)


def projections(model: LoadedModel) -> dict[str, nn.Linear]:
    """The layers that make queries, keys and values, by name.

    Raises:
        UnsupportedModelError: there are none whose names are known.
    """
    found = {
        name: module
        for name, module in model.hf.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in _PROJECTIONS
    }
    if not found:
        raise UnsupportedModelError(
            f"{model.name!r} has no projections called {', '.join(_PROJECTIONS)}: C2KV cannot tell its "
            "queries, keys and values"
        )
    return found


def base_of(model: LoadedModel) -> tuple[str, str]:
    """What an extractor belongs to: the weights' hash, and their dtype."""
    return model.weights, str(model.layout.dtype)


def first_embedding(model: LoadedModel, init: Init) -> torch.Tensor:
    """The shared vector before any training: fp32 [hidden] on the model's device.

    Raises:
        ConfigError: no such `init`.
    """
    _known(init)
    eos = model.tokenizer.hf.eos_token_id
    end = int(eos) if eos is not None else min(model.stop_ids, default=0)
    with torch.no_grad():
        embeddings = model.hf.get_input_embeddings()
        vector = embeddings(torch.tensor([end], device=model.device))[0].float()
    return vector if init == "eos" else torch.zeros_like(vector)


def save_extractor(folder: Path, extractor: Extractor, noted: Mapping[str, Any]) -> None:
    """Write an extractor; `noted` goes beside what it needs."""
    tensors = {_SHARED: extractor.shared.detach().float().cpu().contiguous()}
    for name, (a, b) in extractor.pairs.items():
        tensors[f"{name}.a"] = a.detach().cpu().contiguous()
        tensors[f"{name}.b"] = b.detach().cpu().contiguous()
    for name, copied in extractor.copies.items():
        tensors[name] = copied.detach().cpu().contiguous()
    weights, dtype = extractor.base
    owner = {
        "weights": weights,
        "dtype": dtype,
        "init": extractor.init,
        "scale": extractor.scale,
        "rank": next((a.shape[0] for a, _ in extractor.pairs.values()), 0),
        "ratios": list(extractor.ratios),
        "overlap": extractor.overlap,
    }
    write_tensors(folder / WEIGHTS_FILE, tensors)
    write_text(folder / CONFIG_FILE, json.dumps({**owner, **noted}, indent=1) + "\n")


def _known(init: str) -> Init:
    for name in get_args(Init):
        if name == init:
            return name  # type: ignore[no-any-return]  # mypy takes it for any value
    raise ConfigError(f"init is {init!r}: use one of {', '.join(get_args(Init))}")
