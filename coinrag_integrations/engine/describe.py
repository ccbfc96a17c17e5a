"""What the engine needs to know of a model: its cache's shape, its rotations, its windows.

The rotation is not looked up by the model's name: the model runs on a few tokens, and what it did to
its own keys decides which of its frequencies, which pairs and how many dimensions a layer turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from coinrag_integrations.engine import hf
from coinrag_integrations.engine.kernels import reference
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.rope import RopeTable, Rotary
from coinrag_integrations.errors import UnsupportedModelError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# What the model does to a key and what we would do differ by the rounding of its dtype (relative to the
# keys' norm), or by something near 1 if the frequencies or the pairs are not the same.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
_POSITIONS = range(61, 69)  # far enough out that different frequencies have parted


def read_cache(model: PreTrainedModel) -> tuple[KVLayout, RopeTable]:
    """The shape of the model's keys and values, and every layer's rotation.

    Both are seen in the model's own forward pass over a few tokens.

    Raises:
        UnsupportedModelError: no ordinary attention, learned or ALiBi positions, frequencies that
            change with the length, positions with several axes, or a rotation that none of the
            model's frequencies explain.
    """
    config = model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise _unsupported(model, "it does not use ordinary multi-head attention")
    if not hf.has_rotary_function(model):
        raise _unsupported(
            model,
            "it has no rotary position embedding (learned or ALiBi positions cannot be moved)",
        )
    candidates = list(dict.fromkeys(_frequencies(model)))
    if not candidates:
        raise _unsupported(model, "it has no rotary module to read the frequencies from")
    try:
        seen = hf.observe_keys(model, config.num_hidden_layers, _POSITIONS)
    except (RuntimeError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise _unsupported(
            model, f"its keys could not be seen before RoPE ({type(error).__name__}: {error})"
        ) from error
    if len({keys.after.shape for keys in seen}) != 1:
        raise _unsupported(model, "its layers keep keys of different shapes")
    _, n_kv_heads, head_dim = seen[0].after.shape
    layout = KVLayout(
        n_layers=len(seen), n_kv_heads=n_kv_heads, head_dim=head_dim, dtype=seen[0].after.dtype
    )
    return layout, _explain(model, seen, candidates)


def read_layer_windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """The different windows of the model's layers, in tokens; None is a layer that sees everything.

    Raises:
        UnsupportedModelError: some layer's attention is neither full nor sliding.
    """
    config = model.config.get_text_config()
    sliding = getattr(config, "sliding_window", None)
    if getattr(config, "use_bidirectional_attention", None):
        raise _unsupported(model, "its attention is not causal")
    kinds = set(getattr(config, "layer_types", None) or ())
    strange = kinds - {"full_attention", "sliding_attention"}
    if strange:
        raise _unsupported(model, f"it has layers of type {', '.join(sorted(strange))}")
    if not kinds:
        return (int(sliding) if sliding else None,)
    window = int(sliding) if sliding else None
    return tuple(
        {"full_attention": None, "sliding_attention": window}[kind] for kind in sorted(kinds)
    )


def read_window(model: PreTrainedModel) -> int:
    """The longest context the model was made for, in tokens."""
    return int(model.config.get_text_config().max_position_embeddings)


def _explain(
    model: PreTrainedModel, seen: Sequence[hf.SeenKeys], candidates: Sequence[Rotary]
) -> RopeTable:
    """The rotation of every layer, one that nothing turned included."""
    fits = [None if keys.before is None else _fit(model, keys, candidates) for keys in seen]
    turned = [fit for fit in fits if fit is not None]
    if not turned:
        raise _unsupported(model, "none of its layers turned a key that could be seen")
    if len({(fit.interleaved, len(fit.rotary.inv_freq)) for fit in turned}) != 1:
        raise _unsupported(model, "its layers turn different pairs or numbers of dimensions")
    still = turned[0].rotary.still()
    rotaries = [still if fit is None else fit.rotary for fit in fits]
    distinct = tuple(dict.fromkeys(rotaries))
    return RopeTable(
        rotaries=distinct,
        layers=tuple(distinct.index(rotary) for rotary in rotaries),
        interleaved=turned[0].interleaved,
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    rotary: Rotary
    interleaved: bool


def _fit(model: PreTrainedModel, keys: hf.SeenKeys, candidates: Sequence[Rotary]) -> _Fit:
    """Which frequencies and which pairs explain what a layer did to its keys."""
    assert keys.before is not None
    head_dim, best, error = keys.after.shape[-1], None, float("inf")
    for rotary in candidates:
        if 2 * len(rotary.inv_freq) > head_dim:
            continue
        table = RopeTable(rotaries=(rotary,), layers=(0,))
        rotation = table.rotation(_POSITIONS, keys.before.device)
        for interleaved in (False, True):
            ours = reference.rotate(
                keys.before[:, None], replace(rotation, interleaved=interleaved)
            )[:, 0]
            distance = torch.linalg.vector_norm(ours - keys.after.float())
            relative = float(distance / torch.linalg.vector_norm(keys.after.float()))
            if relative < error:
                best, error = _Fit(rotary, interleaved), relative
    if best is None or error > _TOLERANCE[model.dtype]:
        raise _unsupported(
            model, f"none of its frequencies explains how it turns its keys (error {error:.2g})"
        )
    return best


def _frequencies(model: PreTrainedModel) -> Iterator[Rotary]:
    """Every set of frequencies that the model's rotary modules hold, refused if they may change."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            _check_type(model, kinds)
            yield _rotary(module.inv_freq, module.attention_scaling)
        elif isinstance(kinds, dict):  # one set for each type of layer (Gemma 3)
            for layer_type, kind in kinds.items():
                _check_type(model, kind)
                yield _rotary(
                    getattr(module, f"{layer_type}_inv_freq"),
                    getattr(module, f"{layer_type}_attention_scaling"),
                )
    if "mrope_section" in (getattr(model.config, "rope_parameters", None) or {}):
        raise _unsupported(model, "its positions have several axes (M-RoPE)")


def _rotary(inv_freq: torch.Tensor, attention_scaling: float) -> Rotary:
    return Rotary(
        inv_freq=tuple(inv_freq.double().tolist()), attention_scaling=float(attention_scaling)
    )


def _check_type(model: PreTrainedModel, rope_type: str) -> None:
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise _unsupported(
            model,
            f"its RoPE type {rope_type!r} changes the frequencies with the length "
            f"(supported: {', '.join(SUPPORTED_ROPE_TYPES)})",
        )


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} is not supported: {reason}. Use a decoder with RoPE, such as "
        "Llama, Qwen, Mistral, Gemma or Phi-3"
    )
