"""A paged cache that is as simple as can be: blocks [n, H, block, 2 D], and layers that write to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

BLOCK = 8


class Writer:
    """Writes keys and values side by side; what it is given must be contiguous."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        assert key.is_contiguous()
        assert value.is_contiguous()
        assert key.shape == value.shape
        blocks, at = slot_mapping // BLOCK, slot_mapping % BLOCK
        kv_cache[blocks, :, at] = torch.cat((key, value), dim=-1)


@dataclass
class Layer:
    """A layer with a cache of its own, in which nothing has been written."""

    kv_cache: torch.Tensor
    impl: Writer = field(default_factory=Writer)


def empty_layers(layout, n_blocks: int = 32, n_heads: int | None = None) -> dict[int, Layer]:
    """Caches full of NaN."""
    shape = (n_blocks, n_heads or layout.n_kv_heads, BLOCK, 2 * layout.head_dim)
    return {i: Layer(torch.full(shape, torch.nan)) for i in range(layout.n_layers)}


def rows_in(layers, blocks, n: int) -> torch.Tensor:
    """The first n rows of a request whose blocks these are: [L, 2, H, n, D]."""
    found = []
    for index in sorted(layers):
        cache = layers[index].kv_cache[list(blocks)]  # [blocks, H, block, 2 D]
        rows = cache.transpose(0, 1).flatten(1, 2)[:, :n]
        found.append(torch.stack(rows.chunk(2, dim=-1)))
    return torch.stack(found)
