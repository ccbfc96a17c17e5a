"""The correctness gate: does moving cached keys give what the model itself would compute?

Run once for a model, on a few tokens. It fails closed: a model that does not pass is refused, however
familiar its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicCache

from coinrag_integrations.engine import hf
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import Place
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.prefix import empty_kv
from coinrag_integrations.engine.visibility import visible
from coinrag_integrations.errors import UnsupportedModelError

_OFFSET = 37
# Largest accepted errors, relative to the norm of what is compared: in the first layer, whose keys
# depend on no other token, and in all layers together. A wrong rotation gives about 1, a wrong
# scaling its excess; 16-bit arithmetic at another position gives a few hundredths in deep layers.
_TOLERANCE = {
    torch.float32: (1e-4, 1e-3),
    torch.float16: (0.005, 0.1),
    torch.bfloat16: (0.02, 0.15),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Relative errors: of keys and values moved by some positions, and of the next token's logits.

    `first_keys` is the error of the first layer's keys, held to `first_tolerance`; the others cover
    all layers and are held to `tolerance`.
    """

    first_keys: float
    keys: float
    values: float
    logits: float
    first_tolerance: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether every error is within its tolerance (and is a number)."""
        deep = (self.keys, self.values, self.logits)
        return self.first_keys <= self.first_tolerance and all(e <= self.tolerance for e in deep)


def measure(model: LoadedModel, place: Place) -> GateResult:
    """Encode tokens alone, place them elsewhere, and compare with the model's own forward pass."""
    vocabulary = model.hf.config.get_text_config().vocab_size
    ids = [(7919 * i + 11) % vocabulary for i in range(24)]
    piece, question = ids[:18], ids[18:]
    staged = encode(model, [piece])[0].contiguous()

    moved = _placed(model, place, staged, _OFFSET)
    direct = DynamicCache()
    positions = torch.arange(_OFFSET, _OFFSET + len(piece), device=model.device)[None]
    hf.next_logits(model.hf, _row(model, piece), direct, positions)
    own = torch.stack([torch.stack((x.keys[0], x.values[0])) for x in direct.layers])

    cache = hf.prefix_cache(_placed(model, place, staged, 0, room=len(question)), len(piece))
    rows = torch.arange(len(ids), device=model.device)[None]
    at = rows[:, len(piece) :]
    seen = visible(rows, at, model.layer_windows)
    logits = hf.next_logits(model.hf, _row(model, question), cache, at, seen)
    full = hf.next_logits(model.hf, _row(model, ids), DynamicCache())
    first_tolerance, tolerance = _TOLERANCE[model.layout.dtype]
    return GateResult(
        first_keys=_error(moved[0, 0, 0], own[0, 0]),
        keys=_error(moved[:, 0, 0], own[:, 0]),
        values=_error(moved[:, 1, 0], own[:, 1]),
        logits=_error(logits, full),
        first_tolerance=first_tolerance,
        tolerance=tolerance,
    )


def check(model: LoadedModel, place: Place) -> GateResult:
    """Measure, and refuse the model if it does not pass.

    Raises:
        UnsupportedModelError: composed KV would not be what the model computes.
    """
    try:
        result = measure(model, place)
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        raise UnsupportedModelError(
            f"{model.name}: composing its KV failed ({type(error).__name__}: {error}); the model's "
            "attention is not of a supported kind"
        ) from error
    if not result.passed:
        raise UnsupportedModelError(
            f"{model.name}: composed KV differs from the model's own (relative errors: first "
            f"keys {result.first_keys:.2g} of {result.first_tolerance:.2g} accepted, keys "
            f"{result.keys:.2g}, values {result.values:.2g}, logits {result.logits:.2g}; accepted "
            f"{result.tolerance:.2g}). Its attention or positions are not of a supported kind"
        )
    return result


def _placed(
    model: LoadedModel, place: Place, staged: torch.Tensor, start: int, room: int = 0
) -> torch.Tensor:
    """Staged entries at positions from `start`: [L, 2, 1, H, T + room, D]."""
    placed = empty_kv(model.layout, len(staged) + room, model.device)
    rotation = model.rope.rotation(range(start, start + len(staged)), model.device)
    place(staged, rotation, placed, torch.arange(len(staged), device=model.device))
    return placed


def _row(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    return torch.tensor([ids], device=model.device)


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    distance: Callable[[torch.Tensor], torch.Tensor] = torch.linalg.vector_norm
    return float(distance(ours.float() - theirs.float()) / distance(theirs.float()))
