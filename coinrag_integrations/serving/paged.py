"""Rows into the blocks of a paged cache, by the cache's own writer. Imports no vllm.

How a backend arranges keys and values in its blocks is its own affair (some interleave and pack them), so
nothing is written here by index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.errors import ConfigError


class AttentionImpl(Protocol):
    """What writes keys and values of a layer into its blocks."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value [n, H, D] into the slots [n] of `kv_cache`."""
        ...


class AttentionLayer(Protocol):
    """A layer with a cache of its own."""

    impl: AttentionImpl
    kv_cache: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which part of every prefix a process holds: `layers` by their index, and its heads."""

    layers: Mapping[int, AttentionLayer]
    heads: slice


def slots_of(blocks: Sequence[int], block_size: int, rows: range) -> torch.Tensor:
    """Where rows lie in a paged cache: int64 [n]."""
    at = torch.arange(rows.start, rows.stop)
    return torch.tensor(list(blocks))[at // block_size] * block_size + at % block_size


def write_rows(share: Share, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows kv [L, 2, H, n, D] into slots [n], in every layer of a share."""
    slots = slots.to(kv.device)
    for index, layer in share.layers.items():
        key, value = kv[index, :, share.heads].transpose(1, 2).contiguous().unbind(0)  # [n, H, D]
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)


def heads_of(n_heads: int, rank: int, size: int) -> slice:
    """The KV heads of a tensor-parallel rank; where there are more ranks than heads, they are shared.

    Raises:
        ConfigError: neither divides the other.
    """
    if n_heads % size == 0:
        each = n_heads // size
        return slice(rank * each, (rank + 1) * each)
    if size % n_heads == 0:
        head = rank // (size // n_heads)
        return slice(head, head + 1)
    raise ConfigError(f"{n_heads} KV heads cannot be shared by {size} tensor-parallel processes")


def check_layout(
    layout: KVLayout, *, n_layers: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Refuse a server whose cache has another form than what is stored.

    Raises:
        ConfigError: the server runs another model, or another dtype.
    """
    found = KVLayout(n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=dtype)
    if found != layout:
        raise ConfigError(
            f"the server's model caches {found} in {dtype}, the store holds {layout} in "
            f"{layout.dtype}: serve the model that the store was built with, in its dtype (--dtype)"
        )
