"""The second half of `hf`: some rows of some layers, and attention in two parts.

Touches what transformers does not promise, as `hf` does, for rival methods that `evaluation` compares
with; nothing of the engine needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from coinrag_integrations.engine.hf import last_logits
from coinrag_integrations.errors import UnsupportedModelError

# What a decoder layer is given for each of its rows, and the axis of the rows.
_BY_ROW = {
    "attention_mask": -2,
    "position_ids": -1,
    "position_embeddings": -2,
    "cache_position": -1,
}
_SDPA = "sdpa"
_LOCK = threading.RLock()


# -- fewer rows in later layers ----------------------------------------------------------------


class _Rows:
    """Which rows of the pass are computed: all, until some are chosen."""

    def __init__(self, first: int, n_cached: int, n_chosen: int, n_rows: int) -> None:
        self.first, self.n_cached, self.n_chosen, self.n_rows = first, n_cached, n_chosen, n_rows
        self.kept: torch.Tensor | None = None  # [m], sorted

    def choose(self, fresh: torch.Tensor, cached: torch.Tensor) -> None:
        """Keep the rows whose values [1, H, m, D] deviate most, and all that nothing was cached of."""
        n = self.n_cached
        deviation = (fresh[0, :, :n].float() - cached[0, :, :n].float()).square().sum((0, 2))
        chosen = deviation.topk(self.n_chosen).indices.sort().values
        rest = torch.arange(n, self.n_rows, device=chosen.device)
        self.kept = torch.cat((chosen, rest))


class _BlendLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer of a buffer in which rows are computed anew; layer `is_judge` chooses which."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, rows: _Rows, is_judge: bool
    ) -> None:
        super().__init__()
        self.keys, self.values, self.rows, self.is_judge = keys, values, rows, is_judge
        self.device, self.dtype = keys.device, keys.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, kept = self.rows.first, self.rows.kept
        if self.is_judge:
            self.rows.choose(value_states, self.values[:, :, first:])
        if kept is None:
            self.keys[:, :, first:], self.values[:, :, first:] = key_states, value_states
        else:
            self.keys.index_copy_(2, first + kept, key_states)
            self.values.index_copy_(2, first + kept, value_states)
        return self.keys, self.values

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def blend(
    model: PreTrainedModel,
    ids: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    visible: Mapping[int | None, torch.Tensor],
    *,
    n_cached: int,
    n_chosen: int,
    n: int,
) -> torch.Tensor:
    """Recompute part of a prefix with the text behind it; logits after the last n tokens: fp32 [n, V].

    ids [1, m] are the tokens of the last m rows of kv [L, 2, 1, H, N, D], positions [1, m] theirs,
    visible as for `hf.last_logits`. The first `n_cached` of the m rows hold cached entries.

    Layers 0 and 1 compute all m tokens. Of the cached ones, the `n_chosen` whose values in layer 1
    changed most (sum of squares) go on, with all that were not cached; what they give overwrites their
    rows of kv. (CacheBlend also leaves out attention and MLP of layer 1 for tokens that go no further.)

    Raises:
        UnsupportedModelError: the model has no list of layers, or its attention takes no mask.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) != len(kv):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {len(kv)} layers: rows cannot be left out of some"
        )
    rows = _Rows(kv.shape[4] - ids.shape[1], n_cached, n_chosen, ids.shape[1])
    cache = Cache(layers=[_BlendLayer(k, v, rows, i == 1) for i, (k, v) in enumerate(kv.unbind(0))])
    hooks = [
        layer.register_forward_pre_hook(partial(_leave_out, rows), with_kwargs=True)
        for layer in layers[2:]
    ]
    try:
        return last_logits(model, ids, cache, n, positions, visible)[0]
    finally:
        for hook in hooks:
            hook.remove()


def _leave_out(
    rows: _Rows, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a layer: of its input, and of what it is told of its rows, those that are kept."""
    assert rows.kept is not None  # layer 1 has run
    hidden, *others = args
    if hidden.shape[1] == rows.n_rows:  # the first layer after the choice
        hidden = hidden.index_select(1, rows.kept)
    told = {
        name: _take(value, _BY_ROW[name], rows.kept) if name in _BY_ROW else value
        for name, value in kwargs.items()
    }
    return (hidden, *others), told


def _take(value: Any, axis: int, kept: torch.Tensor) -> Any:
    if isinstance(value, tuple):  # cosine and sine
        return tuple(_take(part, axis, kept) for part in value)
    return value.index_select(axis, kept) if isinstance(value, torch.Tensor) else value


# -- attention in two parts --------------------------------------------------------------------


@contextmanager
def attention_apart(
    model: PreTrainedModel, rows: slice, temperature: float, scale: float
) -> Iterator[None]:
    """Within the block, and in this thread, the model attends to `rows` of its cache apart (APE).

    Their logits are divided by the temperature; the two parts are joined by their log-sum-exps, that
    of `rows` times scale and temperature. Computed in fp32 with explicit softmax, without the softcap
    that sdpa leaves out as well.

    Raises:
        UnsupportedModelError: the model was not loaded with attn_implementation='sdpa'.
    """
    if model.config.get_text_config()._attn_implementation != _SDPA:
        raise UnsupportedModelError(
            "attention in two parts stands in for sdpa: load the model with "
            "attn_implementation='sdpa'"
        )
    owner = threading.get_ident()
    with _LOCK:
        original: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[_SDPA]

        def attend(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return original(module, *args, **kwargs)
            return _two_parts(rows, temperature, scale, module, *args, **kwargs)

        ALL_ATTENTION_FUNCTIONS.register(_SDPA, attend)
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS.register(_SDPA, original)


def _two_parts(
    rows: slice,
    temperature: float,
    scale: float,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Query [B, G*H, m, D], key and value [B, H, N, D] -> [B, m, G*H, D], as transformers' functions."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query.float() @ keys.transpose(-1, -2) * scaling  # [B, G*H, m, N]
    m, n = logits.shape[-2:]
    if attention_mask is None:  # the last m of n rows, causal
        attention_mask = torch.ones(m, n, dtype=torch.bool, device=logits.device).tril(n - m)
    if attention_mask.dtype is torch.bool:
        logits = logits.masked_fill(~attention_mask, -torch.inf)
    else:
        logits = logits + attention_mask
    inside = torch.zeros(n, dtype=torch.bool, device=logits.device)
    inside[rows] = True
    least = torch.finfo(torch.float32).min  # where a part is empty, exp(-inf - least) is 0
    contexts = logits.masked_fill(~inside, -torch.inf) / temperature
    others = logits.masked_fill(inside, -torch.inf)
    sums = [x.logsumexp(-1, keepdim=True) for x in (contexts, others)]
    chances = [
        (x - s.clamp_min(least)).exp() for x, s in zip((contexts, others), sums, strict=True)
    ]
    weights = torch.cat((sums[0] * (scale * temperature), sums[1]), dim=-1).softmax(-1)
    joined = weights[..., :1] * chances[0] + weights[..., 1:] * chances[1]
    return (joined @ values).transpose(1, 2).to(query.dtype).contiguous(), None
