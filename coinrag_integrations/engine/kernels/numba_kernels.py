"""What Numba compiles for `cpu`: all in this file, since its cache watches a kernel's file alone.

Numba has no bf16 and cannot compute in fp16: both come in as integers that only we understand, become
fp32 in registers and are rounded once, exactly as torch does it: products are not fused into sums, ties
go to even, NaN stays NaN. Kernels see memory as one axis and add up offsets themselves, so they are
compiled once for all shapes and strides of a combination of dtypes: when first called with it, and
then kept on disk. They handle a range of the entries and let go of the interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

# Entries at a time: read from the second cache, and written as one run of rows a layer and head.
# With 64 it takes up to twice as long: too many pages are touched at once.
_BLOCK = 16

_BF16, _FP16, _WORD, _FP32 = types.uint16, types.int16, ir.IntType(32), ir.FloatType()

# Without counting references, which is atomic and took most of the time: kernels allocate nothing.
_jit = functools.partial(njit, error_model="numpy", _nrt=False)
_inlined = _jit(inline="always")


def kernel(function: Callable[..., None]) -> Any:
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


@kernel
def place(
    numbers,  # [T, L, 2, H, D], or room for [D] of them if they come as codes
    coded,  # None, or see `cpu._coded`
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
    """Entries [first, stop) to their rows. See `reference.place`."""
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


@kernel
def bounds(
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
    """The lowest and highest of groups [first, stop): key channels, and the values of each entry."""
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


@kernel
def encode(
    numbers,  # [T, L, 2, H, D]
    coded,  # see `cpu._coded`; the codes are written
    shape,  # T, L, H, D
    row,  # room for [D] fp32
    first,
    stop,
):
    """Codes of entries [first, stop) against scales that are there."""
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
