"""Oracle: the operations in Numba are those in plain torch, bit for bit."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.kernels import cpu, numba_kernels, reference
from coinrag_integrations.engine.kernels.quantised import Quantised
from coinrag_integrations.engine.rope import RopeTable, Rotary, Rotation

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAIRS = [(staged, out) for staged in DTYPES for out in DTYPES]
# T, L, H, D, R, prefixes
SHAPES = [
    (0, 3, 1, 64, 64, 1),
    (1, 1, 1, 32, 32, 1),
    (1, 5, 3, 64, 32, 2),
    (7, 3, 5, 80, 32, 3),
    (33, 1, 3, 96, 96, 4),
    (33, 5, 1, 128, 128, 5),
    (7, 3, 1, 256, 64, 2),
    (465, 3, 3, 64, 64, 2),
]
SPECIALS = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, -6e-8, 65519.0, 65520.0, 3.39e38)


@pytest.fixture(autouse=True)
def _many_parts(monkeypatch):
    """Small work is shared between threads too."""
    monkeypatch.setattr(cpu, "_RANGE_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def numbers(*shape, dtype=torch.float32, specials=False, seed=0):
    random = torch.Generator().manual_seed(seed)
    made = 8 * torch.randn(shape, generator=random)
    if specials and made.numel():
        where = torch.rand(shape, generator=random) < 0.1
        which = torch.randint(len(SPECIALS), shape, generator=random)
        made = torch.where(where, torch.tensor(SPECIALS)[which], made)
    return made.to(dtype)


def rotation(n, n_layers, width, *, interleaved=False, seed=0) -> Rotation:
    """Three tables, one of which turns nothing, used by the layers in turn."""
    plain = Rotary(inv_freq=tuple(1e4 ** (-2 * i / width) for i in range(width // 2)))
    scaled = Rotary(inv_freq=tuple(f / 4 for f in plain.inv_freq), attention_scaling=1.13)
    table = RopeTable(
        rotaries=(plain, plain.still(), scaled),
        layers=tuple(i % 3 for i in range(n_layers)),
        interleaved=interleaved,
    )
    random = np.random.default_rng(seed)
    return table.rotation(random.integers(-131_071, 131_072, n), CPU)


def shuffled(n, n_prefixes, n_rows, seed=0):
    """Slots of n entries, ragged over the prefixes."""
    random = torch.Generator().manual_seed(seed)
    return torch.randperm(n_prefixes * n_rows, generator=random)[:n]


def poisoned(n_layers, n_prefixes, n_heads, n_rows, head_dim, dtype):
    return torch.full((n_layers, 2, n_prefixes, n_heads, n_rows, head_dim), torch.nan, dtype=dtype)


def same(found, expected):
    """Bit for bit; of NaN only that it is NaN."""
    bits = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    is_nan = expected.isnan()
    return torch.equal(found.isnan(), is_nan) and torch.equal(
        found.masked_fill(is_nan, 0).view(bits), expected.masked_fill(is_nan, 0).view(bits)
    )


def parts(staged):
    if isinstance(staged, torch.Tensor):
        return (staged,)
    return tuple(getattr(staged, name) for name in Quantised.__slots__ if name != "bits")


def both(staged, turns, dtype, n_prefixes, seed=0):
    """What Numba and the reference make of it, and the slots; neither may touch what it is given."""
    n, n_layers, _, n_heads = parts(staged)[0].shape[:4]
    head_dim = staged.shape[-1] if isinstance(staged, torch.Tensor) else staged.head_dim
    n_rows = n // n_prefixes + 5
    slots = shuffled(n, n_prefixes, n_rows, seed)
    given_in = (*parts(staged), turns.cos, turns.sin, turns.layers, slots)
    before = [part.clone() for part in given_in]
    outs = [poisoned(n_layers, n_prefixes, n_heads, n_rows, head_dim, dtype) for _ in range(2)]
    for implementation, out in zip((cpu, reference), outs, strict=True):
        implementation.place(staged, turns, out, slots)
    for part, copy in zip(given_in, before, strict=True):
        torch.testing.assert_close(part, copy, rtol=0, atol=0, equal_nan=True)
    return *outs, slots


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("staged", "out"), PAIRS)
def test_placed_numbers_equal_the_reference(staged, out, shape, interleaved):
    n, n_layers, n_heads, head_dim, width, n_prefixes = shape
    entries = numbers(n, n_layers, 2, n_heads, head_dim, dtype=DTYPES[staged])
    turns = rotation(n, n_layers, width, interleaved=interleaved)
    found, expected, slots = both(entries, turns, DTYPES[out], n_prefixes)
    assert same(found, expected)
    n_rows = found.shape[4]
    rows = found.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)  # [B N, L, 2, H, D]
    assert not rows[slots].isnan().any()
    untouched = torch.ones(n_prefixes * n_rows, dtype=torch.bool)
    untouched[slots] = False
    assert rows[untouched].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("out", DTYPES)
def test_placed_codes_equal_the_reference(out, bits, scale_dtype, shape, interleaved):
    n, n_layers, n_heads, head_dim, width, n_prefixes = shape
    entries = numbers(n, n_layers, 2, n_heads, head_dim)
    codes = reference.quantise(entries, bits, 5, DTYPES[scale_dtype])
    turns = rotation(n, n_layers, width, interleaved=interleaved)
    found, expected, _ = both(codes, turns, DTYPES[out], n_prefixes)
    assert same(found, expected)


@pytest.mark.parametrize(("staged", "out"), PAIRS)
def test_nan_and_infinity_stay_what_they_are(staged, out):
    entries = numbers(33, 3, 2, 3, 64, dtype=DTYPES[staged], specials=True)
    found, expected, _ = both(entries, rotation(33, 3, 32), DTYPES[out], 2)
    assert same(found, expected)
    assert found.isinf().any()


def test_every_nan_and_every_tie_of_bf16_is_rounded_as_torch_does():
    random = torch.randint(-(2**31), 2**31, (8192,), generator=torch.Generator().manual_seed(0))
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FFF8000, -1, -0x7FFFFF])
    ties = (torch.arange(-(2**15), 2**15) << 16) + 0x8000
    bits = torch.cat((random, nans, ties)).to(torch.int32)
    entries = bits.view(torch.float32)[: len(bits) // 64 * 64].view(-1, 1, 1, 1, 64)
    entries = entries.expand(-1, 1, 2, 1, 64).contiguous()
    for dtype in DTYPES.values():
        found, expected, _ = both(entries, rotation(len(entries), 1, 2), dtype, 1)
        assert same(found[:, 1], expected[:, 1])


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_slices_of_entries_and_angles_are_placed(bits):
    entries = numbers(40, 3, 2, 2, 64, dtype=torch.bfloat16)
    staged = entries if bits is None else reference.quantise(entries, bits, 8)
    found, expected, _ = both(staged[5:38], rotation(50, 3, 64)[9:42], torch.bfloat16, 3)
    assert same(found, expected)


@pytest.mark.parametrize("bits", [None, 8])
def test_rows_of_a_larger_buffer_are_written_and_no_others(bits):
    entries = numbers(33, 3, 2, 2, 64, dtype=torch.bfloat16)
    staged = entries if bits is None else reference.quantise(entries, bits, 8)
    turns, slots = rotation(33, 3, 64), shuffled(33, 2, 20)
    buffers = [poisoned(5, 4, 6, 30, 96, torch.float16) for _ in range(2)]
    for implementation, buffer in zip((cpu, reference), buffers, strict=True):
        implementation.place(staged, turns, buffer[1:4, :, 1:4:2, 2:6:2, 7:27, 8:72], slots)
    assert same(*buffers)
    assert buffers[0].isfinite().sum() == entries.numel()


def test_staged_entries_may_be_strided():
    entries = numbers(9, 2, 2, 3, 64, dtype=torch.float16).transpose(1, 3)
    found, expected, _ = both(entries, rotation(9, 3, 64), torch.float16, 1)
    assert same(found, expected)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_entries_equal_the_reference(data):
    draw = data.draw
    n, n_layers, n_heads = (
        draw(st.integers(0, 40)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    bits = draw(st.sampled_from([None, 8, 4]))
    head_dim = draw(st.integers(1, 70))
    head_dim += head_dim % 2 if bits == 4 else 0
    width = 2 * draw(st.integers(0, head_dim // 2))
    seed, dtypes = draw(st.integers(0, 2**32)), st.sampled_from(list(DTYPES.values()))
    staged = numbers(
        n, n_layers, 2, n_heads, head_dim, dtype=draw(dtypes), specials=bits is None, seed=seed
    )
    if bits is not None:
        scale_dtype = draw(st.sampled_from([torch.float16, torch.float32]))
        staged = reference.quantise(staged, bits, draw(st.integers(1, 50)), scale_dtype)
    turns = rotation(n, n_layers, max(width, 1), interleaved=draw(st.booleans()), seed=seed)
    with mock.patch.object(torch, "get_num_threads", return_value=draw(st.integers(1, 5))):
        found, expected, _ = both(staged, turns, draw(dtypes), draw(st.integers(1, 5)), seed)
    assert same(found, expected)


def test_eight_threads_at_once_get_what_one_gets():
    entries = numbers(200, 4, 2, 2, 64, dtype=torch.bfloat16)
    turns, slots = rotation(200, 4, 64), shuffled(200, 3, 80)
    sources = [entries, reference.quantise(entries, 8, 16)]

    def placed(staged):
        out = poisoned(4, 3, 2, 80, 64, torch.bfloat16)
        cpu.place(staged, turns, out, slots)
        return out

    alone = [placed(staged) for staged in sources]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(placed, sources * 40))
    assert all(same(out, alone[i % 2]) for i, out in enumerate(together))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_its_own_threads():
    entries, turns = numbers(64, 3, 2, 2, 64), rotation(64, 3, 64)
    slots = shuffled(64, 1, 70)
    out = poisoned(3, 1, 2, 70, 64, torch.float32)
    cpu.place(entries, turns, out, slots)  # the parent's threads have started
    shared = torch.full_like(out, torch.nan).share_memory_()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            cpu.place(entries, turns, shared, slots)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert same(shared, out)


def test_without_a_folder_to_keep_it_in_a_kernel_is_compiled_again(monkeypatch):
    # A locator that finds no place for a file like ours: what a read-only machine looks like.
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "IPythonCacheLocator")
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(numba_kernels.place.py_func, cache=True)
    monkeypatch.setattr(numba_kernels, "place", numba_kernels.kernel(numba_kernels.place.py_func))
    found, expected, _ = both(numbers(7, 3, 2, 1, 32), rotation(7, 3, 32), torch.float32, 1)
    assert same(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([0, 1, 10])}, "there are 10 slots, but an index is 0 or 10"),
        ({"slots": torch.tensor([0, 1, -1])}, "there are 10 slots, but an index is -1 or 1"),
        ({"slots": torch.tensor([0, 1])}, "2 entries"),
        ({"turns": rotation(2, 3, 32)}, "2 of them"),
        ({"turns": rotation(3, 3, 34)}, "17 angles"),
        ({"turns": rotation(3, 4, 32), "staged": numbers(3, 4, 2, 1, 32)}, "cannot become rows"),
        ({"staged": numbers(3, 3, 2, 2, 32)}, "cannot become rows"),
        ({"out": torch.zeros(3, 2, 2, 1, 5, 64)[..., ::2]}, "cannot become rows"),
    ],
)
def test_what_would_be_written_elsewhere_is_refused(change, message):
    fits = {
        "staged": numbers(3, 3, 2, 1, 32),
        "turns": rotation(3, 3, 32),
        "out": torch.zeros(3, 2, 2, 1, 5, 32),
        "slots": torch.tensor([0, 7, 9]),
    }
    cpu.place(*fits.values())
    fits = {**fits, **change}
    fits["out"].zero_()
    with pytest.raises(ValueError, match=message):
        cpu.place(*fits.values())
    assert not fits["out"].any()


def test_codes_of_groups_that_are_not_there_are_refused():
    codes = reference.quantise(numbers(3, 1, 2, 1, 32), 8, 1)
    codes.key_group[1] = 3
    with pytest.raises(ValueError, match="there are 3 groups of keys, but an index is 0 or 3"):
        cpu.place(codes, rotation(3, 1, 32), torch.zeros(1, 2, 1, 1, 3, 32), torch.arange(3))


@pytest.mark.parametrize("group", [1, 5, 32, 1000])
@pytest.mark.parametrize("shape", [shape[:4] for shape in SHAPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_equal_the_reference(bits, dtype, shape, group):
    n, n_layers, n_heads, head_dim = shape
    entries = numbers(n, n_layers, 2, n_heads, head_dim, dtype=DTYPES[dtype])
    entries[n // 2 :, :, 0, 0, :3] = 2.5  # channels that are the same all over: their scale is zero
    entries[n // 2 :, :, 1] = -1.0
    before = entries.clone()
    for scale_dtype in (torch.float16, torch.float32):
        found, expected = (
            implementation.quantise(entries, bits, group, scale_dtype)
            for implementation in (cpu, reference)
        )
        assert found.bits == expected.bits
        for ours, theirs in zip(parts(found), parts(expected), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    assert torch.equal(entries, before)


@pytest.mark.parametrize("where", [(0, 0, 0, 0, 0), (5, 1, 0, 1, 31), (5, 1, 1, 1, 31)])
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf, 1e8])
def test_what_codes_cannot_hold_is_refused(what, where):
    entries = numbers(7, 2, 2, 2, 32)
    entries[where] = what
    for implementation in (cpu, reference):
        with pytest.raises(ValueError, match="cannot be quantised"):
            implementation.quantise(entries, 8, 3)
