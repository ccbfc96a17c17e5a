"""What is read of a model, and the refusal, with its reason, of those that cannot be moved."""

from __future__ import annotations

import pytest
import torch
import transformers

from coinrag_integrations.engine import describe_model, gate, hf
from coinrag_integrations.engine.kernels.reference import place
from coinrag_integrations.errors import UnsupportedModelError
from tests.tiny import (
    SUPPORTED,
    byte_tokenizer,
    forward,
    own_kv,
    supported_model,
    tiny_hf,
    tiny_model,
)

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
    "mamba-recurrent": (transformers.MambaConfig, {}, "layers of type linear_attention"),
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
    "deepseek-mla": (transformers.DeepseekV2Config, {}, "ordinary multi-head attention"),
    "lfm2-convolution": (
        transformers.Lfm2Config,
        {"layer_types": ["conv", "full_attention", "conv"]},
        "layers of type conv",
    ),
    "gemma3-bidirectional": (
        transformers.Gemma3TextConfig,
        {"head_dim": 16, "use_bidirectional_attention": True},
        "not causal",
    ),
    "m-rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], **THETA}},
        "several axes",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_moved_is_refused_with_the_reason(name):
    config_class, options, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        tiny_model(config_class, **options)
    assert "Use a decoder with RoPE" in str(caught.value)


def test_a_model_without_any_rotary_module_is_not_said_to_have_several():
    with pytest.raises(UnsupportedModelError) as caught:
        tiny_model(transformers.GPTJConfig)
    assert "its layers use different rotary frequencies" not in str(caught.value)


@pytest.mark.parametrize("name", SUPPORTED)
def test_layout_window_and_frequencies_are_read_from_the_model(name):
    model = supported_model(name)
    layout, config = model.layout, model.hf.config
    own = own_kv(model.hf, [5, 6, 7])
    assert own.shape == layout.prefixes(1, 3)
    assert layout.n_layers == config.num_hidden_layers == len(model.rope.layers)
    assert layout.dtype is torch.float32
    assert model.window == 4096
    scalings = {rotary.attention_scaling for rotary in model.rope.rotaries}
    assert all(s > 1.1 for s in scalings) if name == "llama-yarn" else scalings == {1.0}


def test_what_a_model_turns_is_seen_not_looked_up():
    widths = {name: supported_model(name).rope.width for name in SUPPORTED}
    partial = {"phi4-mini": 12, "glm4": 8, "stablelm": 4, "gpt-neox": 4}
    assert {name: width for name, width in widths.items() if width != 16} == partial
    assert {n for n in SUPPORTED if supported_model(n).rope.interleaved} == {"cohere", "glm4"}
    gemma, smol = supported_model("gemma3").rope, supported_model("smollm3").rope
    assert gemma.layers == (0, 0, 0, 0, 0, 1)
    assert len({rotary.inv_freq for rotary in gemma.rotaries}) == 2
    assert smol.turns == (True, True, True, False)


def test_scaled_frequencies_differ_from_plain_ones():
    digests = {n: supported_model(n).rope.digest for n in SUPPORTED if n.startswith("llama")}
    assert len(set(digests.values())) == 4


def test_the_windows_of_the_layers_are_read_and_do_not_bound_the_context():
    windows = {name: supported_model(name).layer_windows for name in SUPPORTED}
    assert {n: w for n, w in windows.items() if w != (None,)} == {
        "gemma2": (None, 24),
        "gemma3": (None, 24),
        "mistral-windowed": (24,),
        "qwen2-mixed": (None, 24),
    }
    # Qwen2 names a window that it does not use.
    assert tiny_model(transformers.Qwen2Config, sliding_window=64).layer_windows == (None,)


def test_an_attention_that_takes_no_mask_is_refused_with_the_way_out():
    model = supported_model("llama").hf
    mask = {None: torch.ones(1, 1, 1, 1, dtype=torch.bool)}
    kv = torch.zeros(3, 2, 1, 2, 1, 16)
    before = model.config._attn_implementation
    try:
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(UnsupportedModelError, match="load it with attn_implementation='sdpa'"):
            hf.next_logits(model, torch.tensor([[5]]), hf.prefix_cache(kv, 0), visible=mask)
    finally:
        model.config._attn_implementation = before


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral-windowed", "smollm3"])
def test_eager_attention_is_masked_as_sdpa_is(name):
    config_class, options = SUPPORTED[name]
    eager = tiny_model(config_class, attn_implementation="eager", **options)
    assert eager.hf.config._attn_implementation == "eager"
    assert gate.check(eager, place).passed


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
    kv = torch.empty(3, 2, 1, 2, 8, 16, dtype=torch.bfloat16)
    ours = hf.next_logits(model, torch.tensor([[5, 6, 7]]), hf.prefix_cache(kv, 0))
    assert (ours.dtype, ours.shape) == (torch.float32, (1, 512))
    torch.testing.assert_close(ours[0], forward(model, [5, 6, 7])[-1].float(), rtol=0.05, atol=0.1)


def test_stop_ids_come_from_model_and_tokenizer():
    tokenizer = byte_tokenizer()
    model = tiny_hf(eos_token_id=[5, 6])
    model.generation_config.eos_token_id = [6, 7]
    described = describe_model("m", model, tokenizer)
    assert described.stop_ids == {5, 6, 7, tokenizer.eos_token_id}
