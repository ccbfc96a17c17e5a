"""Choose the implementation of the operations once, and say why."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from coinrag_integrations.engine.kernels.quantised import Bits, Quantised
from coinrag_integrations.engine.rope import Rotation
from coinrag_integrations.errors import ConfigError

__all__ = ["Bits", "Implementation", "Kernels", "Place", "Quantise", "Quantised", "choose_kernels"]

Place = Callable[[torch.Tensor | Quantised, Rotation, torch.Tensor, torch.Tensor], None]
Quantise = Callable[[torch.Tensor, Bits, int, torch.dtype], Quantised]
Implementation = Literal["auto", "torch", "numba", "triton"]
_MODULES = {"torch": "reference", "numba": "cpu", "triton": "gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The operations of one implementation (see `reference` for what they do), and why it."""

    place: Place
    quantise: Quantise
    name: str
    reason: str


def choose_kernels(implementation: Implementation, device: torch.device) -> Kernels:
    """Triton on a GPU, Numba on a CPU, plain torch where they are missing, or what was asked for.

    Raises:
        ConfigError: what was asked for is not installed, or cannot run on this device.
    """
    if implementation == "auto":
        name, reason = _best(device)
    else:
        name, reason = implementation, "asked for"
        _check(implementation, device)
    module = importlib.import_module(f"coinrag_integrations.engine.kernels.{_MODULES[name]}")
    return Kernels(place=module.place, quantise=module.quantise, name=name, reason=reason)


def _best(device: torch.device) -> tuple[str, str]:
    """What runs fastest on a device, and why it is that."""
    if device.type == "cuda":
        if _installed("triton"):
            return "triton", f"device is {device}"
        return "torch", "triton is not installed: pip install triton makes it several times faster"
    if device.type != "cpu":
        return "torch", f"device is {device}"
    if _installed("numba"):
        return "numba", f"device is {device}"
    return "torch", "numba is not installed: pip install 'coinrag-integrations[cpu]' is faster"


def _check(name: str, device: torch.device) -> None:
    if name not in ("triton", "numba"):
        return
    if not _installed(name):
        raise ConfigError(f"kernels={name!r} needs the package {name}: install it, or use 'torch'")
    if name == "numba" and device.type != "cpu":
        raise ConfigError(f"kernels='numba' cannot run on {device}: use 'triton' or 'torch'")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if name == "triton" and device.type != "cuda" and not interpreted:
        raise ConfigError(
            f"kernels='triton' cannot run on {device}: use a GPU, 'auto', or TRITON_INTERPRET=1"
        )


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
