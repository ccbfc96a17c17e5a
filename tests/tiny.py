"""Tiny real models and parts for tests: random weights, real classes, no network."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
import xxhash
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from coinrag_integrations.engine import Engine, LoadedModel, describe_model, hf
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import reference
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.types import Chunk, Document

torch.set_num_threads(1)  # threads cost tiny models five times what they gain

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows tools, calls and results as Qwen's does, in fewer words.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "Tools:\n{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}<|im_end|>{{ '\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m['content'] }}\n</tool_response><|im_end|>{{ '\n' }}"
    "{% elif not (tools and loop.first and m['role'] == 'system') %}"
    "<|im_start|>{{ m['role'] + '\n' + m['content'] }}{% for call in m['tool_calls'] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}<|im_end|>{{ '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 512
_CORPUS = [
    "The tidal organ of Marenqué was built by Bastien Roule in 1923 from copper pipes.",
    "You answer questions from the given passages with a short phrase. Passages: Question: Answer:",
    "Short answers are the name, the number or the place that the question asks for.",
]


def byte_tokenizer(*, chat: bool = True) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE trained on three sentences, filled up with words that no text holds."""
    core = tokenizers.Tokenizer(BPE())
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core.train_from_iterator(
        _CORPUS,
        BpeTrainer(
            vocab_size=400,
            special_tokens=specials,
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    n = core.get_vocab_size()  # every id of the tiny models has a text
    core.add_tokens([f"⟦{i}⟧" for i in range(n, VOCABULARY)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_hf(
    config_class: type[transformers.PretrainedConfig] = transformers.LlamaConfig,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: object,
) -> transformers.PreTrainedModel:
    """A random causal LM of three layers, four heads, two KV heads and head dimension 16."""
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,  # tied, random models repeat their input
    }
    torch.manual_seed(seed)
    config = config_class(**{**settings, **options})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def tiny_model(
    config_class: type[transformers.PretrainedConfig] = transformers.LlamaConfig,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    chat: bool = True,
    **options: object,
) -> LoadedModel:
    """A described tiny model with its tokenizer."""
    model = tiny_hf(config_class, dtype=dtype, seed=seed, **options)
    return describe_model("tiny", model, byte_tokenizer(chat=chat))


def save_tiny(folder: Path, **options: object) -> Path:
    """A tiny model as a folder that `load_model` reads."""
    tiny_hf(**options).save_pretrained(folder)  # type: ignore[arg-type]
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_xlmr(folder: Path, **options: object) -> transformers.XLMRobertaConfig:
    """Save a tokenizer of letters in `folder`, and say what a random XLM-RoBERTa beside it looks like."""
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    letters = [(chr(c), -4.0) for c in range(33, 127)]
    vocabulary = [*((s, 0.0) for s in specials), ("\u2581", -3.0), *letters]
    core = tokenizers.Tokenizer(Unigram(vocabulary, unk_id=3))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    core.decoder = tokenizers.decoders.Metaspace()
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=128,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    return transformers.XLMRobertaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=200,
        initializer_range=0.3,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        **options,
    )


def save_tiny_reranker(folder: Path) -> Path:
    """A random cross-encoder with the files that FlagEmbedding reads."""
    config = tiny_xlmr(folder, num_labels=1)
    transformers.XLMRobertaForSequenceClassification(config).save_pretrained(folder)
    return folder


class HashEmbedder:
    """Unit vectors from hashed words: texts that share words are near each other."""

    embedder_id = "test-hash-64"

    def embed_documents(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.full((len(texts), 64), 1e-6, dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[xxhash.xxh32_intdigest(word.strip(".,?!:;").encode()) % 64] += 1.0
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def embed_query(self, text: str) -> np.ndarray:
        return self.embed_documents([text])[0]


TEXT = (
    "The tidal organ of Marenqué was built by Bastien Roule in 1923 from copper pipes. "
    "It plays at every high tide, and the keeper of the north pier writes down each note."
)

_THETA = {"rope_theta": 10_000.0}
SUPPORTED: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "granite": (
        transformers.GraniteConfig,
        {"attention_multiplier": 0.0625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    ),
    "phi3": (transformers.Phi3Config, {"rope_parameters": {"rope_type": "default", **_THETA}}),
    "phi4-mini": (  # Phi-3 with three quarters of a head turned
        transformers.Phi3Config,
        {
            "rope_parameters": {
                "rope_type": "default",
                "partial_rotary_factor": 0.75,
                **_THETA,
            }
        },
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24},
    ),
    "gemma3": (  # two thetas, five windowed layers for each full one
        transformers.Gemma3TextConfig,
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "num_hidden_layers": 6,
        },
    ),
    "glm4": (transformers.Glm4Config, {"head_dim": 16}),
    "cohere": (transformers.CohereConfig, {"logit_scale": 1.0}),
    "stablelm": (transformers.StableLmConfig, {}),
    "gpt-neox": (transformers.GPTNeoXConfig, {}),
    "smollm3": (  # every fourth layer has no positions
        transformers.SmolLM3Config,
        {"num_hidden_layers": 4},
    ),
    "olmo2": (transformers.Olmo2Config, {}),
    "mistral-windowed": (transformers.MistralConfig, {"sliding_window": 24}),
    "qwen2-mixed": (
        transformers.Qwen2Config,
        {
            "sliding_window": 24,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "llama-linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, **_THETA}},
    ),
    "llama-llama3": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
                **_THETA,
            }
        },
    ),
    "llama-yarn": (
        transformers.LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                **_THETA,
            }
        },
    ),
}


@cache
def supported_model(name: str) -> LoadedModel:
    """One of `SUPPORTED`, made once."""
    config_class, options = SUPPORTED[name]
    return tiny_model(config_class, **options)


def fill(engine: Engine, text: str = TEXT, document_id: str = "doc") -> list[Chunk]:
    """The chunks of a text, encoded, stored and in the catalog; not in any index."""
    chunks = list(engine.chunk(Document(document_id=document_id, text=text)))
    for chunk, kv in engine.encode(chunks):
        engine.store_chunk(chunk, kv)
    engine.catalog.begin_document(document_id, "0", chunks)
    engine.catalog.finish_document(document_id, "0")
    return chunks


def forward(
    model: transformers.PreTrainedModel,
    ids: Sequence[int],
    past: transformers.Cache | None = None,
    start: int | None = None,
) -> torch.Tensor:
    """Logits [m, V] of the model's own forward pass, its first token at position `start`."""
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else None
    options: dict[str, Any] = {argument or "past_key_values": past}
    if start is not None:
        options["position_ids"] = torch.arange(start, start + len(ids))[None]
    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), use_cache=past is not None, **options).logits[0]


def own_kv(model: transformers.PreTrainedModel, ids: Sequence[int], start: int = 0) -> torch.Tensor:
    """Keys (rotated) and values that the model itself caches: [L, 2, 1, H, T, D]."""
    past = transformers.DynamicCache()
    forward(model, ids, past, start)
    return torch.stack([torch.stack((x.keys, x.values)) for x in past.layers])


def dynamic_cache(kv: torch.Tensor) -> transformers.DynamicCache:
    """Placed entries [L, 2, 1, H, N, D] as the cache that transformers would have built."""
    past = transformers.DynamicCache()
    for layer, (keys, values) in enumerate(kv.unbind(0)):
        past.update(keys.clone(), values.clone(), layer)
    return past


def placed(model: LoadedModel, entries: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Entries [T, L, 2, H, D] turned to positions, as a prefix of their own: [L, 2, 1, H, T, D]."""
    out = torch.full(model.layout.prefixes(1, len(entries)), torch.nan, dtype=entries.dtype)
    rotation = model.rope.rotation(positions, torch.device("cpu"))
    reference.place(entries.contiguous(), rotation, out, torch.arange(len(entries)))
    return out


def prefix_of(model: LoadedModel, ids: Sequence[int], room: int = 0) -> Prefix:
    """The prefix of a text that was encoded alone, with room behind it."""
    n = len(ids)
    kv = torch.full(model.layout.prefixes(1, n + room), torch.nan, dtype=model.layout.dtype)
    kv[..., :n, :] = placed(model, encode(model, [ids])[0], range(n))
    plan = PrefixPlan(head=tuple(ids), segments=(), online=(), n_entries=n, length=n)
    return Prefix(kv=kv, plans=(plan,))


def cache_of(prefix: Prefix, room: int) -> transformers.Cache:
    """The prefix as a cache that the model may be called with directly."""
    return hf.prefix_cache(prefix.with_room(room), prefix.n_entries)
