"""The third part of `hf`: passes that gradients flow through. For training, and C2KV's slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from coinrag_integrations.engine.hf import attention_mask, cache_argument, kept_keys, tap_keys
from coinrag_integrations.errors import UnsupportedModelError


class _BehindLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer behind entries that are not written to."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values  # [B, H, N, D]
        self.device, self.dtype = keys.device, keys.dtype
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat((self.keys, key_states.to(self.dtype)), -2)
        return keys, torch.cat((self.values, value_states.to(self.dtype)), -2)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return int(self.keys.shape[-2])


def logits_behind(
    model: PreTrainedModel,
    ids: torch.Tensor,
    kv: torch.Tensor,
    n: int,
    positions: torch.Tensor | None = None,
    visible: Mapping[int | None, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Logits after each of the last n of `ids` [B, m] behind kv [L, 2, B, H, N, D]: fp32 [B, n, V].

    Gradients flow, also into `kv` if it wants them; nothing is written to it. Takes a model that peft
    has wrapped as well. `positions` and `visible` as for `hf.last_logits`.

    Raises:
        UnsupportedModelError: the model's attention implementation takes no mask.
    """
    cache = Cache(layers=[_BehindLayer(k, v) for k, v in kv.unbind(0)])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    arguments: dict[str, Any] = {cache_argument(base): cache}
    if positions is not None:
        arguments["position_ids"] = positions
    if visible is not None:
        arguments["attention_mask"] = attention_mask(base, visible)
    # Taken by index, the rows are contiguous: behind a slice, the head's gradient copies its weights.
    m = ids.shape[1]
    last = torch.arange(m - n, m, device=ids.device)
    logits = model(input_ids=ids, use_cache=True, logits_to_keep=last, **arguments).logits
    return logits.float()  # type: ignore[no-any-return]  # transformers outputs are untyped


class _KeptLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """One layer while chunks are encoded: keeps each key before RoPE, and each value, in the graph."""

    def __init__(
        self, tap: list[torch.Tensor], turns: bool, behind: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.tap, self.turns, self.behind = tap, turns, behind  # behind [2, B, H, N, D]
        self.is_initialized = True
        self.entries: torch.Tensor | None = None  # [B, T, 2, H, D]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = kept_keys(self.tap, key_states, self.turns)
        pair = (keys.to(value_states.dtype), value_states)
        self.entries = torch.stack(pair, dim=2).permute(0, 3, 2, 1, 4)
        if self.behind is None:
            return key_states, value_states
        theirs = self.behind.unbind(0)  # [B, H, N, D] each
        return torch.cat((theirs[0], key_states), -2), torch.cat((theirs[1], value_states), -2)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0 if self.behind is None else int(self.behind.shape[-2])


def entries_of(model: PreTrainedModel, ids: torch.Tensor, turns: Sequence[bool]) -> torch.Tensor:
    """Keys before RoPE and values of chunks, in the graph: ids [B, T] -> [B, T, L, 2, H, D].

    What `hf.capture` writes, for weights that are trained; `turns` [L] are the layers that rotate.

    Raises:
        UnsupportedModelError: the model's attention does not rotate one key per cache update.
    """
    with tap_keys(model) as tap:
        layers = [_KeptLayer(tap, it) for it in turns]
        body = model.base_model
        body(ids, use_cache=True, **{cache_argument(body): Cache(layers=layers)})
    return _kept(layers)


def entries_behind(
    model: PreTrainedModel,
    inputs: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    visible: Mapping[int | None, torch.Tensor],
    turns: Sequence[bool],
) -> torch.Tensor:
    """Entries of input embeddings [B, m, hidden] behind placed rows kv [L, 2, B, H, N, D], in the graph.

    -> [B, m, L, 2, H, D], keys before RoPE. `positions` [B, m] are those of the inputs, `visible` as for
    `hf.last_logits`, over the N rows and then the m inputs; `turns` [L] are the layers that rotate.

    Raises:
        UnsupportedModelError: the model's attention takes no mask, or does not rotate one key per cache
            update.
    """
    body = model.base_model
    with tap_keys(model) as tap:
        layers = [_KeptLayer(tap, *it) for it in zip(turns, kv.unbind(0), strict=True)]
        body(
            inputs_embeds=inputs,
            attention_mask=attention_mask(model, visible),
            position_ids=positions,
            use_cache=True,
            **{cache_argument(body): Cache(layers=layers)},
        )
    return _kept(layers)


def _kept(layers: Sequence[_KeptLayer]) -> torch.Tensor:
    kept = [layer.entries for layer in layers if layer.entries is not None]
    if len(kept) != len(layers):
        raise UnsupportedModelError("some layers keep no keys and values")
    return torch.stack(kept, dim=2)
