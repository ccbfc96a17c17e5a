"""`place` as one Triton kernel: one pass over the bytes. Same signature as the reference.

Each program moves a block of entries of one layer and one KV head: it reads keys and values once,
turns the keys in fp32, and writes both where attention will read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _place_kernel(
    staged_ptr,  # [T, L, 2, H, D]
    cos_ptr,  # [T, D/2] fp32
    sin_ptr,  # [T, D/2] fp32
    out_ptr,  # [L, 2, H, N, D], already moved to row `start`
    T,
    L,
    H,
    N,
    HALF: tl.constexpr,  # D/2
    BT: tl.constexpr,  # entries a program
    BD: tl.constexpr,  # D/2 rounded up to a power of two
):
    # int64 before multiplying: a long prefix of a large model has more than 2**31 elements.
    i_t = tl.program_id(0).to(tl.int64)
    i_lh = tl.program_id(1).to(tl.int64)
    i_l, i_h = i_lh // H, i_lh % H
    D = 2 * HALF

    o_t = i_t * BT + tl.arange(0, BT)  # [BT]
    o_d = tl.arange(0, BD)  # [BD]
    mask = (o_t < T)[:, None] & (o_d < HALF)[None, :]  # [BT, BD]

    angle = o_t[:, None] * HALF + o_d[None, :]
    b_cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    b_sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)

    # Strides of [T, L, 2, H, D] and of [L, 2, H, N, D].
    source = o_t[:, None] * (L * 2 * H * D) + (i_l * 2 * H + i_h) * D + o_d[None, :]
    target = (i_l * 2 * H + i_h) * (N * D) + o_t[:, None] * D + o_d[None, :]

    b_first = tl.load(staged_ptr + source, mask=mask, other=0.0).to(tl.float32)
    b_second = tl.load(staged_ptr + source + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + target, (b_first * b_cos - b_second * b_sin).to(dtype), mask=mask)
    tl.store(out_ptr + target + HALF, (b_second * b_cos + b_first * b_sin).to(dtype), mask=mask)

    source += H * D  # from the key to the value
    target += H * N * D
    tl.store(out_ptr + target, tl.load(staged_ptr + source, mask=mask), mask=mask)
    tl.store(out_ptr + target + HALF, tl.load(staged_ptr + source + HALF, mask=mask), mask=mask)


BLOCK_ENTRIES = 32


def place(
    staged: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, start: int = 0
) -> None:
    """Write staged entries into rows `[start, start + T)` of a prefix. See `reference.place`."""
    n_staged, n_layers, _, n_heads, head_dim = staged.shape
    assert staged.is_contiguous(), "staged must be contiguous"
    assert out.is_contiguous(), "out must be contiguous"
    assert cos.is_contiguous(), "cos must be contiguous"
    assert sin.is_contiguous(), "sin must be contiguous"
    assert 0 <= start <= out.shape[3] - n_staged, "the entries do not fit into out"
    if n_staged == 0:
        return
    half = head_dim // 2
    grid = (triton.cdiv(n_staged, BLOCK_ENTRIES), n_layers * n_heads)
    _place_kernel[grid](
        staged,
        cos,
        sin,
        out[:, :, :, start:],  # a view: its pointer is that of row `start`
        n_staged,
        n_layers,
        n_heads,
        out.shape[3],
        HALF=half,
        BT=BLOCK_ENTRIES,
        BD=triton.next_power_of_2(half),
    )
