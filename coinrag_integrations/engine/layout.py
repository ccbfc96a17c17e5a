"""The shape of cached keys and values. Knows sizes and dtypes, not models or files.

Letters, the same everywhere in the engine: `T` tokens of a chunk or entries of a stage, `N` rows of
a prefix, `L` layers, `H` KV heads, `D` head dimension, `B` prefixes side by side, `P` prompt entries.

Two arrangements exist. On disk and in staging, entries come first: `[T, L, 2, H, D]`, so that a span
is one contiguous range of bytes for all layers. In prefixes, what attention reads:
`[L, 2, B, H, N, D]`.
Index 0 of the axis of length two is the key, index 1 the value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coinrag_integrations.errors import ConfigError

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype, as configuration and files spell it.

    Raises:
        ConfigError: KV is never stored in that dtype.
    """
    for name, known in DTYPES.items():
        if known is dtype:
            return name
    raise ConfigError(f"dtype {dtype} cannot hold KV: use one of {', '.join(DTYPES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Layers, KV heads, head dimension and dtype of one model's keys and values."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        """Layers, two, KV heads and head dimension: "30x2x3x64"."""
        return f"{self.n_layers}x2x{self.n_kv_heads}x{self.head_dim}"

    @classmethod
    def parse(cls, text: str, dtype: str) -> KVLayout:
        """The inverse of `str`, with the name of a dtype.

        Raises:
            ValueError: neither is one of ours.
        """
        try:
            n_layers, _, n_kv_heads, head_dim = map(int, text.split("x"))
            dtype_ = DTYPES[dtype]
        except KeyError as error:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}") from error
        return cls(n_layers=n_layers, n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=dtype_)

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.n_layers * 2 * self.n_kv_heads * self.head_dim * self.dtype.itemsize

    def staged(self, n_entries: int) -> tuple[int, int, int, int, int]:
        """Shape `[T, L, 2, H, D]`."""
        return (n_entries, self.n_layers, 2, self.n_kv_heads, self.head_dim)

    def prefixes(self, n_prefixes: int, n_rows: int) -> tuple[int, int, int, int, int, int]:
        """Shape `[L, 2, B, H, N, D]`."""
        return (self.n_layers, 2, n_prefixes, self.n_kv_heads, n_rows, self.head_dim)
