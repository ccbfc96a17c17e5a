"""Laws of rotation: angles add up, zero does nothing, negative positions are positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.kernels.reference import rotate
from coinrag_integrations.engine.rope import RopeTable, Rotary
from tests.tiny import SUPPORTED, supported_model

CPU = torch.device("cpu")
ROTARY = Rotary(inv_freq=tuple(10_000.0 ** (-i / 8) for i in range(8)))
FEW = settings(deadline=None, max_examples=60)
positions = st.integers(-5000, 5000)


def keys(n: int) -> torch.Tensor:
    """[T, L, H, D]"""
    return torch.randn(n, 3, 2, 16, generator=torch.Generator().manual_seed(n))


def table(*rotaries: Rotary, layers=None, interleaved: bool = False) -> RopeTable:
    return RopeTable(rotaries=rotaries, layers=tuple(layers or (0, 0, 0)), interleaved=interleaved)


def turned(k: torch.Tensor, by: list[int], rope: RopeTable | None = None) -> torch.Tensor:
    return rotate(k, (rope or table(ROTARY)).rotation(by, CPU))


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
    rotary = next(m for m in model.hf.modules() if hasattr(m, "rope_type"))
    kinds = getattr(model.hf.config, "layer_types", None)
    rotation, n = model.rope.rotation(range(64), CPU), model.rope.width // 2
    assert rotation.cos.dtype is rotation.sin.dtype is torch.float32
    for layer, turns in enumerate(model.rope.turns):
        # Gemma 3 has frequencies of their own for each type of layer.
        kind = (kinds[layer],) if isinstance(rotary.rope_type, dict) else ()
        theirs = rotary(torch.zeros(1, 64, 64), torch.arange(64)[None], *kind)
        found = (angles[model.rope.layers[layer]] for angles in (rotation.cos, rotation.sin))
        for ours, own in zip(found, theirs, strict=True):
            # Each angle is given twice: Cohere's one beside the other, all others' in two halves.
            expected = own[0, :, ::2] if name == "cohere" else own[0, :, :n]
            same = torch.allclose(ours, expected, rtol=1e-5, atol=1e-5)
            assert same == turns


def test_angles_far_out_keep_the_precision_of_float64():
    far = 1_000_003
    rotation = table(ROTARY).rotation([far], CPU)
    exact = np.asarray(ROTARY.inv_freq, dtype=np.longdouble) * far
    np.testing.assert_allclose(
        rotation.cos[0, 0].numpy(), np.cos(exact).astype(np.float32), atol=2e-7
    )
    np.testing.assert_allclose(
        rotation.sin[0, 0].numpy(), np.sin(exact).astype(np.float32), atol=2e-7
    )


def test_angles_of_no_positions_are_empty():
    rotation = table(ROTARY).rotation([], CPU)
    assert rotation.cos.shape == rotation.sin.shape == (1, 0, 8)
    assert len(rotation) == 0


def test_a_part_of_a_rotation_turns_its_entries_as_the_whole_does():
    k, rotation = keys(9), table(ROTARY).rotation(range(3, 12), CPU)
    assert len(rotation[2:5]) == 3
    assert torch.equal(rotate(k, rotation)[2:5], rotate(k[2:5], rotation[2:5]))


def test_layers_are_turned_by_their_own_table_and_those_without_not_at_all():
    slow = Rotary(inv_freq=tuple(f / 7 for f in ROTARY.inv_freq))
    rope = table(ROTARY, slow, ROTARY.still(), layers=(1, 2, 0))
    assert rope.turns == (True, False, True)
    k, by = keys(5), [1, -4, 900, 0, 33]
    found = turned(k, by, rope)
    assert torch.equal(found[:, 0], turned(k, by, table(slow))[:, 0])
    assert torch.equal(found[:, 1], k[:, 1])
    assert torch.equal(found[:, 2], turned(k, by)[:, 2])


@pytest.mark.parametrize("interleaved", [False, True])
def test_dimensions_behind_the_width_are_left_alone(interleaved):
    narrow = table(Rotary(inv_freq=ROTARY.inv_freq[:3]), interleaved=interleaved)
    assert narrow.width == 6
    k = keys(4)
    found = turned(k, [5, 6, 7, 8], narrow)
    assert torch.equal(found[..., 6:], k[..., 6:])
    assert not torch.equal(found[..., :6], k[..., :6])


def test_interleaved_pairs_are_half_split_ones_in_another_order():
    k, by = keys(6), [0, 1, 5, -3, 100, 4000]
    order = torch.arange(16).reshape(8, 2).T.flatten()  # 0 2 4 … 1 3 5 …
    found = turned(k, by, table(ROTARY, interleaved=True))
    assert torch.equal(found[..., order], turned(k[..., order], by))


def test_the_digest_tells_everything_apart_that_changes_the_angles():
    ropes = [
        table(ROTARY),
        table(Rotary(inv_freq=ROTARY.inv_freq, attention_scaling=1.1)),
        table(Rotary(inv_freq=ROTARY.inv_freq[:-1])),
        table(ROTARY, interleaved=True),
        table(ROTARY, ROTARY.still(), layers=(0, 0, 1)),
        table(ROTARY, ROTARY.still(), layers=(0, 1, 0)),
    ]
    assert len({rope.digest for rope in ropes}) == len(ropes)
    assert table(ROTARY).digest == table(ROTARY).digest
