"""Whether reading a chunk's spans or encoding the chunk anew is faster, from what was measured here.

Reading takes `latency + bytes / bandwidth`, encoding `overhead + tokens / speed`. Both lines are fitted to
what happened, and forget. What was declined is not measured, so reads of too long ago count for nothing: a
slow link that recovers is used again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from coinrag_integrations.engine.store import ReadReport
from coinrag_integrations.errors import SlowReadError
from coinrag_integrations.types import ChunkId

Load = Literal["auto", "read"]
_STALE_S = 30.0  # how long a measured read speaks for its tier
_FORGET = 0.9  # what an observation weighs when the next one is made
# A decision for encoding must promise this much: estimates scatter, and what was read can be read again.
_GAIN, _GAIN_S = 0.7, 0.02


@dataclass(slots=True)
class Line:
    """seconds = a + b * size, by least squares over what was observed, recent observations first."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, size: float, seconds: float) -> None:
        """Add an observation."""
        self.weight = self.weight * _FORGET + 1.0
        self.x = self.x * _FORGET + size
        self.y = self.y * _FORGET + seconds
        self.xx = self.xx * _FORGET + size * size
        self.xy = self.xy * _FORGET + size * seconds

    def predict(self, size: float) -> float | None:
        """Seconds for a size; None if nothing was observed."""
        if not self.weight:
            return None
        spread = self.weight * self.xx - self.x * self.x
        slope = (self.weight * self.xy - self.x * self.y) / spread if spread > 1e-9 * self.xx else 0
        if slope <= 0:  # one size only, or noise: in proportion
            return size * self.y / self.x if self.x else self.y / self.weight
        constant = max((self.y - slope * self.x) / self.weight, 0.0)
        return constant + slope * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds that reading and encoding would take."""

    read: float
    encode: float

    @property
    def prefers_encoding(self) -> bool:
        """Whether encoding is clearly faster."""
        return self.encode < min(_GAIN * self.read, self.read - _GAIN_S)


@dataclass(kw_only=True)
class CostModel:
    """Lines for each tier ("disk", "remote") and for encoding. Safe to share between threads."""

    clock: Callable[[], float] = time.monotonic
    _reads: dict[str, Line] = field(default_factory=dict)
    _read_at: dict[str, float] = field(default_factory=dict)
    _encodes: Line = field(default_factory=Line)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, report: ReadReport, seconds: float) -> None:
        """Note how long a read took, by where its bytes were."""
        read = {
            "remote": (sum(report.remote.values()), report.remote_seconds),
            "disk": (sum(report.disk.values()), seconds - report.remote_seconds),
        }
        with self._lock:
            for tier, (n_bytes, spent) in read.items():
                if n_bytes:
                    self._reads.setdefault(tier, Line()).observe(n_bytes, spent)
                    self._read_at[tier] = self.clock()

    def observe_encode(self, n_tokens: int, seconds: float) -> None:
        """Note how long encoding took."""
        if n_tokens:
            with self._lock:
                self._encodes.observe(n_tokens, seconds)

    @property
    def knows_encoding(self) -> bool:
        """Whether encoding was ever measured."""
        return self._encodes.weight > 0

    def estimate(self, tier: str, n_bytes: int, n_tokens: int) -> Estimate | None:
        """Both estimates for a piece; None before both have been measured, and reading lately."""
        with self._lock:
            if self.clock() - self._read_at.get(tier, -math.inf) > _STALE_S:
                return None
            read = self._reads.get(tier, Line()).predict(n_bytes)
            encode = self._encodes.predict(n_tokens)
        return None if read is None or encode is None else Estimate(read=read, encode=encode)

    def slow_reads(
        self, tiers: Mapping[ChunkId, str], n_bytes: Mapping[ChunkId, int], chunk_tokens: int
    ) -> dict[ChunkId, SlowReadError]:
        """The chunks that are clearly faster encoded than read from the tier they are in, and why."""
        slow: dict[ChunkId, SlowReadError] = {}
        for chunk_id, tier in tiers.items():
            # Chunks are read side by side, but encoded one after the other.
            n_tokens = chunk_tokens * sum(other == tier for other in tiers.values())
            it = self.estimate(tier, n_bytes[chunk_id], n_tokens)
            if it is not None and it.prefers_encoding:
                slow[chunk_id] = SlowReadError(
                    f"reading chunk {chunk_id} ({tier}) would take about {it.read:.3f} s, "
                    f"encoding it {it.encode:.3f} s"
                )
        return slow
