"""Choose an implementation of `place` once, and say why."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from coinrag_integrations.engine.kernels import reference
from coinrag_integrations.errors import ConfigError

Place = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
Implementation = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations the composer runs, where they come from, and why."""

    place: Place
    name: str
    reason: str


def choose_kernels(implementation: Implementation, device: torch.device) -> Kernels:
    """Triton on a GPU, plain torch elsewhere, or what the caller asked for.

    Raises:
        ConfigError: Triton was asked for and is not installed, or cannot run on this device.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    runs_here = device.type == "cuda" or interpreted
    if implementation == "triton" and not has_triton:
        raise ConfigError("kernels='triton' needs the package triton: install it, or use 'torch'")
    if implementation == "triton" and not runs_here:
        raise ConfigError(
            f"kernels='triton' cannot run on {device}: use a GPU, 'torch', or TRITON_INTERPRET=1"
        )
    if implementation == "triton" or (
        implementation == "auto" and has_triton and device.type == "cuda"
    ):
        from coinrag_integrations.engine.kernels.place import place

        reason = "asked for" if implementation == "triton" else f"device is {device}"
        return Kernels(place=place, name="triton", reason=reason)
    if implementation == "torch":
        reason = "asked for"
    elif device.type == "cuda":
        reason = "triton is not installed"
    else:
        reason = f"device is {device}"
    return Kernels(place=reference.place, name="torch", reason=reason)
