"""The operations, defined in plain torch. Every other implementation must agree with this one.

place moves staged entries to their rows in a buffer of B prefixes: codes become numbers, keys are
rotated, values copied, and the axes turned from `[T, L, 2, H, D]` to `[L, 2, B, H, N, D]`.
"""

from __future__ import annotations

import torch

from coinrag_integrations.engine.kernels.quantised import Bits, Quantised, pack, unpack
from coinrag_integrations.engine.rope import Rotation

# Entries rotated at a time, so that the fp32 intermediates stay in the cache: docs/log.md.
_BLOCK = 64


def rotate(keys: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn keys by their angles: keys [T, L, H, D] -> fp32 [T, L, H, D].

    Computes in fp32 and allocates; `keys` is untouched.
    """
    cos, sin = (  # [T, L, 1, R/2]
        angles[rotation.layers].transpose(0, 1)[:, :, None]
        for angles in (rotation.cos, rotation.sin)
    )
    width = 2 * cos.shape[-1]
    turned = keys.float().clone()
    if rotation.interleaved:
        a, b = keys[..., 0:width:2].float(), keys[..., 1:width:2].float()
        turned[..., 0:width:2], turned[..., 1:width:2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = keys[..., :width].float().chunk(2, dim=-1)
        turned[..., :width] = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned


def place(
    staged: torch.Tensor | Quantised, rotation: Rotation, out: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write staged entries into rows of prefixes, each key turned by its own angles.

    staged [T, L, 2, H, D] (in any dtype, or as codes), rotation of T entries, out
    [L, 2, B, H, N, D], slots [T] int64: entry t becomes row `slots[t] % N` of prefix
    `slots[t] // N`. Writes these rows and nothing else; computes in fp32 and rounds once.
    """
    n_rows = out.shape[4]
    target = out.permute(2, 4, 0, 1, 3, 5)  # [B, N, L, 2, H, D], the same memory
    for first in range(0, len(staged), _BLOCK):
        block = slice(first, first + _BLOCK)
        part = staged[block]
        entries = dequantise(part) if isinstance(part, Quantised) else part
        keys, values = entries.unbind(2)
        kv = torch.stack((rotate(keys, rotation[block]), values.float()), dim=2)
        where = slots[block]
        target[where // n_rows, where % n_rows] = kv.to(out.dtype)


def quantise(
    entries: torch.Tensor, bits: Bits, group: int, scale_dtype: torch.dtype = torch.float16
) -> Quantised:
    """Codes of entries [T, L, 2, H, D]: keys in groups of `group` entries, values one by one.

    The error of an entry is at most half its scale, and what rounding the scale to `scale_dtype` adds.

    Raises:
        ValueError: an entry is not finite, or too large for `scale_dtype`.
    """
    levels = 2**bits - 1
    keys, values = entries.float().unbind(2)  # [T, L, H, D] each
    n_groups = -(-len(entries) // group)
    key_group = torch.arange(len(entries), device=entries.device, dtype=torch.int32) // group
    shape = (n_groups, *keys.shape[1:])
    index = key_group.long()[:, None, None, None].expand_as(keys)
    low = keys.new_full(shape, torch.inf).scatter_reduce_(0, index, keys, "amin")
    high = keys.new_full(shape, -torch.inf).scatter_reduce_(0, index, keys, "amax")
    key_scale, key_zero = scales(low, high, levels, scale_dtype)
    value_scale, value_zero = scales(values.amin(-1), values.amax(-1), levels, scale_dtype)
    codes = torch.stack(
        (
            _codes(keys, key_scale[key_group], key_zero[key_group], levels),
            _codes(values, value_scale[..., None], value_zero[..., None], levels),
        ),
        dim=2,
    )
    return Quantised(
        codes=pack(codes) if bits == 4 else codes,
        bits=bits,
        key_scale=key_scale,
        key_zero=key_zero,
        key_group=key_group,
        value_scale=value_scale,
        value_zero=value_zero,
    )


def dequantise(entries: Quantised) -> torch.Tensor:
    """The numbers that codes stand for: fp32 [T, L, 2, H, D]."""
    codes = unpack(entries.codes) if entries.bits == 4 else entries.codes
    key_codes, value_codes = codes.float().unbind(2)
    group = entries.key_group.long()
    keys = key_codes * entries.key_scale[group].float() + entries.key_zero[group].float()
    values = (
        value_codes * entries.value_scale[..., None].float() + entries.value_zero[..., None].float()
    )
    return torch.stack((keys, values), dim=2)


def scales(
    low: torch.Tensor, high: torch.Tensor, levels: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of ranges [low, high], in `dtype`.

    Raises:
        ValueError: one of them is not finite.
    """
    scale, zero = ((high - low) / levels).to(dtype), low.to(dtype)
    if not (scale.isfinite().all() and zero.isfinite().all()):
        raise ValueError(
            f"entries that are not finite, or too large for scales in {dtype}, cannot be quantised"
        )
    return scale, zero


def _codes(
    entries: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, levels: int
) -> torch.Tensor:
    """Codes against the rounded scale and zero, so that their rounding is no further error."""
    step = torch.where(scale > 0, scale.float(), 1.0)
    return ((entries - zero.float()) / step).round_().clamp_(0, levels).to(torch.uint8)
