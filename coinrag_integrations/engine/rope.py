"""Rotary angles, taken from the model's own frequencies. Knows no model and no cache.

Convention: a key's dimensions i and i + D/2 form a pair ("half-split", as in Llama). A position p
turns pair i by `p * inv_freq[i]`:

    k'[i]       = k[i] * cos - k[i + D/2] * sin
    k'[i + D/2] = k[i + D/2] * cos + k[i] * sin

Positions may be negative: attention only sees differences of positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from coinrag_integrations.engine.fingerprint import canonical_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """A model's rotary frequencies.

    `inv_freq` holds D/2 angular frequencies in radians per position, after any linear, Llama-3 or
    YaRN scaling. `attention_scaling` multiplies cosine and sine (YaRN); keys are stored before
    RoPE, so it is applied exactly once, at composition.
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0

    def angles(
        self, positions: Sequence[int] | NDArray[np.int64], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of every position: two fp32 tensors `[N, D/2]` on `device`.

        Computed in float64 on the host, so long contexts lose no precision.
        """
        turns = np.outer(np.asarray(positions, dtype=np.float64), np.asarray(self.inv_freq))
        cos = (np.cos(turns) * self.attention_scaling).astype(np.float32)
        sin = (np.sin(turns) * self.attention_scaling).astype(np.float32)
        return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)

    @property
    def digest(self) -> str:
        """Hash of the frequencies and the scaling."""
        return canonical_digest(
            {"inv_freq": list(self.inv_freq), "attention_scaling": self.attention_scaling}
        )
