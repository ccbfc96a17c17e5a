"""The only file that touches what transformers does not promise: caches, rotary modules, renames.

transformers 5.24 renames the argument `past_key_values` to `cache`; both are served here.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.rope import RopeTable
from coinrag_integrations.errors import UnsupportedModelError

__all__ = [
    "Cache",
    "capture",
    "next_logits",
    "prefix_cache",
    "read_layout",
    "read_rope",
    "read_window",
]

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROTARY_FUNCTION = "apply_rotary_pos_emb"
_TAP_LOCK = threading.RLock()


class _PrefixLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer of a prefix buffer: online tokens are written in place behind the entries."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values  # [B, H, N + room, D]
        self.length = length
        self.device, self.dtype = keys.device, keys.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stop = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : stop] = key_states
        self.values[:, :, self.length : stop] = value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.length


def prefix_cache(kv: torch.Tensor, length: int) -> Cache:
    """A prefix buffer as a transformers cache, without copying it.

    kv [L, 2, H, N + room, D]: the first `length` rows are valid, the model writes behind them. The
    position of the next token is `length`, which is what `generate()` and a plain call assume.
    """
    return Cache(layers=[_PrefixLayer(k[None], v[None], length) for k, v in kv.unbind(0)])


class _CaptureLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer while chunks are encoded: hands each key before RoPE, and each value, to `out`."""

    def __init__(
        self,
        out: torch.Tensor,
        before_rope: list[torch.Tensor],
        behind: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.out, self.before_rope, self.behind = out, before_rope, behind  # out [B, T, 2, H, D]
        self.n_behind = 0 if behind is None else behind[0].shape[-2]
        self.length = self.n_behind
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self.before_rope) != 1 or self.before_rope[0].shape != key_states.shape:
            raise UnsupportedModelError(
                f"the keys of a layer could not be seen before RoPE ({len(self.before_rope)} "
                "rotations before one cache update): this attention is not supported"
            )
        self.out[:, :, 0] = self.before_rope.pop().transpose(1, 2)  # [B, T, H, D]
        self.out[:, :, 1] = value_states.transpose(1, 2)
        self.length = self.n_behind + key_states.shape[-2]
        if self.behind is None:
            return key_states, value_states
        keys, values = (x.expand(key_states.shape[0], -1, -1, -1) for x in self.behind)
        return torch.cat((keys, key_states), -2), torch.cat((values, value_states), -2)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.length


def capture(
    model: PreTrainedModel, ids: torch.Tensor, out: torch.Tensor, behind: torch.Tensor | None = None
) -> None:
    """Run chunks through the model and write their keys (before RoPE) and values into `out`.

    ids [B, T], out [B, T, L, 2, H, D] in the model's dtype, behind [L, 2, H, P, D] or None: an
    already placed prefix that every chunk sees, its first token at position P. Rows behind a
    shorter chunk's end hold whatever the padding gave and are for the caller to drop.

    Raises:
        UnsupportedModelError: the model's attention does not rotate one key per cache update.
    """
    with _tap_keys(model) as before_rope, torch.inference_mode():
        layers = [
            _CaptureLayer(
                out[:, :, i],
                before_rope,
                None if behind is None else (behind[i, 0][None], behind[i, 1][None]),
            )
            for i in range(out.shape[2])
        ]
        body = model.base_model
        body(ids, use_cache=True, **{_cache_argument(body): Cache(layers=layers)})


@contextmanager
def _tap_keys(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """See the keys that the model's rotary function is about to turn, in this thread only.

    The function is a global of the model's module; it is put back on leaving, and the lock keeps
    two encoders from restoring each other's tap.
    """
    module = sys.modules[type(model).__module__]
    seen: list[torch.Tensor] = []
    owner = threading.get_ident()
    with _TAP_LOCK:
        original = getattr(module, _ROTARY_FUNCTION)

        def tapped(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == owner:
                seen.append(k)
            return original(q, k, *args, **kwargs)

        setattr(module, _ROTARY_FUNCTION, tapped)
        try:
            yield seen
        finally:
            setattr(module, _ROTARY_FUNCTION, original)


def next_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: Cache,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits after the last of `ids` [1, m] behind `cache`: fp32 [V]. Grows the cache by m rows."""
    arguments: dict[str, Any] = {_cache_argument(model): cache}
    if position_ids is not None:
        arguments["position_ids"] = position_ids
    with torch.inference_mode():
        logits = model(ids, use_cache=True, logits_to_keep=1, **arguments).logits
    return logits[0, -1].float()  # type: ignore[no-any-return]  # transformers outputs are untyped


def _cache_argument(model: PreTrainedModel) -> str:
    """What this version of transformers calls the cache argument."""
    return _cache_argument_of(type(model).forward)


@functools.cache
def _cache_argument_of(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def read_layout(model: PreTrainedModel) -> KVLayout:
    """Layers, KV heads and head dimension from the model's configuration.

    Raises:
        UnsupportedModelError: the configuration does not describe ordinary attention.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or getattr(config, "kv_lora_rank", None):
        raise _unsupported(model, "it does not use ordinary multi-head attention")
    return KVLayout(
        n_layers=config.num_hidden_layers,
        n_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
    )


def read_rope(model: PreTrainedModel, head_dim: int) -> RopeTable:
    """The frequencies of the model's own rotary module.

    Raises:
        UnsupportedModelError: learned or ALiBi positions, frequencies that change with the length,
            several rotary modules, or a rotation of only a part of each head.
    """
    if not hasattr(sys.modules[type(model).__module__], _ROTARY_FUNCTION):
        raise _unsupported(
            model,
            "it has no rotary position embedding (learned or ALiBi positions cannot be moved)",
        )
    modules = [m for m in model.modules() if hasattr(m, "rope_type")]
    if not modules:
        raise _unsupported(model, "it has no rotary module to read the frequencies from")
    if len(modules) != 1 or not isinstance(modules[0].rope_type, str):
        raise _unsupported(model, "its layers use different rotary frequencies")
    rotary = modules[0]
    if rotary.rope_type not in SUPPORTED_ROPE_TYPES:
        raise _unsupported(
            model,
            f"its RoPE type {rotary.rope_type!r} changes the frequencies with the length "
            f"(supported: {', '.join(SUPPORTED_ROPE_TYPES)})",
        )
    if "mrope_section" in (getattr(model.config, "rope_parameters", None) or {}):
        raise _unsupported(model, "its positions have several axes (M-RoPE)")
    inv_freq = rotary.inv_freq
    if 2 * inv_freq.numel() != head_dim:
        raise _unsupported(
            model, f"it rotates {2 * inv_freq.numel()} of the {head_dim} dimensions of a head"
        )
    return RopeTable(
        inv_freq=tuple(inv_freq.double().tolist()),
        attention_scaling=float(rotary.attention_scaling),
    )


def read_window(model: PreTrainedModel) -> int:
    """The longest context, in tokens, in which every layer sees every token.

    Raises:
        UnsupportedModelError: some layer's attention is neither full nor sliding.
    """
    config = model.config.get_text_config()
    window = int(config.max_position_embeddings)
    kinds = set(getattr(config, "layer_types", None) or ())
    strange = kinds - {"full_attention", "sliding_attention"}
    if strange:
        raise _unsupported(model, f"it has layers of type {', '.join(sorted(strange))}")
    sliding = getattr(config, "sliding_window", None)
    if sliding and (not kinds or "sliding_attention" in kinds):
        window = min(window, int(sliding))
    return window


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} is not supported: {reason}. Use a decoder with full RoPE, such as "
        "Llama, Qwen2, Qwen3 or Mistral"
    )
