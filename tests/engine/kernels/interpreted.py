"""Run the Triton kernels against the reference; print one JSON object.

As a program, in Triton's interpreter: `TRITON_INTERPRET` must be set before a kernel is defined, and
would change what the rest of the tests choose. The tests run the same cases on a GPU where there is
one. Not a test module.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields

import torch

from coinrag_integrations.engine.kernels import gpu, reference
from coinrag_integrations.engine.kernels.quantised import Bits, Quantised
from coinrag_integrations.engine.rope import RopeTable, Rotary, Rotation

CPU = torch.device("cpu")
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LAST = 131_071  # the last position of a context of 128k


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Entries to place, and where."""

    entries: int = 33
    layers: int = 1
    heads: int = 1
    dim: int = 64
    width: int | None = None  # R, if it is not all of dim
    interleaved: bool = False
    dtype: torch.dtype = BF16  # of entries and out
    out: torch.dtype | None = None  # if it is another
    bits: Bits | None = None
    scales: torch.dtype = FP16
    prefixes: int = 1
    tables: int = 1  # rotations; the last of several turns nothing
    first: int = -20  # position; the others follow
    sliced: bool = False  # staged and rotation are slices of longer ones
    view: bool = False  # out is a strided view


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Entries to quantise."""

    entries: int = 33
    layers: int = 1
    heads: int = 1
    dim: int = 64
    bits: Bits = 8
    group: int = 16
    dtype: torch.dtype = BF16
    scales: torch.dtype = FP16


CASES = {
    "one-entry": Case(entries=1, layers=3, heads=3, dtype=FP32),
    "one-entry-of-a-wide-head": Case(entries=1, dim=256, first=LAST),
    "seven": Case(entries=7, layers=3, heads=2, dim=32, prefixes=2, dtype=FP16),
    "465": Case(entries=465, heads=3, dim=64, prefixes=5, first=LAST - 464, dtype=FP32),
    "465-in-codes": Case(entries=465, layers=3, dim=32, prefixes=4, bits=8, tables=2),
    "D80": Case(dim=80, layers=3, prefixes=3, first=LAST - 32),
    "D80-fp32": Case(dim=80, heads=5, prefixes=2, dtype=FP32, first=-LAST),
    "D96": Case(dim=96, heads=3, prefixes=5, dtype=FP16),
    "D128": Case(dim=128, layers=3, heads=3, prefixes=4),
    "D256-fp32": Case(dim=256, heads=3, dtype=FP32, first=LAST - 32),
    "interleaved": Case(dim=128, interleaved=True, heads=3, prefixes=2),
    "interleaved-D80": Case(dim=80, interleaved=True, layers=3, dtype=FP32, prefixes=3),
    "partial": Case(dim=80, width=32, layers=3, heads=3, dtype=FP32, prefixes=2),
    "partial-of-two": Case(dim=32, width=2, entries=7, dtype=FP32),
    "partial-interleaved": Case(dim=96, width=48, interleaved=True, heads=3, dtype=FP16),
    "tables": Case(layers=5, tables=3, prefixes=2, dtype=FP32),
    "tables-sliced": Case(layers=5, tables=3, heads=3, sliced=True, dtype=FP16, prefixes=3),
    "sliced-view": Case(dim=96, layers=3, heads=3, tables=2, sliced=True, view=True, prefixes=5),
    "view-interleaved": Case(interleaved=True, width=32, heads=3, view=True, dtype=FP32),
    "narrowed": Case(dtype=FP32, out=BF16, heads=3, prefixes=2),
    "widened": Case(dtype=FP16, out=FP32, dim=96, interleaved=True),
    "bf16-to-fp16": Case(dtype=BF16, out=FP16, dim=80),
    "int8": Case(bits=8, dim=128, heads=3, layers=3, prefixes=3),
    "int8-fp32-scales": Case(bits=8, scales=FP32, dim=80, dtype=FP32, view=True, prefixes=2),
    "int8-interleaved": Case(bits=8, dim=96, interleaved=True, layers=3, dtype=FP16),
    "int8-partial-sliced": Case(bits=8, dim=96, width=24, sliced=True, heads=3, tables=2, layers=3),
    "int4": Case(bits=4, dim=128, heads=3, layers=3, prefixes=5, dtype=FP16),
    "int4-fp32-scales": Case(bits=4, scales=FP32, dim=80, dtype=FP32, heads=3, first=LAST - 32),
    "int4-partial": Case(bits=4, dim=96, width=72, layers=3, dtype=FP32, prefixes=2),
    "int4-interleaved": Case(bits=4, dim=64, interleaved=True, heads=3, view=True),
    "int4-partial-interleaved": Case(bits=4, dim=80, width=20, interleaved=True, dtype=FP32),
    "int4-sliced": Case(bits=4, dim=256, entries=7, sliced=True, tables=2, layers=3, scales=FP32),
}
CODES = {
    "one-entry": Codes(entries=1, layers=3, heads=3, group=32),
    "seven": Codes(entries=7, layers=3, heads=2, dim=32, bits=4, group=4, dtype=FP16),
    "one-by-one": Codes(entries=7, group=1, dtype=FP32, scales=FP32),
    "465": Codes(entries=465, heads=3, dim=32, group=64, dtype=FP32),
    "465-in-4-bits": Codes(entries=465, dim=32, group=128, bits=4),
    "D80": Codes(dim=80, layers=3, heads=3, dtype=FP16, scales=FP32),
    "D96-in-4-bits": Codes(dim=96, layers=3, heads=3, bits=4, scales=FP32),
    "D128": Codes(dim=128, layers=3, heads=3),
    "D256-in-4-bits": Codes(dim=256, heads=3, bits=4, group=33, dtype=FP32),
}


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def entries_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Entries [T, L, 2, H, D] whose channels differ: constant, far from zero, tiny, and ordinary."""
    entries = 8 * torch.randn(shape, generator=random(sum(shape)))
    entries[..., 0] = 1.1
    entries[..., 1] += 400
    entries[..., 2] /= 2**10
    return entries.to(dtype)


def rotation_of(case: Case, n_entries: int, first: int) -> Rotation:
    width = case.width or case.dim
    made = [
        Rotary(
            inv_freq=tuple(base ** (-2 * i / width) for i in range(width // 2)),
            attention_scaling=scaling,
        )
        for base, scaling in ((1e4, 1.0), (5e5, 1.25), (1e6, 0.75))[: case.tables]
    ]
    if case.tables > 1:
        made[-1] = made[-1].still()
    table = RopeTable(
        rotaries=tuple(made),
        layers=tuple((i + 1) % case.tables for i in range(case.layers)),
        interleaved=case.interleaved,
    )
    return table.rotation(range(first, first + n_entries), CPU)


def buffer_of(case: Case, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer full of NaN, and the out [L, 2, B, H, N, D] that is all of it or lies in it."""
    dtype = case.out or case.dtype
    if not case.view:
        shape = (case.layers, 2, case.prefixes, case.heads, n_rows, case.dim)
        whole = torch.full(shape, torch.nan, dtype=dtype)
        return whole, whole
    shape = (2, case.prefixes, case.layers, n_rows + 5, case.heads, case.dim + 8)
    whole = torch.full(shape, torch.nan, dtype=dtype)
    return whole, whole.permute(2, 0, 1, 4, 3, 5)[:, :, :, :, 2:-3, 8:]


def to(thing: Quantised | Rotation, device: torch.device) -> Quantised | Rotation:
    """The same on another device."""
    parts = {field.name: getattr(thing, field.name) for field in fields(thing)}
    tensors = {k: v.to(device) for k, v in parts.items() if isinstance(v, torch.Tensor)}
    return type(thing)(**{**parts, **tensors})


def compare(case: Case, device: torch.device = CPU) -> dict[str, bool]:
    """Both implementations into buffers full of NaN."""
    n, margin = case.entries, 3 * case.sliced
    middle = slice(margin, margin + n)
    shape = (n + 2 * margin, case.layers, 2, case.heads, case.dim)
    entries = entries_of(shape, case.dtype)
    staged: torch.Tensor | Quantised = entries
    if case.bits:
        staged = reference.quantise(entries, case.bits, 16, case.scales)
    else:  # nothing but the middle may be read
        entries[:margin] = entries[margin + n :] = torch.nan
    angles = rotation_of(case, len(entries), case.first - margin)
    n_rows = n // case.prefixes + 3
    slots = torch.randperm(n_rows * case.prefixes, generator=random(n))[:n]

    expected_whole, expected = buffer_of(case, n_rows)
    reference.place(staged[middle], angles[middle], expected, slots)
    found_whole, found = buffer_of(case, n_rows)
    if device == CPU:
        before = entries.clone()
        gpu.place(staged[middle], angles[middle], found, slots)
        assert torch.equal(entries[middle], before[middle])
    else:
        there = found_whole.to(device)
        placed = there.as_strided(found.shape, found.stride(), found.storage_offset())
        there_staged = staged.to(device) if isinstance(staged, torch.Tensor) else to(staged, device)
        there_angles = to(angles, device)
        gpu.place(there_staged[middle], there_angles[middle], placed, slots.to(device))
        found_whole.copy_(there)

    def rows(out: torch.Tensor) -> torch.Tensor:  # [T, L, 2, H, D]
        return out.permute(2, 4, 0, 1, 3, 5)[slots // n_rows, slots % n_rows].double()

    numbers = reference.dequantise(staged) if isinstance(staged, Quantised) else entries
    numbers = numbers[middle].double()
    error = (rows(found) - rows(expected)).abs()
    info = torch.finfo(expected.dtype)
    ulp = info.eps * rows(expected).abs().clamp_min(info.tiny)
    # One ulp of the result, and of fp32 at the size of the pair: its two products may be fused, and so
    # may be the product and the sum that make a number of a code.
    size = numbers.abs() + partner(numbers, case).abs()
    if case.bits:
        size += numbers.abs().amax()
    keys, values = (ulp + 2**-22 * size).unbind(2)
    still = angles.layers == case.tables - 1 if case.tables > 1 else torch.zeros(case.layers) > 0
    moved = [not torch.equal(rows(found)[:, i, 0], numbers[:, i, 0]) for i in range(case.layers)]
    return {
        "keys_within_one_ulp": bool((error[:, :, 0] <= keys).all()),
        "values_within_one_ulp": bool((error[:, :, 1] <= values).all()),
        "values_are_the_input": bool(case.bits or case.out)
        or torch.equal(rows(found)[:, :, 1], numbers[:, :, 1]),
        "no_hole": not bool(rows(found).isnan().any()),
        "others_untouched": torch.equal(found_whole.isnan(), expected_whole.isnan()),
        "turned_where_not_still": bool(case.bits or case.out) or moved == (~still).tolist(),
    }


def partner(entries: torch.Tensor, case: Case) -> torch.Tensor:
    """The other of each pair; a dimension that is not turned is its own."""
    width = case.width or case.dim
    other = torch.arange(case.dim)
    other[:width] = other[:width] ^ 1 if case.interleaved else other[:width].roll(width // 2)
    return entries[..., other]


def compare_codes(case: Codes, device: torch.device = CPU) -> dict[str, bool]:
    """Both implementations of quantise; an entry not contiguous is as good as one that is."""
    shape = (case.layers, case.entries, 2, case.heads, case.dim)
    entries = entries_of(shape, case.dtype).transpose(0, 1)
    expected = reference.quantise(entries, case.bits, case.group, case.scales)
    found = gpu.quantise(entries.to(device), case.bits, case.group, case.scales)
    found = to(found, CPU)
    apart = numbers_of(found) - numbers_of(expected)
    same = {
        field.name: torch.equal(getattr(found, field.name), getattr(expected, field.name))
        for field in fields(Quantised)
        if field.name not in ("codes", "bits")
    }
    return {
        **same,
        "kinds": all(
            getattr(found, name).dtype == getattr(expected, name).dtype for name in (*same, "codes")
        ),
        "codes_within_one": bool((apart.abs() <= 1).all()),
        "codes_equal_almost_everywhere": bool((apart != 0).float().mean() < 1e-3),
    }


def numbers_of(made: Quantised) -> torch.Tensor:
    codes = made.codes if made.bits == 8 else reference.unpack(made.codes)
    return codes.int()


def refuses(side: int, what: float, scales: torch.dtype = FP16) -> bool:
    """Whether one bad entry, key or value, is refused as the reference refuses it."""
    entries = torch.randn(33, 1, 2, 1, 64)
    entries[20, 0, side, 0, 40] = what
    said = []
    for implementation in (reference.quantise, gpu.quantise):
        try:
            implementation(entries, 8, 16, scales)
        except ValueError as error:
            said.append(str(error))
    return len(said) == 2 and said[0] == said[1]


def refusals() -> dict[str, bool]:
    bad = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "large": 1e8, "-large": -1e8}
    found = {
        f"{side}-{name}": refuses(i, what)
        for i, side in enumerate(("key", "value"))
        for name, what in bad.items()
    }
    return {
        **found,
        "large-is-fine-in-fp32": not refuses(0, 1e8, FP32) and not refuses(1, 1e8, FP32),
    }


def nothing() -> dict[str, bool]:
    """No entries at all."""
    none = torch.empty(0, 1, 2, 1, 8)
    out = torch.full((1, 2, 1, 1, 4, 8), torch.nan)
    angles = rotation_of(Case(dim=8), 0, 0)
    gpu.place(none, angles, out, torch.empty(0, dtype=torch.int64))
    made, expected = (module.quantise(none, 4, 16) for module in (gpu, reference))
    return {
        "others_untouched": bool(out.isnan().all()),
        "codes_of_nothing": made.codes.shape == expected.codes.shape
        and made.key_scale.shape == expected.key_scale.shape,
    }


def far() -> dict[str, bool]:
    """Rows more than 2**31 elements apart, in memory that is reserved and mostly never touched."""
    apart = 2**30 + 8
    whole = torch.empty(3 * apart, dtype=BF16)
    out = whole.as_strided((1, 2, 1, 1, 3, 8), (0, 8, 0, 0, apart, 1))
    staged = torch.randn(3, 1, 2, 1, 8, generator=random(3)).to(BF16)
    slots = torch.tensor([2, 0, 1])
    gpu.place(staged, rotation_of(Case(dim=8), 3, 0), out, slots)
    return {"values_arrive": torch.equal(out[0, 1, 0, 0, slots], staged[:, 0, 1, 0])}


if __name__ == "__main__":
    results = {
        "place": {name: compare(case) for name, case in CASES.items()},
        "quantise": {name: compare_codes(case) for name, case in CODES.items()},
        "refusals": refusals(),
        "nothing": nothing(),
        "far": far(),
    }
    json.dump(results, sys.stdout)
