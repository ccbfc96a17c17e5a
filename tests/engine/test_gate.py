"""The gate measures, and fails closed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from coinrag_integrations.engine import Engine, gate
from coinrag_integrations.engine.gate import GateResult
from coinrag_integrations.engine.kernels.reference import place
from coinrag_integrations.engine.rope import RopeTable
from coinrag_integrations.errors import UnsupportedModelError
from tests.tiny import SUPPORTED, supported_model, tiny_model


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_models_pass_with_room_to_spare(name):
    result = gate.check(supported_model(name), place)
    assert max(result.keys, result.values, result.logits) < result.tolerance / 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_models_pass_in_16_bits(name, dtype):
    config_class, options = SUPPORTED[name]
    model = tiny_model(config_class, dtype=dtype, **{**options, "initializer_range": 0.1})
    assert gate.check(model, place).passed


def tampered(model, **changes):
    (rotary,) = model.rope.rotaries
    wrong = dataclasses.replace(model.rope, rotaries=(dataclasses.replace(rotary, **changes),))
    return dataclasses.replace(model, rope=wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda rope: {"attention_scaling": rope.attention_scaling * 1.1},
        lambda rope: {"inv_freq": tuple(2 * f for f in rope.inv_freq)},
        lambda rope: {"inv_freq": rope.inv_freq[::-1]},
        lambda rope: {"inv_freq": tuple(-f for f in rope.inv_freq)},
        lambda rope: {"inv_freq": rope.inv_freq[:-1]},
        lambda rope: {"inv_freq": (float("nan"), *rope.inv_freq[1:])},
    ],
    ids=["scaled", "twice-as-fast", "reversed", "backwards", "too-few", "nan"],
)
def test_a_tampered_rotation_is_refused(change, dtype, tmp_path):
    options = {} if dtype is torch.float32 else {"initializer_range": 0.1}
    model = tiny_model(dtype=dtype, **options)
    wrong = tampered(model, **change(model.rope.rotaries[0]))
    with pytest.raises(UnsupportedModelError):
        gate.check(wrong, place)
    with pytest.raises(UnsupportedModelError):
        Engine(wrong, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_wrong_kernel_is_refused():
    def shifted(staged, rotation, out, slots):
        angles = {"cos": rotation.cos.roll(1, 1), "sin": rotation.sin.roll(1, 1)}
        place(staged, dataclasses.replace(rotation, **angles), out, slots)

    def unturned(staged, rotation, out, slots):
        angles = {"cos": torch.ones_like(rotation.cos), "sin": torch.zeros_like(rotation.sin)}
        place(staged, dataclasses.replace(rotation, **angles), out, slots)

    def interleaved(staged, rotation, out, slots):
        place(staged, dataclasses.replace(rotation, interleaved=True), out, slots)

    def swapped(staged, rotation, out, slots):
        place(staged.flip(2), rotation, out, slots)

    def reordered(staged, rotation, out, slots):
        place(staged, rotation, out, slots.flip(0))

    for wrong in (shifted, unturned, interleaved, swapped, reordered):
        with pytest.raises(UnsupportedModelError, match="composed KV differs"):
            gate.check(supported_model("llama"), wrong)


def test_weights_that_are_not_numbers_are_refused():
    model = tiny_model()
    with torch.no_grad():
        model.hf.model.layers[0].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModelError):
        gate.check(model, place)


def test_an_error_that_is_no_number_does_not_pass():
    good = {"first_keys": 0.0, "keys": 0.0, "values": 0.0, "logits": 0.0}
    good |= {"first_tolerance": 0.1, "tolerance": 0.1}
    assert GateResult(**good).passed
    for name in ("first_keys", "keys", "values", "logits"):
        assert not GateResult(**{**good, name: float("nan")}).passed
        assert not GateResult(**{**good, name: 0.11}).passed


def test_the_engine_keeps_what_the_gate_measured(engine):
    assert engine.gate.passed
    assert isinstance(engine.model.rope, RopeTable)
