"""Entries in 8 or 4 bits, and how their codes are to be read. Knows no kernel.

Keys are quantised per channel, values per token: a key's channels differ far more from each other than
its tokens do (KIVI, arXiv 2402.02750, section 3). Codes are unsigned and asymmetric:

    entry = code * scale + zero

where a key's scale and zero belong to a group of consecutive entries and one channel, a value's to one
entry and head. In 4 bits a byte holds two dimensions, d in its low and d + D/2 in its high half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Bits = Literal[8, 4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """T staged entries as codes.

    `codes` [T, L, 2, H, D] uint8, or [T, L, 2, H, D/2] if two share a byte; `key_scale`, `key_zero`
    [G, L, H, D] and `value_scale`, `value_zero` [T, L, H], all of one dtype, fp16 or fp32;
    `key_group` [T] int32: the group of each entry.
    """

    codes: torch.Tensor
    bits: Bits
    key_scale: torch.Tensor
    key_zero: torch.Tensor
    key_group: torch.Tensor
    value_scale: torch.Tensor
    value_zero: torch.Tensor

    def __len__(self) -> int:
        """Entries."""
        return len(self.codes)

    def __getitem__(self, entries: slice) -> Quantised:
        """Some of the entries; shares memory."""
        return Quantised(
            codes=self.codes[entries],
            bits=self.bits,
            key_scale=self.key_scale,
            key_zero=self.key_zero,
            key_group=self.key_group[entries],
            value_scale=self.value_scale[entries],
            value_zero=self.value_zero[entries],
        )

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Quantised:
        """The same with every tensor replaced."""
        return Quantised(
            codes=function(self.codes),
            bits=self.bits,
            key_scale=function(self.key_scale),
            key_zero=function(self.key_zero),
            key_group=function(self.key_group),
            value_scale=function(self.value_scale),
            value_zero=function(self.value_zero),
        )

    @property
    def head_dim(self) -> int:
        """D."""
        return self.key_scale.shape[-1]

    @property
    def n_bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        parts = (self.codes, self.key_scale, self.key_zero, self.value_scale, self.value_zero)
        return sum(part.numel() * part.element_size() for part in parts)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes a byte: uint8 [..., D] -> [..., D/2]."""
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`: uint8 [..., D/2] -> [..., D]."""
    return torch.cat((packed & 0xF, packed >> 4), dim=-1)
