"""The operations on a CPU: one pass over the bytes, compiled by Numba. Same signatures as the reference.

Numbers become fp32 in registers, are turned there and rounded once, exactly as torch does it: products
are not fused into sums, ties go to even, NaN stays NaN. Kernels see memory as one axis and add up
offsets themselves, so they are compiled once for all shapes and strides of a combination of dtypes:
when first called with it, and then kept on disk.

A kernel handles a range of the entries and lets go of the interpreter, so that ranges run on Python
threads: Numba's own abort the process when two callers use them at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from coinrag_integrations.engine.kernels import reference
from coinrag_integrations.engine.kernels.quantised import Bits, Quantised
from coinrag_integrations.engine.rope import Rotation

# Entries at a time: read from the second cache, and written as one run of rows a layer and head.
# With 64 it takes up to twice as long: too many pages are touched at once.
_BLOCK = 16

# Bytes that a thread takes at a time: they outweigh a call, and leave enough for the others.
_RANGE_BYTES = 512 * 1024

# Numba has no bf16 and cannot compute in fp16: both come in as integers that only we understand.
_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
_BF16, _FP16, _WORD, _FP32 = types.uint16, types.int16, ir.IntType(32), ir.FloatType()


def place(
    staged: torch.Tensor | Quantised, rotation: Rotation, out: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write staged entries into rows of prefixes, keys turned. See `reference.place`.

    Raises:
        ValueError: shapes do not fit, an index lies outside, or rows of `out` are not contiguous.
    """
    n_layers, _, n_prefixes, n_heads, n_rows, head_dim = out.shape
    packed, in_byte = (
        (staged.codes, 8 // staged.bits) if isinstance(staged, Quantised) else (staged, 1)
    )
    _check(
        (*packed.shape[:4], packed.shape[4] * in_byte)
        == (len(slots), n_layers, 2, n_heads, head_dim)
        and len(rotation) == len(slots)
        and 2 * rotation.cos.shape[2] <= head_dim
        and out.stride(5) == 1,
        f"{len(slots)} entries {tuple(packed.shape)}, {len(rotation)} of them with "
        f"{rotation.cos.shape[2]} angles, cannot become rows of {tuple(out.shape)}",
    )
    if packed.numel() == 0:
        return
    _check_within(slots, n_prefixes * n_rows, "slots")
    _check_within(rotation.layers, len(rotation.cos), "rotations")
    in_layer, in_kv, in_prefix, in_head, in_row, _ = out.stride()
    extent = 1 + sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True))
    if isinstance(staged, Quantised):
        _check_within(staged.key_group, len(staged.key_scale), "groups of keys")
        numbers, coded = None, _coded(staged)
    else:
        numbers, coded = _memory(staged), None
    arguments = (
        coded,
        (len(slots), n_layers, n_heads, head_dim),
        _memory(rotation.cos),
        _memory(rotation.sin),
        rotation.cos.shape[2],
        rotation.interleaved,
        _memory(rotation.layers),
        _memory(out.as_strided((extent,), (1,))),
        (in_layer, in_kv, in_head),
        _memory(slots // n_rows * in_prefix + slots % n_rows * in_row),
    )

    def kernel(first: int, stop: int) -> None:
        row = np.empty(head_dim, np.float32) if numbers is None else numbers
        _place(row, *arguments, first, stop)

    _in_threads(kernel, len(slots), packed.numel() * in_byte * out.element_size())


def quantise(
    entries: torch.Tensor, bits: Bits, group: int, scale_dtype: torch.dtype = torch.float16
) -> Quantised:
    """Codes of entries. See `reference.quantise`."""
    n_entries, n_layers, _, n_heads, head_dim = entries.shape
    n_groups = -(-n_entries // group)
    numbers, shape = _memory(entries), (n_entries, n_layers, n_heads, head_dim)
    key_low = torch.empty((n_groups, n_layers, n_heads, head_dim), dtype=torch.float32)
    value_low = torch.empty((n_entries, n_layers, n_heads), dtype=torch.float32)
    key_high, value_high = torch.empty_like(key_low), torch.empty_like(value_low)
    bounds = map(_memory, (key_low, key_high, value_low, value_high))
    _in_threads(
        functools.partial(_bounds, numbers, shape, group, *bounds), n_groups, entries.nbytes
    )
    key_scale, key_zero = reference._scale(key_low, key_high, 2**bits - 1, scale_dtype)
    value_scale, value_zero = reference._scale(value_low, value_high, 2**bits - 1, scale_dtype)
    quantised = Quantised(
        codes=torch.empty((*entries.shape[:4], head_dim * bits // 8), dtype=torch.uint8),
        bits=bits,
        key_scale=key_scale,
        key_zero=key_zero,
        key_group=torch.arange(n_entries, dtype=torch.int32) // group,
        value_scale=value_scale,
        value_zero=value_zero,
    )
    coded = _coded(quantised)

    def encode(first: int, stop: int) -> None:
        _encode(numbers, coded, shape, np.empty(head_dim, np.float32), first, stop)

    _in_threads(encode, n_entries, entries.nbytes)
    return quantised


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _check_within(indices: torch.Tensor, n: int, name: str) -> None:
    low, high = (int(bound) for bound in indices.aminmax())
    _check(low >= 0 and high < n, f"there are {n} {name}, but an index is {low} or {high}")


def _coded(staged: Quantised) -> tuple[Any, ...]:
    """Codes and all they need to be read, as the kernels take them."""
    return (
        _memory(staged.codes),
        staged.bits,
        _memory(staged.key_scale),
        _memory(staged.key_zero),
        _memory(staged.key_group),
        _memory(staged.value_scale),
        _memory(staged.value_zero),
    )


def _memory(tensor: torch.Tensor) -> NDArray[Any]:
    """All numbers on one axis: the same memory if they are contiguous, otherwise a copy."""
    flat = tensor.contiguous().view(-1)
    return flat.view(_AS_INTEGERS.get(flat.dtype, flat.dtype)).numpy()


def _in_threads(kernel: Callable[[int, int], None], n: int, n_bytes: int) -> None:
    """Run `kernel(first, stop)` over ranges of n, on as many threads as torch would use.

    Whichever thread is free takes the next range, and one that has not started when all are taken is
    not waited for: torch's own threads keep their cores busy for a while after they have finished.
    """
    n_ranges = max(1, min(n, n_bytes // _RANGE_BYTES))
    ranges = pairwise([n * i // n_ranges for i in range(n_ranges + 1)])

    def work() -> None:
        for first, stop in ranges:
            kernel(first, stop)

    n_helpers = min(torch.get_num_threads(), n_ranges) - 1
    helpers = [_pool(os.getpid()).submit(work) for _ in range(n_helpers)]
    work()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@functools.lru_cache(maxsize=1)
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process: a forked one has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="coinrag-kernels")


# Without counting references, which is atomic and took most of the time: kernels allocate nothing.
_jit = functools.partial(njit, error_model="numpy", _nrt=False)
_inlined = _jit(inline="always")


def _kernel(function: Callable[..., None]) -> Any:
    """Compiled when called, without the interpreter's lock; kept on disk if a folder allows it."""
    try:
        return _jit(function, nogil=True, cache=True)
    except RuntimeError:  # neither beside this file nor in the user's cache
        return _jit(function, nogil=True)


@intrinsic
def _load(typing, memory, i):
    """memory[i] as fp32."""
    kind = memory.dtype

    def generate(context, builder, signature, arguments):
        value = builder.load(_pointer(context, builder, memory, *arguments))
        if kind == _BF16:
            return builder.bitcast(builder.shl(builder.zext(value, _WORD), _WORD(16)), _FP32)
        if kind == _FP16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), _FP32)
        return context.cast(builder, value, kind, types.float32)

    return types.float32(memory, i), generate


@intrinsic
def _store(typing, memory, i, number):
    """memory[i] = number, an fp32."""
    kind = memory.dtype

    def generate(context, builder, signature, arguments):
        array, index, value = arguments
        if kind == _BF16:
            bits = builder.bitcast(value, _WORD)
            odd = builder.and_(builder.lshr(bits, _WORD(16)), _WORD(1))
            rounded = builder.add(bits, builder.add(odd, _WORD(0x7FFF)))  # ties to even
            is_nan = builder.fcmp_unordered("uno", value, value)  # rounded, it may become a number
            bits = builder.select(is_nan, _WORD(0x7FC00000), rounded)
            value = builder.trunc(builder.lshr(bits, _WORD(16)), ir.IntType(16))
        elif kind == _FP16:
            value = builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        else:
            value = context.cast(builder, value, types.float32, kind)
        builder.store(value, _pointer(context, builder, memory, array, index))
        return context.get_dummy_value()

    return types.void(memory, i, types.float32), generate


def _pointer(context, builder, memory, array, index):
    """Where a number lies. Unlike indexing, without a check for negative ones: loops vectorise."""
    return builder.gep(make_array(memory)(context, builder, array).data, [index], inbounds=True)


@intrinsic
def _lower(typing, a, b):
    """The lower of two fp32; NaN if one of them is, as in torch."""
    return _extreme("llvm.minimum")


@intrinsic
def _higher(typing, a, b):
    """The higher of two fp32; NaN if one of them is, as in torch."""
    return _extreme("llvm.maximum")


def _extreme(name):
    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(_FP32, (_FP32, _FP32))
        function = builder.module.declare_intrinsic(name, (_FP32,), function)
        return builder.call(function, arguments)

    return types.float32(types.float32, types.float32), generate


@_inlined
def _turn(numbers, at, cos, sin, angle, half, interleaved, out, to):
    """2 * half dimensions of a key; see `engine.rope` for the pairs."""
    if interleaved:
        for i in range(half):
            a, b = _load(numbers, at + 2 * i), _load(numbers, at + 2 * i + 1)
            c, s = _load(cos, angle + i), _load(sin, angle + i)
            _store(out, to + 2 * i, a * c - b * s)
            _store(out, to + 2 * i + 1, b * c + a * s)
    else:
        for i in range(half):
            a, b = _load(numbers, at + i), _load(numbers, at + half + i)
            c, s = _load(cos, angle + i), _load(sin, angle + i)
            _store(out, to + i, a * c - b * s)
            _store(out, to + half + i, b * c + a * s)


@_inlined
def _unpack(codes, bits, at, numbers, head_dim):
    """Codes [D], two in a byte if they have 4 bits, -> numbers [D]."""
    if bits == 8:
        for d in range(head_dim):
            _store(numbers, d, _load(codes, at + d))
    else:
        half = head_dim // 2
        for d in range(half):
            pair = np.int32(_load(codes, at // 2 + d))
            _store(numbers, d, np.float32(pair & 0xF))
            _store(numbers, half + d, np.float32(pair >> 4))


@_inlined
def _pack(numbers, head_dim, codes, bits, at):
    """The inverse of `_unpack`."""
    if bits == 8:
        for d in range(head_dim):
            _store(codes, at + d, _load(numbers, d))
    else:
        half = head_dim // 2
        for d in range(half):
            _store(codes, at // 2 + d, _load(numbers, d) + 16 * _load(numbers, half + d))


@_inlined
def _code(number, scale, zero, highest):
    """The nearest code; if a scale is zero all numbers are the same, and any step will do."""
    code = np.rint((number - zero) / (scale if scale > 0 else np.float32(1)))
    return min(max(code, np.float32(0)), highest)


@_kernel
def _place(
    numbers,  # [T, L, 2, H, D], or room for [D] of them if they come as codes
    coded,  # None, or see `_coded`
    shape,  # T, L, H, D
    cos,  # [G, T, R/2] fp32
    sin,  # [G, T, R/2] fp32
    half,  # R/2
    interleaved,
    layers,  # [L]
    out,  # [L, 2, B, H, N, D]
    strides,  # of out: L, 2, H
    rows,  # [T] where in a layer and head of out the row of an entry begins
    first,
    stop,
):
    n_entries, n_layers, n_heads, head_dim = shape
    in_layer, in_kv, in_head = strides
    for begin in range(first, stop, _BLOCK):
        end = min(begin + _BLOCK, stop)
        for i_l in range(n_layers):
            for i_h in range(n_heads):
                for t in range(begin, end):
                    at = ((t * n_layers + i_l) * 2 * n_heads + i_h) * head_dim
                    if coded is not None:
                        _decode_key(coded, shape, t, i_l, i_h, at, numbers)
                        at = 0
                    to = i_l * in_layer + i_h * in_head + rows[t]
                    angle = (layers[i_l] * n_entries + t) * half
                    _turn(numbers, at, cos, sin, angle, half, interleaved, out, to)
                    for d in range(2 * half, head_dim):
                        _store(out, to + d, _load(numbers, at + d))
                for t in range(begin, end):
                    at = (((t * n_layers + i_l) * 2 + 1) * n_heads + i_h) * head_dim
                    if coded is not None:
                        _decode_value(coded, shape, t, i_l, i_h, at, numbers)
                        at = 0
                    to = i_l * in_layer + in_kv + i_h * in_head + rows[t]
                    for d in range(head_dim):
                        _store(out, to + d, _load(numbers, at + d))


@_inlined
def _decode_key(coded, shape, t, i_l, i_h, at, numbers):
    codes, bits, key_scale, key_zero, key_group, _, _ = coded
    _, n_layers, n_heads, head_dim = shape
    _unpack(codes, bits, at, numbers, head_dim)
    of = ((key_group[t] * n_layers + i_l) * n_heads + i_h) * head_dim
    for d in range(head_dim):
        number = _load(numbers, d) * _load(key_scale, of + d) + _load(key_zero, of + d)
        _store(numbers, d, number)


@_inlined
def _decode_value(coded, shape, t, i_l, i_h, at, numbers):
    codes, bits, _, _, _, value_scale, value_zero = coded
    _, n_layers, n_heads, head_dim = shape
    _unpack(codes, bits, at, numbers, head_dim)
    of = (t * n_layers + i_l) * n_heads + i_h
    scale, zero = _load(value_scale, of), _load(value_zero, of)
    for d in range(head_dim):
        _store(numbers, d, _load(numbers, d) * scale + zero)


@_kernel
def _bounds(
    numbers,  # [T, L, 2, H, D]
    shape,  # T, L, H, D
    group,  # entries in each
    key_low,  # [G, L, H, D] fp32
    key_high,  # [G, L, H, D] fp32
    value_low,  # [T, L, H] fp32
    value_high,  # [T, L, H] fp32
    first,
    stop,
):
    n_entries, n_layers, n_heads, head_dim = shape
    n_keys, inf = n_layers * n_heads * head_dim, np.float32(np.inf)
    for g in range(first, stop):
        for i in range(g * n_keys, (g + 1) * n_keys):
            _store(key_low, i, inf)
            _store(key_high, i, -inf)
        for t in range(g * group, min((g + 1) * group, n_entries)):
            for i_l in range(n_layers):
                for i_h in range(n_heads):
                    at = ((t * n_layers + i_l) * 2 * n_heads + i_h) * head_dim
                    of = ((g * n_layers + i_l) * n_heads + i_h) * head_dim
                    for d in range(head_dim):
                        number = _load(numbers, at + d)
                        _store(key_low, of + d, _lower(_load(key_low, of + d), number))
                        _store(key_high, of + d, _higher(_load(key_high, of + d), number))
                    at += n_heads * head_dim
                    low, high = inf, -inf
                    for d in range(head_dim):
                        number = _load(numbers, at + d)
                        low, high = _lower(low, number), _higher(high, number)
                    of = (t * n_layers + i_l) * n_heads + i_h
                    _store(value_low, of, low)
                    _store(value_high, of, high)


@_kernel
def _encode(
    numbers,  # [T, L, 2, H, D]
    coded,  # see `_coded`; the codes are written
    shape,  # T, L, H, D
    row,  # room for [D] fp32
    first,
    stop,
):
    codes, bits, key_scale, key_zero, key_group, value_scale, value_zero = coded
    _, n_layers, n_heads, head_dim = shape
    highest = np.float32(2**bits - 1)
    for t in range(first, stop):
        for i_l in range(n_layers):
            for i_h in range(n_heads):
                at = ((t * n_layers + i_l) * 2 * n_heads + i_h) * head_dim
                of = ((key_group[t] * n_layers + i_l) * n_heads + i_h) * head_dim
                for d in range(head_dim):
                    scale, zero = _load(key_scale, of + d), _load(key_zero, of + d)
                    _store(row, d, _code(_load(numbers, at + d), scale, zero, highest))
                _pack(row, head_dim, codes, bits, at)
                at += n_heads * head_dim
                of = (t * n_layers + i_l) * n_heads + i_h
                scale, zero = _load(value_scale, of), _load(value_zero, of)
                for d in range(head_dim):
                    _store(row, d, _code(_load(numbers, at + d), scale, zero, highest))
                _pack(row, head_dim, codes, bits, at)
