"""Laws of rotation: angles add up, zero does nothing, negative positions are positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.kernels.reference import rotate
from coinrag_integrations.engine.rope import RopeTable
from tests.tiny import SUPPORTED, supported_model

CPU = torch.device("cpu")
TABLE = RopeTable(inv_freq=tuple(10_000.0 ** (-i / 8) for i in range(8)))
FEW = settings(deadline=None, max_examples=60)
positions = st.integers(-5000, 5000)


def keys(n: int) -> torch.Tensor:
    return torch.randn(2, 3, n, 16, generator=torch.Generator().manual_seed(n))


def turned(k: torch.Tensor, by: list[int]) -> torch.Tensor:
    return rotate(k, *TABLE.angles(by, CPU))


@FEW
@given(pairs=st.lists(st.tuples(positions, positions), min_size=1, max_size=9))
def test_turning_by_a_and_then_by_b_is_turning_by_their_sum(pairs):
    k = keys(len(pairs))
    twice = turned(turned(k, [a for a, _ in pairs]), [b for _, b in pairs])
    once = turned(k, [a + b for a, b in pairs])
    torch.testing.assert_close(twice, once, rtol=1e-5, atol=1e-5)


def test_turning_by_zero_is_the_identity():
    k = keys(7)
    assert torch.equal(turned(k, [0] * 7), k)


@FEW
@given(by=st.lists(positions, min_size=1, max_size=9))
def test_turning_back_gives_the_key_again(by):
    k = keys(len(by))
    torch.testing.assert_close(turned(turned(k, by), [-p for p in by]), k, rtol=1e-5, atol=1e-5)


@FEW
@given(a=positions, b=positions, shift=positions)
def test_dot_products_see_only_the_difference_of_positions(a, b, shift):
    q, k = keys(1), keys(1).flip(-1)
    here = (turned(q, [a]) * turned(k, [b])).sum(-1)
    there = (turned(q, [a + shift]) * turned(k, [b + shift])).sum(-1)
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)


def test_rotation_leaves_its_input_alone_and_computes_in_fp32():
    k = keys(3).to(torch.bfloat16)
    before = k.clone()
    assert turned(k, [5, 6, 7]).dtype is torch.float32
    assert torch.equal(k, before)


@pytest.mark.parametrize("name", SUPPORTED)
def test_angles_are_those_of_the_models_own_rotary_module(name):
    model = supported_model(name)
    rotary = model.hf.model.rotary_emb
    where = torch.arange(64)[None]
    theirs_cos, theirs_sin = rotary(torch.zeros(1, 64, 64), where)
    cos, sin = model.rope.angles(range(64), CPU)
    torch.testing.assert_close(cos, theirs_cos[0, :, :8], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, theirs_sin[0, :, :8], rtol=1e-5, atol=1e-5)
    assert cos.dtype is sin.dtype is torch.float32


def test_angles_far_out_keep_the_precision_of_float64():
    far = 1_000_003
    cos, sin = TABLE.angles([far], CPU)
    exact = np.asarray(TABLE.inv_freq, dtype=np.longdouble) * far
    np.testing.assert_allclose(cos[0].numpy(), np.cos(exact).astype(np.float32), atol=2e-7)
    np.testing.assert_allclose(sin[0].numpy(), np.sin(exact).astype(np.float32), atol=2e-7)


def test_angles_of_no_positions_are_empty():
    cos, sin = TABLE.angles([], CPU)
    assert cos.shape == sin.shape == (0, 8)


def test_the_digest_tells_frequencies_and_scalings_apart():
    other = RopeTable(inv_freq=TABLE.inv_freq, attention_scaling=1.1)
    assert len({TABLE.digest, other.digest, RopeTable(inv_freq=TABLE.inv_freq[:-1]).digest}) == 3
    assert RopeTable(inv_freq=TABLE.inv_freq).digest == TABLE.digest
