"""Laws of the reference: what every other implementation is measured against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.kernels import reference
from coinrag_integrations.engine.kernels.quantised import pack, unpack
from coinrag_integrations.engine.rope import RopeTable, Rotary, Rotation

CPU = torch.device("cpu")
FEW = settings(deadline=None, max_examples=60)
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def rotation(n: int, width: int, *, layers: int = 1, interleaved: bool = False) -> Rotation:
    """Any angles; every layer has its own."""
    angle = 3 * torch.rand(layers, n, width // 2)
    which = torch.arange(layers, dtype=torch.int32)
    return Rotation(cos=angle.cos(), sin=angle.sin(), layers=which, interleaved=interleaved)


def slots_of(n: int, prefixes: int, rows: int) -> torch.Tensor:
    return torch.randperm(prefixes * rows)[:n]


def placed(out: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of out that slots name: [T, L, 2, H, D]."""
    return out.permute(2, 4, 0, 1, 3, 5)[slots // out.shape[4], slots % out.shape[4]]


# -- place


def test_the_reference_fills_its_rows_and_no_other():
    staged, angles = torch.randn(150, 2, 2, 3, 8), rotation(150, 8, layers=2)
    out, slots = torch.full((2, 2, 4, 3, 50, 8), torch.nan), slots_of(150, 4, 50)
    reference.place(staged, angles, out, slots)
    found = placed(out, slots)
    assert not found.isnan().any()
    assert out.isnan().sum() == out.numel() - staged.numel()
    assert torch.equal(found[:, :, 0], reference.rotate(staged[:, :, 0], angles))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
def test_values_are_untouched(dtype):
    staged, slots = torch.randn(70, 2, 2, 3, 8).to(dtype), slots_of(70, 2, 40)
    out = torch.empty(2, 2, 2, 3, 40, 8, dtype=dtype)
    reference.place(staged, rotation(70, 8, layers=2), out, slots)
    assert torch.equal(placed(out, slots)[:, :, 1], staged[:, :, 1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_is_the_complex_product_it_claims_to_be(interleaved):
    keys, angles = torch.randn(5, 2, 3, 16), rotation(5, 16, layers=2, interleaved=interleaved)
    pairs = keys.unflatten(-1, (8, 2)) if interleaved else keys.unflatten(-1, (2, 8)).mT
    turn = torch.complex(angles.cos, angles.sin).transpose(0, 1)[:, :, None]  # [T, L, 1, R/2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    expected = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    torch.testing.assert_close(reference.rotate(keys, angles), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_not_turned_is_left_alone(interleaved):
    keys, angles = torch.randn(5, 2, 3, 16), rotation(5, 6, layers=2, interleaved=interleaved)
    turned = reference.rotate(keys, angles)
    assert torch.equal(turned[..., 6:], keys[..., 6:])
    assert torch.equal(turned[..., :6], reference.rotate(keys[..., :6], angles))


def test_every_layer_turns_by_its_own_table():
    keys, angles = torch.randn(5, 3, 2, 8), rotation(5, 8, layers=2)
    turned = reference.rotate(keys, replace(angles, layers=torch.tensor([1, 0, 1]).int()))
    for layer, table in enumerate([1, 0, 1]):
        alone = replace(angles, layers=torch.tensor([table]).int())
        assert torch.equal(turned[:, layer : layer + 1], reference.rotate(keys[:, [layer]], alone))


def test_the_reference_rounds_once():
    staged, angles = torch.randn(40, 1, 2, 1, 16).to(BF16), rotation(40, 16)
    out = torch.empty(1, 2, 1, 1, 40, 16, dtype=BF16)
    reference.place(staged, angles, out, torch.arange(40))
    exact = reference.rotate(staged[:, :, 0].float(), angles)
    assert torch.equal(placed(out, torch.arange(40))[:, :, 0], exact.to(BF16))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("first", [0, 100_000, -100_000])
def test_far_positions_lose_no_more_than_the_rounding_of_the_result(first, dtype, interleaved):
    width, positions = 64, range(first, first + 50)
    table = RopeTable(
        rotaries=(Rotary(inv_freq=tuple(5e5 ** (-2 * i / width) for i in range(width // 2))),),
        layers=(0,),
        interleaved=interleaved,
    )
    staged = torch.randn(50, 1, 2, 1, width).to(dtype)
    out = torch.empty(1, 2, 1, 1, 50, width, dtype=dtype)
    reference.place(staged, table.rotation(positions, CPU), out, torch.arange(50))

    angle = np.outer(np.asarray(positions), np.asarray(table.rotaries[0].inv_freq))
    turn = torch.from_numpy(np.exp(1j * angle))
    keys = staged[:, 0, 0, 0].double()
    pairs = keys.unflatten(-1, (-1, 2)) if interleaved else keys.unflatten(-1, (2, -1)).mT
    exact = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    found = out[0, 0, 0, 0].double()
    found = found.unflatten(-1, (-1, 2)) if interleaved else found.unflatten(-1, (2, -1)).mT
    # Cosine, sine, two products and a sum are each rounded in fp32, at the size of the pair; then
    # the result is rounded, by half an ulp at most.
    in_fp32 = 3 * 2**-24 * pairs.norm(dim=-1, keepdim=True)
    info = torch.finfo(dtype)
    half_an_ulp = 0 if dtype == FP32 else info.eps / 2 * exact.abs().clamp_min(info.tiny)
    assert ((found - exact).abs() <= half_an_ulp * (1 + 2**-20) + in_fp32).all()


def test_codes_are_placed_as_the_numbers_they_stand_for():
    made, slots = reference.quantise(torch.randn(150, 2, 2, 3, 8), 8, 16), slots_of(150, 4, 50)
    angles = rotation(150, 8, layers=2)
    outs = []
    for staged in (made, reference.dequantise(made)):
        out = torch.zeros(2, 2, 4, 3, 50, 8)
        reference.place(staged, angles, out, slots)
        outs.append(out)
    assert torch.equal(*outs)


# -- quantise


@st.composite
def ranges(draw):
    """Entries [T, L, 2, H, D] of channels with any offset and spread, some of them constant."""
    n, heads, dim = (
        draw(st.integers(1, 40)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([2, 8, 10])),
    )
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = st.sampled_from([0.0, 2.0**-20, 1e-3, 1.0, 30.0, 1000.0])
    offset = st.sampled_from([0.0, 1e-4, -1.0, 77.7, -1000.0, 30_000.0])
    sides = []
    for _ in range(2):
        noise = 2 * torch.rand(n, 2, heads, dim, generator=random) - 1
        scales = torch.tensor(draw(st.lists(spread, min_size=dim, max_size=dim)))
        offsets = torch.tensor(draw(st.lists(offset, min_size=dim, max_size=dim)))
        sides.append(noise * scales + offsets)
    return torch.stack(sides, dim=2)


def of_every_entry(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Scales or zeros [T, L, H, D] of keys and [T, L, H] of values: fp64 [T, L, 2, H, D]."""
    return torch.stack((keys, values[..., None].expand_as(keys)), dim=2).double()


@FEW
@given(
    entries=ranges(),
    bits=st.sampled_from([8, 4]),
    group=st.sampled_from([1, 3, 16, 64]),
    scales=st.sampled_from([FP16, FP32]),
)
def test_an_entry_is_off_by_half_its_scale_and_the_rounding_of_scale_and_zero(
    entries, bits, group, scales
):
    made = reference.quantise(entries, bits, group, scales)
    off = (reference.dequantise(made) - entries).double().abs()
    scale = of_every_entry(made.key_scale[made.key_group.long()], made.value_scale)
    zero = of_every_entry(made.key_zero[made.key_group.long()], made.value_zero)
    levels, info = 2**bits - 1, torch.finfo(scales)

    def rounding(number: torch.Tensor) -> torch.Tensor:
        return info.eps / 2 * number.abs().clamp_min(info.tiny)

    # The ends of a range move by what its scale and zero are rounded by, and codes stop there.
    ends = (levels * rounding(scale) + rounding(zero)) * (1 + 2 * info.eps)
    in_fp32 = 2**-22 * (entries.abs() + zero.abs() + levels * scale)
    assert (off <= scale / 2 + ends + in_fp32).all()


def test_a_constant_is_kept_exactly():
    entries = torch.full((20, 1, 2, 1, 8), 3.25)
    for bits in (8, 4):
        assert torch.equal(reference.dequantise(reference.quantise(entries, bits, 7)), entries)


@FEW
@given(
    st.lists(st.integers(0, 15), min_size=2, max_size=40).filter(lambda codes: not len(codes) % 2)
)
def test_unpacking_gives_what_was_packed(codes):
    made = torch.tensor([codes, codes[::-1]], dtype=torch.uint8)
    packed = pack(made)
    assert packed.shape == (2, len(codes) // 2)
    assert torch.equal(unpack(packed), made)


def test_a_byte_holds_a_dimension_of_either_half_of_a_head():
    assert pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8)).tolist() == [1 + 16 * 3, 2 + 16 * 4]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e8, -1e8])
def test_what_has_no_scale_is_refused(side, bad):
    entries = torch.randn(40, 2, 2, 3, 8)
    entries[33, 1, side, 2, 5] = bad
    with pytest.raises(ValueError, match="not finite, or too large for scales"):
        reference.quantise(entries, 8, 16)
    if abs(bad) == 1e8:
        reference.quantise(entries, 8, 16, FP32)


def test_codes_take_half_and_a_quarter_of_the_bytes_and_a_little_more():
    entries = torch.randn(512, 2, 2, 4, 128).to(BF16)
    whole = entries.numel() * entries.element_size()
    assert 0.5 < reference.quantise(entries, 8, 64).n_bytes / whole < 0.54
    assert 0.25 < reference.quantise(entries, 4, 64).n_bytes / whole < 0.29


def test_groups_are_consecutive_entries_and_know_nothing_of_each_other():
    entries = torch.randn(40, 2, 2, 3, 8)
    made = reference.quantise(entries, 8, 16)
    assert made.key_group.tolist() == [0] * 16 + [1] * 16 + [2] * 8
    assert made.key_scale.shape == (3, 2, 3, 8)
    alone = reference.quantise(entries[16:32], 8, 16)
    assert torch.equal(alone.codes, made.codes[16:32])
    assert torch.equal(alone.key_scale, made.key_scale[1:2])


def test_a_slice_of_codes_stands_for_a_slice_of_entries():
    made = reference.quantise(torch.randn(40, 2, 2, 3, 8), 4, 16)
    part = made[10:30]
    assert (len(part), part.head_dim) == (20, 8)
    assert torch.equal(reference.dequantise(part), reference.dequantise(made)[10:30])
