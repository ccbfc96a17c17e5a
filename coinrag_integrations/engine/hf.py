"""What touches what transformers does not promise: caches, rotary modules, renames.

Its other parts are `hf_partial`, for rival methods, and `hf_training`; no other file does so.
transformers 5.24 renames the argument `past_key_values` to `cache`; both are served here.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from coinrag_integrations.errors import UnsupportedModelError

__all__ = [
    "Cache",
    "SeenKeys",
    "capture",
    "has_rotary_function",
    "next_logits",
    "observe_keys",
    "prefix_cache",
    "static_cache",
]

_ROTARY_FUNCTION = "apply_rotary_pos_emb"
_MASKABLE = ("sdpa", "eager")
_TAP_LOCK = threading.RLock()


# -- prefixes ----------------------------------------------------------------------------------


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

    kv [L, 2, B, H, N + room, D]: the first `length` rows are taken, the model writes behind them.
    """
    return Cache(layers=[_PrefixLayer(k, v, length) for k, v in kv.unbind(0)])


class _StaticLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer of a buffer of fixed shape: rows are written where a tensor says, all are returned."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, row: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.row = keys, values, row  # [B, H, N, D], row [m] int64
        self.device, self.dtype = keys.device, keys.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.row, key_states)
        self.values.index_copy_(2, self.row, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def static_cache(kv: Sequence[torch.Tensor], row: torch.Tensor) -> Cache:
    """Buffers of fixed shape as a cache that always returns all of their rows.

    kv: keys and values of each layer in turn, 2L tensors [B, H, N, D]. (Not one tensor: a compiler
    would copy all of it for every layer that writes into it.) The next m keys and values go to rows
    `row` [m]; what may be seen is up to the mask. No shape and no Python value changes from token to
    token, which compilers and CUDA graphs need.
    """
    layers = zip(kv[::2], kv[1::2], strict=True)
    return Cache(layers=[_StaticLayer(keys, values, row) for keys, values in layers])


def next_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: Cache,
    positions: torch.Tensor | None = None,
    visible: Mapping[int | None, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Logits after the last of `ids` [B, m] behind `cache`: fp32 [B, V]. See `last_logits`."""
    return last_logits(model, ids, cache, 1, positions, visible)[:, -1]


def last_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: Cache,
    n: int,
    positions: torch.Tensor | None = None,
    visible: Mapping[int | None, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Logits after each of the last n of `ids` [B, m] behind `cache`: fp32 [B, n, V].

    Grows the cache by m rows.

    positions [B, m] are those of `ids` (None: they follow the cache's rows); visible: for each of
    the model's windows a bool [B, 1, m, rows], true where a query sees a row (None: every row that
    is not behind it, which is transformers' own mask).

    Raises:
        UnsupportedModelError: the model's attention implementation takes no mask.
    """
    arguments: dict[str, Any] = {cache_argument(model): cache}
    if positions is not None:
        arguments["position_ids"] = positions
    if visible is not None:
        arguments["attention_mask"] = attention_mask(model, visible)
    with torch.no_grad():  # inference_mode cannot be compiled
        logits = model(ids, use_cache=True, logits_to_keep=n, **arguments).logits
    return logits[:, -n:].float()  # type: ignore[no-any-return]  # transformers outputs are untyped


def attention_mask(
    model: PreTrainedModel, visible: Mapping[int | None, torch.Tensor]
) -> torch.Tensor | dict[str, torch.Tensor]:
    """As the model's forward takes it: one mask, or one for each type of layer if they differ."""
    config = model.config.get_text_config()
    implementation = config._attn_implementation
    if implementation not in _MASKABLE:
        raise UnsupportedModelError(
            f"{type(model).__name__} was loaded with attn_implementation={implementation!r}, which "
            "takes no mask by position: load it with attn_implementation='sdpa'"
        )
    masks = dict(visible)
    if implementation == "eager":
        least = torch.finfo(model.dtype).min
        masks = {
            window: torch.zeros_like(mask, dtype=model.dtype).masked_fill_(~mask, least)
            for window, mask in masks.items()
        }
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {
        "full_attention" if window is None else "sliding_attention": mask
        for window, mask in masks.items()
    }


# -- keys before RoPE --------------------------------------------------------------------------


class _CaptureLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer while chunks are encoded: hands each key before RoPE, and each value, to `out`."""

    def __init__(
        self,
        out: torch.Tensor,
        tap: list[torch.Tensor],
        turns: bool,
        behind: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        super().__init__()
        self.out, self.tap, self.turns, self.behind = out, tap, turns, behind  # out [B, T, 2, H, D]
        self.n_behind = 0 if behind is None else behind[0].shape[-2]
        self.length = self.n_behind
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.out[:, :, 0] = kept_keys(self.tap, key_states, self.turns).transpose(1, 2)
        self.out[:, :, 1] = value_states.transpose(1, 2)
        self.length = self.n_behind + key_states.shape[-2]
        if self.behind is None:
            return key_states, value_states
        keys, values = (x.expand(key_states.shape[0], -1, -1, -1) for x in self.behind)
        return torch.cat((keys, key_states), -2), torch.cat((values, value_states), -2)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.length


def capture(
    model: PreTrainedModel,
    ids: torch.Tensor,
    out: torch.Tensor,
    turns: Sequence[bool],
    behind: torch.Tensor | None = None,
) -> None:
    """Run chunks through the model and write their keys (before RoPE) and values into `out`.

    ids [B, T], out [B, T, L, 2, H, D] in the model's dtype, turns [L]: which layers rotate at all,
    behind [L, 2, 1, H, P, D] or None: an already placed prefix that every chunk sees, its first
    token at position P. Rows behind a shorter chunk's end hold whatever the padding gave and are
    for the caller to drop.

    Raises:
        UnsupportedModelError: the model's attention does not rotate one key per cache update.
    """
    with tap_keys(model) as tap, torch.inference_mode():
        layers = [
            _CaptureLayer(
                out[:, :, i],
                tap,
                turns[i],
                None if behind is None else (behind[i, 0], behind[i, 1]),
            )
            for i in range(out.shape[2])
        ]
        body = model.base_model
        body(ids, use_cache=True, **{cache_argument(body): Cache(layers=layers)})


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """One layer's keys [T, H, D] as they went into RoPE (None: it has none) and as they came out."""

    before: torch.Tensor | None
    after: torch.Tensor


class _WatchLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer that keeps its keys for us to look at."""

    def __init__(self, tap: list[torch.Tensor]) -> None:
        super().__init__()
        self.tap, self.is_initialized = tap, True
        self.seen: SeenKeys | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = _before_rope(self.tap, key_states)
        self.seen = SeenKeys(
            before=None if before is None else before[0].transpose(0, 1).clone(),
            after=key_states[0].transpose(0, 1).clone(),
        )
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def observe_keys(model: PreTrainedModel, n_layers: int, positions: Sequence[int]) -> list[SeenKeys]:
    """Every layer's keys, before and after RoPE, for a few arbitrary tokens at `positions`.

    Raises:
        UnsupportedModelError: the model's attention does not rotate one key per cache update.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.tensor([[(7919 * i + 11) % vocabulary for i in positions]], device=model.device)
    where = torch.tensor([list(positions)], device=model.device)
    with tap_keys(model) as tap, torch.inference_mode():
        layers = [_WatchLayer(tap) for _ in range(n_layers)]
        body = model.base_model
        cache = {cache_argument(body): Cache(layers=layers)}
        body(ids, use_cache=True, position_ids=where, **cache)
    seen = [layer.seen for layer in layers if layer.seen is not None]
    if len(seen) != n_layers:
        raise UnsupportedModelError("some layers keep no keys and values")
    return seen


def has_rotary_function(model: PreTrainedModel) -> bool:
    """Whether the model's module has the function that we stand in for."""
    return hasattr(sys.modules[type(model).__module__], _ROTARY_FUNCTION)


def kept_keys(tap: list[torch.Tensor], key_states: torch.Tensor, turns: bool) -> torch.Tensor:
    """The keys of a layer before RoPE, which is to have turned them or not: what a store keeps.

    Raises:
        UnsupportedModelError: it did otherwise.
    """
    before = _before_rope(tap, key_states)
    if (before is not None) != turns:
        raise UnsupportedModelError(
            "a layer turned its keys although it was seen not to, or the other way round: this "
            "attention is not supported"
        )
    return key_states if before is None else before


def _before_rope(tap: list[torch.Tensor], key_states: torch.Tensor) -> torch.Tensor | None:
    """The keys that became `key_states`: what was tapped, and the dimensions that were not turned."""
    if not tap:
        return None
    before = tap.pop()
    width = before.shape[-1]
    if tap or before.shape[:-1] != key_states.shape[:-1] or width > key_states.shape[-1]:
        tap.clear()
        raise UnsupportedModelError(
            "the keys of a layer could not be seen before RoPE: this attention is not supported"
        )
    if width == key_states.shape[-1]:
        return before
    return torch.cat((before, key_states[..., width:]), dim=-1)


@contextmanager
def tap_keys(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def cache_argument(model: PreTrainedModel) -> str:
    """What this version of transformers calls the cache argument."""
    return _cache_argument_of(type(model).forward)


@functools.cache
def _cache_argument_of(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
