"""What is read of a model, and the refusal, with its reason, of those that cannot be moved."""

from __future__ import annotations

import pytest
import torch
import transformers

from coinrag_integrations.engine import describe_model, gate, hf
from coinrag_integrations.engine.kernels.reference import place
from coinrag_integrations.errors import UnsupportedModelError
from tests.tiny import SUPPORTED, byte_tokenizer, forward, supported_model, tiny_hf, tiny_model

THETA = {"rope_theta": 10_000.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    **THETA,
}
REFUSED = {
    "gpt2-learned": (transformers.GPT2Config, {}, "no rotary position embedding"),
    "opt-learned": (transformers.OPTConfig, {}, "no rotary position embedding"),
    "bloom-alibi": (transformers.BloomConfig, {}, "no rotary position embedding"),
    "mamba-recurrent": (transformers.MambaConfig, {}, "no rotary position embedding"),
    "llama-dynamic": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **THETA}},
        "'dynamic' changes the frequencies with the length",
    ),
    "phi3-longrope": (
        transformers.Phi3Config,
        {"rope_parameters": LONGROPE},
        "'longrope' changes the frequencies with the length",
    ),
    "stablelm-partial": (transformers.StableLmConfig, {}, "rotates 4 of the 16 dimensions"),
    "neox-partial": (transformers.GPTNeoXConfig, {}, "rotates 4 of the 16 dimensions"),
    "gemma3-two-thetas": (
        transformers.Gemma3TextConfig,
        {"head_dim": 16, "query_pre_attn_scalar": 16},
        "different rotary frequencies",
    ),
    "deepseek-mla": (transformers.DeepseekV2Config, {}, "ordinary multi-head attention"),
    "lfm2-convolution": (
        transformers.Lfm2Config,
        {"layer_types": ["conv", "full_attention", "conv"]},
        "layers of type conv",
    ),
    "m-rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], **THETA}},
        "several axes",
    ),
}
REFUSED_BY_THE_GATE = {
    # Dimensions 2i and 2i + 1 form a pair, not i and i + D/2.
    "cohere-interleaved": (transformers.CohereConfig, {}),
    # Every fourth layer has no positions at all.
    "smollm3-nope-layer": (transformers.SmolLM3Config, {"num_hidden_layers": 4}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_moved_is_refused_with_the_reason(name):
    config_class, options, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        tiny_model(config_class, **options)
    assert "Use a decoder with full RoPE" in str(caught.value)


@pytest.mark.parametrize("name", REFUSED_BY_THE_GATE)
def test_a_model_of_another_rotation_is_refused_by_the_gate(name):
    config_class, options = REFUSED_BY_THE_GATE[name]
    model = tiny_model(config_class, **options)
    with pytest.raises(UnsupportedModelError, match=r"not of a supported kind|not supported"):
        gate.check(model, place)


def test_a_model_without_any_rotary_module_is_not_said_to_have_several():
    with pytest.raises(UnsupportedModelError) as caught:
        tiny_model(transformers.GPTJConfig)
    assert "its layers use different rotary frequencies" not in str(caught.value)


@pytest.mark.parametrize("name", SUPPORTED)
def test_layout_window_and_frequencies_are_read_from_the_model(name):
    model = supported_model(name)
    layout = model.layout
    assert (layout.n_layers, layout.n_kv_heads, layout.head_dim) == (3, 2, 16)
    assert layout.dtype is torch.float32
    assert model.window == 4096
    assert len(model.rope.inv_freq) == 8
    yarn = name == "llama-yarn"
    assert (model.rope.attention_scaling > 1.1) == yarn
    assert yarn or model.rope.attention_scaling == 1.0


def test_scaled_frequencies_differ_from_plain_ones():
    digests = {n: supported_model(n).rope.digest for n in SUPPORTED if n.startswith("llama")}
    assert len(set(digests.values())) == 4


def test_a_sliding_window_bounds_the_context():
    config = {"sliding_window": 128}
    assert tiny_model(transformers.MistralConfig, **config).window == 128
    assert tiny_model(transformers.MistralConfig, sliding_window=None).window == 4096
    mixed = tiny_model(
        transformers.Qwen2Config,
        sliding_window=64,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )
    assert mixed.window == 64
    # Qwen2 names a window that it does not use.
    assert tiny_model(transformers.Qwen2Config, sliding_window=64).window == 4096


def test_a_model_with_a_sliding_window_is_right_up_to_its_window():
    model = tiny_model(transformers.MistralConfig, sliding_window=48)
    assert gate.check(model, place).passed


def test_a_head_dimension_of_its_own_is_respected():
    model = tiny_model(transformers.Qwen3Config, head_dim=32)
    assert model.layout.head_dim == 32
    assert gate.check(model, place).passed


def test_heads_without_grouping_are_respected():
    model = tiny_model(num_key_value_heads=4)
    assert model.layout.n_kv_heads == 4
    assert gate.check(model, place).passed


def test_the_logits_are_those_after_the_last_token_in_fp32():
    model = tiny_hf(dtype=torch.bfloat16)
    kv = torch.empty(3, 2, 2, 8, 16, dtype=torch.bfloat16)
    ours = hf.next_logits(model, torch.tensor([[5, 6, 7]]), hf.prefix_cache(kv, 0))
    assert (ours.dtype, ours.shape) == (torch.float32, (512,))
    torch.testing.assert_close(ours, forward(model, [5, 6, 7])[-1].float(), rtol=0.05, atol=0.1)


def test_stop_ids_come_from_model_and_tokenizer():
    tokenizer = byte_tokenizer()
    model = tiny_hf(eos_token_id=[5, 6])
    model.generation_config.eos_token_id = [6, 7]
    described = describe_model("m", model, tokenizer)
    assert described.stop_ids == {5, 6, 7, tokenizer.eos_token_id}
