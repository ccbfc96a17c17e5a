"""The operations on a CPU: one pass over the bytes, compiled by Numba. Same signatures as the reference.

Shapes are checked and work is split here, `numba_kernels` does it. Ranges of the entries run on Python
threads: Numba's own abort the process when two callers use them at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coinrag_integrations.engine.kernels import numba_kernels, reference
from coinrag_integrations.engine.kernels.quantised import Bits, Quantised
from coinrag_integrations.engine.rope import Rotation

# Bytes that a thread takes at a time: they outweigh a call, and leave enough for the others.
_RANGE_BYTES = 512 * 1024

# How `numba_kernels` takes what Numba has no numbers for.
_AS_INTEGERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


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
        numba_kernels.place(row, *arguments, first, stop)

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
        functools.partial(numba_kernels.bounds, numbers, shape, group, *bounds),
        n_groups,
        entries.nbytes,
    )
    key_scale, key_zero = reference.scales(key_low, key_high, 2**bits - 1, scale_dtype)
    value_scale, value_zero = reference.scales(value_low, value_high, 2**bits - 1, scale_dtype)
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
        numba_kernels.encode(numbers, coded, shape, np.empty(head_dim, np.float32), first, stop)

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
    ranges = iter([(n * i // n_ranges, n * (i + 1) // n_ranges) for i in range(n_ranges)])

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
