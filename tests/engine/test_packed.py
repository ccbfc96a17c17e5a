"""Packed weights multiply as the parameters do, and only where that pays."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from coinrag_integrations.engine import gate, load_model, packed
from coinrag_integrations.engine.kernels.reference import place
from coinrag_integrations.engine.model import hash_weights
from coinrag_integrations.errors import ConfigError
from tests.tiny import save_tiny, tiny_hf

needs_onednn = pytest.mark.skipif(
    not packed.can_pack(tiny_hf(dtype=torch.bfloat16)), reason="oneDNN has no bf16 here"
)


@needs_onednn
@pytest.mark.parametrize("n", [1, 7, 30, 256, 257, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_gives_what_the_layer_gives(n, bias):
    torch.manual_seed(n)
    layer = nn.Linear(96, 160, bias=bias).to(torch.bfloat16)
    x = torch.randn(2, n, 96).to(torch.bfloat16)
    with torch.inference_mode():
        expected = layer(x)
        packed.pack_linears(layer)
        torch.testing.assert_close(layer(x), expected, rtol=0.01, atol=0.01)


@needs_onednn
def test_packing_is_used_for_few_tokens_and_left_for_many_and_for_gradients(monkeypatch):
    layer = nn.Linear(32, 48).to(torch.bfloat16)
    packed.pack_linears(layer)
    calls = []
    monkeypatch.setattr(
        nn.functional, "linear", lambda x, *_: calls.append(x.shape[0]) or torch.zeros(1)
    )
    with torch.no_grad():
        layer(torch.ones(packed.MAX_TOKENS, 32, dtype=torch.bfloat16))
        assert calls == []
        layer(torch.ones(packed.MAX_TOKENS + 1, 32, dtype=torch.bfloat16))
    layer(torch.ones(2, 32, dtype=torch.bfloat16))
    assert calls == [packed.MAX_TOKENS + 1, 2]


@needs_onednn
def test_a_loaded_model_is_packed_and_is_the_same_model(tmp_path):
    folder = save_tiny(tmp_path / "m", initializer_range=0.1)
    plain = load_model(folder, dtype="bfloat16", device="cpu", pack=False)
    fast = load_model(folder, dtype="bfloat16", device="cpu")
    assert "forward" in vars(fast.hf.lm_head)
    assert "forward" not in vars(plain.hf.lm_head)
    assert fast.weights == plain.weights == hash_weights(fast.hf)
    assert set(fast.hf.state_dict()) == set(plain.hf.state_dict())
    assert gate.check(fast, place).passed
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        a, b = fast.hf(ids).logits, plain.hf(ids).logits
    torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    packed.unpack_linears(fast.hf)
    with torch.inference_mode():
        assert torch.equal(fast.hf(ids).logits, b)


@needs_onednn
def test_a_packed_layer_can_be_copied_and_pickled():
    layer = nn.Linear(32, 48).to(torch.bfloat16)
    packed.pack_linears(layer)
    x = torch.randn(3, 32).to(torch.bfloat16)
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert made.forward.module is made
        with torch.no_grad():
            expected = layer(x)
            torch.testing.assert_close(made(x), expected, rtol=0.01, atol=0.01)
            made.weight.zero_()
            made.bias.zero_()
            assert (made(x) == 0).all()  # its own parameters
            assert torch.equal(layer(x), expected)


@needs_onednn
@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_changed_weight_is_used_and_not_what_was_packed(how):
    layer = nn.Linear(32, 48, bias=False).to(torch.bfloat16)
    packed.pack_linears(layer)
    with torch.no_grad():
        x = torch.ones(2, 32, dtype=torch.bfloat16)
        assert layer(x).any()
        if how == "written":
            layer.weight.zero_()
        else:
            layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
        assert not layer(x).any()


def test_models_that_cannot_be_packed_are_not_and_say_so_when_asked(tmp_path):
    folder = save_tiny(tmp_path / "m")
    assert "forward" not in vars(load_model(folder, dtype="float32", device="cpu").hf.lm_head)
    with pytest.raises(ConfigError, match=r"oneDNN does not multiply torch\.float32 on cpu"):
        load_model(folder, dtype="float32", device="cpu", pack=True)


def test_what_packing_takes_is_the_linear_layers():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4, bias=False))
    assert packed.packed_bytes(model) == (8 * 16 + 16 * 4) * 4
