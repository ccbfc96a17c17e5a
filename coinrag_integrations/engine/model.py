"""Load a causal language model and describe what the engine needs to know of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import xxhash
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from coinrag_integrations.engine import describe, packed
from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.layout import DTYPES, KVLayout, dtype_name
from coinrag_integrations.engine.rope import RopeTable
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import ConfigError, ModelError

logger = logging.getLogger(__name__)

DType = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to encode and to answer.

    `window` is the longest context in tokens, `layer_windows` how far back its different layers see
    (None: to the beginning), `stop_ids` every id that ends an answer,
    `weights` a hash of all parameters as they lie in memory, `adapter` the digest of one that is merged
    into `hf` (see `adapter.with_adapter`).
    """

    name: str
    hf: PreTrainedModel
    tokenizer: TextTokenizer
    layout: KVLayout
    rope: RopeTable
    window: int
    layer_windows: tuple[int | None, ...]
    stop_ids: frozenset[int]
    weights: str
    adapter: str | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return torch.device(self.hf.device)

    def fingerprint(self, context: str = "alone", codec: str = "none") -> Fingerprint:
        """Everything that the bytes of chunks depend on which it encodes, in that context and codec."""
        return Fingerprint(
            weights=self.weights,
            tokenizer=self.tokenizer.digest,
            rope=self.rope.digest,
            layout=str(self.layout),
            dtype=dtype_name(self.layout.dtype),
            context=context,
            codec=codec,
        )


def load_model(
    name: str | Path, *, dtype: DType = "auto", device: str = "auto", pack: bool | None = None
) -> LoadedModel:
    """Load a local folder or a hub name.

    `pack` keeps a second copy of the linear layers' weights on a CPU, laid out for short inputs (see
    `packed`); None: where oneDNN can and the copy takes less than 2 GiB.

    Raises:
        ModelError: there is no such model, or it cannot be fetched or read.
        UnsupportedModelError: its attention or positions cannot be handled.
        ConfigError: the device or dtype is not known here, or packing was asked for and cannot be.
    """
    place = choose_device(device)
    folder = Path(name).expanduser()
    is_path = folder.exists() or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1
    if is_path and not (folder / "config.json").is_file():
        raise ModelError(
            f"no model at {folder}: expected a folder with config.json, weights and tokenizer.json"
        )
    source, wanted = str(folder) if is_path else str(name), choose_dtype(dtype, place)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=wanted)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"cannot load the model {source!r}: {_first_line(error)}. Give a local folder, or a "
            "hub name that this machine can reach"
        ) from error
    described = describe_model(str(name), model.to(place).eval(), tokenizer)
    if pack is None:
        pack = packed.can_pack(model) and packed.packed_bytes(model) <= packed.AUTO_BYTES
    if pack:
        if not packed.can_pack(model):
            raise ConfigError(
                f"pack=True: oneDNN does not multiply {model.dtype} on {model.device}; leave it out"
            )
        packed.pack_linears(model)
    return described


def describe_model(name: str, model: PreTrainedModel, tokenizer: Tokenizer) -> LoadedModel:
    """Wrap a model that is already in memory.

    Raises:
        UnsupportedModelError: its attention or positions cannot be handled.
    """
    layer_windows = describe.read_layer_windows(model)
    layout, rope = describe.read_cache(model)
    return LoadedModel(
        name=name,
        hf=model,
        tokenizer=TextTokenizer(tokenizer),
        layout=layout,
        rope=rope,
        window=describe.read_window(model),
        layer_windows=layer_windows,
        stop_ids=_stop_ids(model, tokenizer),
        weights=hash_weights(model),
    )


def choose_device(device: str) -> torch.device:
    """The first GPU if there is one, or what was asked for.

    Raises:
        ConfigError: no such device on this machine.
    """
    if device == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is not known: use 'auto', 'cpu' or 'cuda'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} is not there: torch sees no GPU; use 'cpu' or 'auto'")
    return chosen


def choose_dtype(dtype: DType, device: torch.device) -> torch.dtype:
    """bf16 where the hardware multiplies it, else fp16 on a GPU and fp32 on a CPU.

    Raises:
        ConfigError: the name is none of the three.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    features = torch.cpu.get_capabilities()
    fast = features.get("amx_bf16") or features.get("avx512_bf16") or features.get("bf16")
    return torch.bfloat16 if device.type == "cpu" and fast else torch.float32


def hash_weights(model: PreTrainedModel) -> str:
    """A 128-bit hash over names, shapes and bytes of all parameters and buffers that are saved."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().contiguous().cpu().reshape(-1)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def _stop_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    ids: set[int] = set()
    for value in (
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        ids.update(value if isinstance(value, (list, tuple)) else () if value is None else (value,))
    return frozenset(ids)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
