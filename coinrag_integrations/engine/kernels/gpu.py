"""The operations as Triton kernels, one launch each. Same signatures as the reference.

A program of `place` moves a block of entries of one layer, head by head: it reads them once,
makes numbers of codes and turns keys in registers, in fp32, and writes each entry to its own row of
its own prefix. A program of `quantise` makes the codes of one group of entries of one layer and head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coinrag_integrations.engine.kernels.quantised import Bits, Quantised
from coinrag_integrations.engine.rope import Rotation

# A tile is 1,024 pairs of dimensions, whatever the width of a head. Over 4 warps that is 8 pairs a
# thread: 16 bytes an access to 16-bit entries, and four such reads in flight a thread. Saying that 128
# registers are fine (it takes 45 to 128) keeps ptxas from spilling a few to make room for one more
# program; at 128 there are still 16 warps on a multiprocessor.
_TILE = 1024
OPTIONS = {"num_warps": 4, "maxnreg": 128}

# Adding this to a small fp32 and taking it away again rounds it, a half to even: no bit is left for
# a fraction. (libdevice has rint, the interpreter has not.)
_ROUND = tl.constexpr(1.5 * 2**23)


@triton.jit
def _tile(ptr, row, o_d, mask, D: tl.constexpr, BITS: tl.constexpr):
    """Dimensions o_d [1, X] of rows [BT, 1], as they are stored: fp32 [BT, X]."""
    if BITS == 4:  # a byte with dimensions of two tiles is read for each, the second time from L1
        both = tl.load(ptr + row * (D // 2) + o_d % (D // 2), mask=mask, other=0)
        return tl.where(o_d < D // 2, both & 0xF, both >> 4).to(tl.float32)
    else:
        return tl.load(ptr + row * D + o_d, mask=mask, other=0).to(tl.float32)


@triton.jit
def _two_tiles(ptr, row, o_d, APART: tl.constexpr, mask, D: tl.constexpr, BITS: tl.constexpr):
    """Dimensions o_d and o_d + APART of rows, as they are stored: fp32 [BT, X] each."""
    if BITS == 4 and 2 * APART == D:  # both in one byte
        both = tl.load(ptr + row * APART + o_d, mask=mask, other=0)
        return (both & 0xF).to(tl.float32), (both >> 4).to(tl.float32)
    else:
        first = _tile(ptr, row, o_d, mask, D, BITS)
        return first, _tile(ptr, row, o_d + APART, mask, D, BITS)


@triton.jit
def _scales(scale_ptr, zero_ptr, at, mask):
    """Scales and zeros in fp32."""
    scale = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.float32)
    return scale, tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)


@triton.jit
def _store(ptr, entries, mask):
    """Write fp32 entries, rounded once to what ptr points to."""
    tl.store(ptr, entries.to(ptr.dtype.element_ty), mask=mask)


# What differs from one request to the next must not compile the kernel again, unless it widens accesses.
@triton.jit(
    do_not_specialize=["T", "N"],
    do_not_specialize_on_alignment=[
        "key_group_ptr",
        "value_scale_ptr",
        "value_zero_ptr",
        "slots_ptr",
    ],
)
def _place_kernel(
    staged_ptr,  # [T, L, 2, H, D], or [T, L, 2, H, D/2] in 4 bits
    key_scale_ptr,  # [G, L, H, D], as key_zero; these five are None if staged holds numbers
    key_zero_ptr,
    key_group_ptr,  # [T] int32
    value_scale_ptr,  # [T, L, H], as value_zero
    value_zero_ptr,
    cos_ptr,  # [rotations, T, R/2] fp32, as sin
    sin_ptr,
    layers_ptr,  # [L] int32: which rotation
    out_ptr,  # [L, 2, B, H, N, D]
    slots_ptr,  # [T] int64
    s_rotation,  # stride of cos and of sin
    s_l,  # strides of out
    s_kv,
    s_b,
    s_h,
    s_n,
    T,
    L,
    H,
    N,
    D: tl.constexpr,
    R: tl.constexpr,  # dimensions that are turned
    BITS: tl.constexpr,  # of a code; 0 if staged holds numbers
    INTERLEAVED: tl.constexpr,
    BT: tl.constexpr,  # entries a program
    BD: tl.constexpr,  # D/2 rounded up to a power of two
    BP: tl.constexpr,  # R/2 rounded up
    BR: tl.constexpr,  # D - R rounded up
):
    # int64 before multiplying: a long prefix of a large model has more than 2**31 elements.
    # Programs that follow each other take the layers of the same entries, whose bytes are neighbours.
    program = tl.program_id(0).to(tl.int64)
    i_t, i_l = program // L, program % L

    o_t = i_t * BT + tl.arange(0, BT)[:, None]  # [BT, 1]
    o_p = tl.arange(0, BP)[None, :]  # [1, BP]
    o_d = tl.arange(0, BD)[None, :]  # [1, BD]
    m_t = o_t < T
    m_p = m_t & (o_p < R // 2)  # [BT, BP]
    m_d = m_t & (o_d < D // 2)  # [BT, BD]

    angle = tl.load(layers_ptr + i_l).to(tl.int64) * s_rotation + o_t * (R // 2) + o_p
    b_cos = tl.load(cos_ptr + angle, mask=m_p, other=0.0)
    b_sin = tl.load(sin_ptr + angle, mask=m_p, other=0.0)

    # All of these [BT, 1], and moved on from head to head.
    key = (o_t * L + i_l) * 2 * H  # a row of staged; its value is H rows further
    slot = tl.load(slots_ptr + o_t, mask=m_t, other=0)
    target = out_ptr + i_l * s_l + slot // N * s_b + slot % N * s_n
    if BITS:
        group = tl.load(key_group_ptr + o_t, mask=m_t, other=0).to(tl.int64)
        key_scale = (group * L + i_l) * H * D
        value_scale = (o_t * L + i_l) * H

    for _ in range(H):
        # Everything is read before anything is written, to be in flight together.
        b_v1, b_v2 = _two_tiles(staged_ptr, key + H, o_d, D // 2, m_d, D, BITS)
        if BITS:
            scale, zero = _scales(value_scale_ptr, value_zero_ptr, value_scale, m_t)
            b_v1, b_v2 = b_v1 * scale + zero, b_v2 * scale + zero
        if R < D:
            o_r = R + tl.arange(0, BR)[None, :]
            m_r = m_t & (o_r < D)
            b_r = _tile(staged_ptr, key, o_r, m_r, D, BITS)
            if BITS:
                scale, zero = _scales(key_scale_ptr, key_zero_ptr, key_scale + o_r, m_r)
                b_r = b_r * scale + zero

        if INTERLEAVED:
            o_k = tl.arange(0, 2 * BP)[None, :]
            m_k = m_t & (o_k < R)
            b_k = _tile(staged_ptr, key, o_k, m_k, D, BITS)
            if BITS:
                scale, zero = _scales(key_scale_ptr, key_zero_ptr, key_scale + o_k, m_k)
                b_k = b_k * scale + zero
            b_a, b_b = tl.split(tl.reshape(b_k, (BT, BP, 2)))
            b_k = tl.join(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin)
            _store(target + o_k, tl.reshape(b_k, (BT, 2 * BP)), m_k)
        else:
            b_a, b_b = _two_tiles(staged_ptr, key, o_p, R // 2, m_p, D, BITS)
            if BITS:
                at = key_scale + o_p
                scale, zero = _scales(key_scale_ptr, key_zero_ptr, at, m_p)
                b_a = b_a * scale + zero
                scale, zero = _scales(key_scale_ptr, key_zero_ptr, at + R // 2, m_p)
                b_b = b_b * scale + zero
            _store(target + o_p, b_a * b_cos - b_b * b_sin, m_p)
            _store(target + R // 2 + o_p, b_b * b_cos + b_a * b_sin, m_p)
        if R < D:
            _store(target + o_r, b_r, m_r)
        _store(target + s_kv + o_d, b_v1, m_d)
        _store(target + s_kv + D // 2 + o_d, b_v2, m_d)

        key += 1
        target += s_h
        if BITS:
            key_scale += D
            value_scale += 1


@triton.jit
def _lowest(entries, mask, axis: tl.constexpr):
    """The least of what the mask keeps; -inf if there is a NaN, which is then refused like it."""
    entries = tl.where(entries == entries, entries, float("-inf"))
    return tl.min(tl.where(mask, entries, float("inf")), axis, keep_dims=True)


@triton.jit
def _highest(entries, mask, axis: tl.constexpr):
    """The greatest of what the mask keeps."""
    return tl.max(tl.where(mask, entries, float("-inf")), axis, keep_dims=True)


@triton.jit
def _write_scale(scale_ptr, zero_ptr, at, low, high, mask, BITS: tl.constexpr):
    """Write scale and zero of a range; return them rounded as they were written, in fp32."""
    dtype = scale_ptr.dtype.element_ty
    scale, zero = tl.div_rn(high - low, 2.0**BITS - 1).to(dtype), low.to(dtype)
    tl.store(scale_ptr + at, scale, mask=mask)
    tl.store(zero_ptr + at, zero, mask=mask)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def _write_codes(
    codes_ptr,
    row,
    entries,
    scale,
    zero,
    mask,
    D: tl.constexpr,
    BITS: tl.constexpr,
    BD: tl.constexpr,
):
    """Write the codes nearest to entries [BT, 2, BD] of rows [BT, 1, 1]; of two, the even one."""
    codes = tl.div_rn(entries - zero, tl.where(scale > 0, scale, 1.0))
    codes = tl.clamp(codes, 0.0, 2.0**BITS - 1) + _ROUND - _ROUND
    o_half, o_d = tl.arange(0, 2)[None, :, None], tl.arange(0, BD)[None, None, :]
    if BITS == 4:
        both = tl.sum(codes * tl.where(o_half == 0, 1.0, 16.0), 1, keep_dims=True)  # [BT, 1, BD]
        tl.store(codes_ptr + row * (D // 2) + o_d, both.to(tl.uint8), mask=mask)
    else:
        target = codes_ptr + row * D + o_half * (D // 2) + o_d
        tl.store(target, codes.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _quantise_kernel(
    entries_ptr,  # [T, L, 2, H, D]
    codes_ptr,  # [T, L, 2, H, D], or [T, L, 2, H, D/2] in 4 bits
    key_scale_ptr,  # [G, L, H, D], as key_zero
    key_zero_ptr,
    value_scale_ptr,  # [T, L, H], as value_zero
    value_zero_ptr,
    T,
    L,
    H,
    GROUP,
    D: tl.constexpr,
    BITS: tl.constexpr,
    BT: tl.constexpr,  # entries at a time
    BD: tl.constexpr,  # D/2 rounded up to a power of two
):
    program = tl.program_id(0).to(tl.int64)
    i_g, i_l, i_h = program // H // L, program // H % L, program % H
    first = i_g * GROUP
    last = tl.minimum(first + GROUP, T)

    o_d = tl.arange(0, BD)[None, None, :]  # [1, 1, BD]
    o_e = tl.arange(0, 2)[None, :, None] * (D // 2) + o_d  # [1, 2, BD]: both halves of a head
    m_d = o_d < D // 2

    b_low = tl.full((1, 2, BD), float("inf"), tl.float32)
    b_high = tl.full((1, 2, BD), float("-inf"), tl.float32)
    for start in range(first, last, BT):
        o_t = start + tl.arange(0, BT)[:, None, None]  # [BT, 1, 1]
        mask = (o_t < last) & m_d
        row = (o_t * L + i_l) * 2 * H + i_h
        b_k = tl.load(entries_ptr + row * D + o_e, mask=mask, other=0).to(tl.float32)
        b_low = tl.minimum(b_low, _lowest(b_k, mask, 0))
        b_high = tl.maximum(b_high, _highest(b_k, mask, 0))
    group = ((i_g * L + i_l) * H + i_h) * D + o_e
    key_scale, key_zero = _write_scale(key_scale_ptr, key_zero_ptr, group, b_low, b_high, m_d, BITS)

    for start in range(first, last, BT):
        o_t = start + tl.arange(0, BT)[:, None, None]
        m_t = o_t < last
        mask = m_t & m_d
        row = (o_t * L + i_l) * 2 * H + i_h
        b_k = tl.load(entries_ptr + row * D + o_e, mask=mask, other=0).to(tl.float32)
        _write_codes(codes_ptr, row, b_k, key_scale, key_zero, mask, D, BITS, BD)

        row += H  # from the key to the value
        b_v = tl.load(entries_ptr + row * D + o_e, mask=mask, other=0).to(tl.float32)
        low = tl.min(_lowest(b_v, mask, 2), 1, keep_dims=True)  # [BT, 1, 1]
        high = tl.max(_highest(b_v, mask, 2), 1, keep_dims=True)
        token = (o_t * L + i_l) * H + i_h
        scale, zero = _write_scale(value_scale_ptr, value_zero_ptr, token, low, high, m_t, BITS)
        _write_codes(codes_ptr, row, b_v, scale, zero, mask, D, BITS, BD)


def cut(head_dim: int) -> dict[str, int]:
    """How both kernels cut up their work: entries of a tile, and half a head, padded."""
    half = triton.next_power_of_2(head_dim // 2)
    return {"D": head_dim, "BT": max(_TILE // half, 1), "BD": half}


def cut_turned(head_dim: int, width: int) -> dict[str, int]:
    """How `place` cuts up keys: what is turned of a head, and what is not, padded."""
    return {
        "R": width,
        "BP": triton.next_power_of_2(width // 2),
        "BR": triton.next_power_of_2(max(head_dim - width, 1)),
    }


def place(
    staged: torch.Tensor | Quantised, rotation: Rotation, out: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write staged entries into rows of prefixes, each key turned. See `reference.place`."""
    n_layers, _, _, n_heads, n_rows, head_dim = out.shape
    width = 2 * rotation.cos.shape[-1]
    scales: tuple[torch.Tensor, ...] = ()
    if isinstance(staged, Quantised):
        stored, bits, stored_dim = staged.codes, int(staged.bits), head_dim * staged.bits // 8
        scales = (staged.key_scale, staged.key_zero, staged.key_group)
        scales += (staged.value_scale, staged.value_zero)
    else:
        stored, bits, stored_dim = staged, 0, head_dim
    angles = (rotation.cos, rotation.sin)
    n_entries = len(slots)
    assert stored.shape == (n_entries, n_layers, 2, n_heads, stored_dim), (
        "staged must fit slots and out"
    )
    assert slots.dtype == torch.int64, "slots must be int64"
    assert len(rotation) == n_entries, "one angle for every entry"
    assert len(rotation.layers) == n_layers, "one rotation for every layer"
    assert head_dim % 2 == 0, "heads must be of even width"
    assert width <= head_dim, "more is turned than a head has"
    assert out.stride(-1) == 1, "the last axis of out must be contiguous"
    assert all(part[0].is_contiguous() for part in angles), (
        "angles of a rotation must be contiguous"
    )
    assert rotation.cos.stride() == rotation.sin.stride(), "cos and sin must lie alike"
    operands = (stored, *scales, rotation.layers, slots)
    assert all(part.is_contiguous() for part in operands), "staged and slots must be contiguous"
    assert {part.device for part in (*operands, *angles)} == {out.device}, "all on one device"
    if n_entries == 0:
        return
    constants = {**cut(head_dim), **cut_turned(head_dim, width)}
    grid = (triton.cdiv(n_entries, constants["BT"]) * n_layers,)
    _place_kernel[grid](
        stored,
        *(scales or (None,) * 5),
        *angles,
        rotation.layers,
        out,
        slots,
        rotation.cos.stride(0),
        *out.stride()[:5],
        n_entries,
        n_layers,
        n_heads,
        n_rows,
        BITS=bits,
        INTERLEAVED=rotation.interleaved,
        **constants,
        **OPTIONS,
    )


def quantise(
    entries: torch.Tensor, bits: Bits, group: int, scale_dtype: torch.dtype = torch.float16
) -> Quantised:
    """Codes of entries [T, L, 2, H, D]. See `reference.quantise`.

    Raises:
        ValueError: an entry is not finite, or too large for `scale_dtype`.
    """
    n_entries, n_layers, _, n_heads, head_dim = entries.shape
    assert head_dim % 2 == 0, "heads must be of even width"
    n_groups = triton.cdiv(n_entries, group)
    like = entries.new_empty
    made = Quantised(
        codes=like((*entries.shape[:-1], head_dim * bits // 8), dtype=torch.uint8),
        bits=bits,
        key_scale=like((n_groups, n_layers, n_heads, head_dim), dtype=scale_dtype),
        key_zero=like((n_groups, n_layers, n_heads, head_dim), dtype=scale_dtype),
        key_group=torch.arange(n_entries, device=entries.device, dtype=torch.int32) // group,
        value_scale=like((n_entries, n_layers, n_heads), dtype=scale_dtype),
        value_zero=like((n_entries, n_layers, n_heads), dtype=scale_dtype),
    )
    scales = (made.key_scale, made.key_zero, made.value_scale, made.value_zero)
    if n_entries == 0:
        return made
    _quantise_kernel[(n_groups * n_layers * n_heads,)](
        entries.contiguous(),
        made.codes,
        *scales,
        n_entries,
        n_layers,
        n_heads,
        group,
        BITS=bits,
        **cut(head_dim),
        **OPTIONS,
    )
    if not torch.stack([part.isfinite().all() for part in scales]).all():  # waits once, not 4 times
        raise ValueError(
            f"entries that are not finite, or too large for scales in {scale_dtype}, "
            "cannot be quantised"
        )
    return made
