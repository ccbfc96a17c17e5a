"""Rotary angles, taken from the model's own frequencies. Knows no model and no cache.

Convention: of a key's D dimensions the first R are turned, in R/2 pairs; the rest is left alone. A
position p turns pair i by `p * inv_freq[i]`:

    k'[a] = k[a] * cos - k[b] * sin
    k'[b] = k[b] * cos + k[a] * sin

where (a, b) = (i, i + R/2) if pairs are half-split (Llama) and (2i, 2i + 1) if they are interleaved
(Cohere, GLM). Positions may be negative: attention only sees differences of positions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from coinrag_integrations.engine.fingerprint import canonical_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The frequencies of one layer's rotation.

    `inv_freq` holds R/2 angular frequencies in radians per position, after any linear, Llama-3 or
    YaRN scaling. `attention_scaling` multiplies cosine and sine (YaRN); keys are stored before
    RoPE, so it is applied exactly once, at composition. A layer without positions has frequencies
    of zero, which turn nothing.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0

    def still(self) -> Rotary:
        """As many pairs, none of them turned: a layer without positions (NoPE)."""
        return Rotary(inv_freq=(0.0,) * len(self.inv_freq))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The angles of T entries for all layers of a model: what the kernels take.

    `cos` and `sin` [G, T, R/2] fp32, one row for each of G different rotations; `layers` [L] int32
    says which of them a layer uses.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layers: torch.Tensor
    interleaved: bool

    def __len__(self) -> int:
        """Entries."""
        return self.cos.shape[1]

    def __getitem__(self, entries: slice) -> Rotation:
        """The angles of some of the entries; shares memory."""
        return Rotation(
            cos=self.cos[:, entries],
            sin=self.sin[:, entries],
            layers=self.layers,
            interleaved=self.interleaved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """A model's rotations: the different ones, and which one each of its L layers uses.

    All of them turn the same number of pairs.
    """

    rotaries: tuple[Rotary, ...]
    layers: tuple[int, ...]
    interleaved: bool = False

    @property
    def width(self) -> int:
        """R: how many dimensions of a head are turned."""
        return 2 * len(self.rotaries[0].inv_freq)

    @property
    def turns(self) -> tuple[bool, ...]:
        """Which layers turn their keys at all."""
        return tuple(any(self.rotaries[index].inv_freq) for index in self.layers)

    def rotation(
        self, positions: Sequence[int] | NDArray[np.int64], device: torch.device
    ) -> Rotation:
        """The angles of every position, on `device`.

        Computed in float64, so long contexts lose no precision.
        """
        where = torch.as_tensor(np.asarray(positions, dtype=np.float64), device=device)
        inv_freq, scaling, layers = _tables(self, device)
        turns = where[:, None] * inv_freq[:, None]  # [G, T, R/2]
        return Rotation(
            cos=(turns.cos() * scaling).float(),
            sin=(turns.sin() * scaling).float(),
            layers=layers,
            interleaved=self.interleaved,
        )

    @property
    def digest(self) -> str:
        """Hash of everything that changes the angles."""
        return canonical_digest(
            {
                "rotaries": [[list(r.inv_freq), r.attention_scaling] for r in self.rotaries],
                "layers": list(self.layers),
                "interleaved": self.interleaved,
            }
        )


@functools.lru_cache(maxsize=64)
def _tables(
    rope: RopeTable, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """inv_freq [G, R/2] and scaling [G, 1, 1] in float64, layers [L] int32: not to be written to."""
    return (
        torch.tensor([r.inv_freq for r in rope.rotaries], dtype=torch.float64, device=device),
        torch.tensor(
            [[[r.attention_scaling]] for r in rope.rotaries], dtype=torch.float64, device=device
        ),
        torch.tensor(rope.layers, dtype=torch.int32, device=device),
    )
