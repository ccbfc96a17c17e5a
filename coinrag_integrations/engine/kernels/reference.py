"""`place`, defined in plain torch. Every other implementation must agree with this one.

place moves staged entries to their positions in a prefix: keys are rotated, values copied, and the
axes turned from `[T, L, 2, H, D]` to `[L, 2, H, N, D]`.
"""

from __future__ import annotations

import torch

# Entries rotated at a time. Measured on two cores: small enough for the fp32 intermediates to stay in
# the cache (2,048 entries of SmolLM2 take 22 ms, 57 ms in one piece), large enough to amortise calls.
_BLOCK = 64


def rotate(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn keys by their angles: k [..., T, D], cos and sin [T, D/2] fp32 -> fp32 [..., T, D].

    Pairs are half-split (see `engine.rope`). Computes in fp32 and allocates; `k` is untouched.
    """
    first, second = k.float().chunk(2, dim=-1)  # [..., T, D/2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def place(
    staged: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, start: int = 0
) -> None:
    """Write staged entries into rows `[start, start + T)` of a prefix.

    staged [T, L, 2, H, D], cos and sin [T, D/2] fp32, out [L, 2, H, N, D] in the same dtype as
    `staged`. Writes into `out` and nothing else; rotates in fp32 and rounds once.
    """
    for first in range(0, len(staged), _BLOCK):
        block = slice(first, first + _BLOCK)
        rows = slice(start + first, start + min(first + _BLOCK, len(staged)))
        keys, values = staged[block].permute(1, 2, 3, 0, 4).unbind(1)  # [L, H, block, D] each
        out[:, 0, :, rows].copy_(rotate(keys, cos[block], sin[block]))
        out[:, 1, :, rows].copy_(values)
