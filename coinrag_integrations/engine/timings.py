"""Where the time of one answer went. Values are returned with the answer, never logged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Milliseconds and bytes of one answer.

    `ttft_ms` runs from the moment the engine is handed its spans to the moment the first token is
    chosen; `load_ms`, `recompute_ms` (spans whose KV was missing or corrupt), `compose_ms` and
    `prefill_ms` are its parts. `retrieve_ms` comes before it. `bytes_read` is exactly the bytes of
    the entries (with the scales of codes) that were read from disk or remote storage,
    `bytes_in_memory` of those that lay in the memory tier. `n_declined` spans were encoded anew because
    reading them was estimated to take longer (`engine.cost`).
    """

    retrieve_ms: float = 0.0
    load_ms: float = 0.0
    recompute_ms: float = 0.0
    compose_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    bytes_read: int = 0
    bytes_in_memory: int = 0
    n_declined: int = 0


@dataclass(slots=True)
class Stopwatch:
    """Collects the parts of one answer's time."""

    device: torch.device
    started: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Add the time of the block to part `name`; `wait` for the GPU to finish it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if wait and self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.parts[name] = self.parts.get(name, 0.0) + (time.perf_counter() - begin) * 1e3

    def first_token(self) -> None:
        """Note that the first token has been chosen."""
        self.parts.setdefault("ttft", (time.perf_counter() - self.started) * 1e3)

    def timings(self, *, retrieve_ms: float = 0.0) -> Timings:
        """What has been measured so far."""
        return Timings(
            retrieve_ms=retrieve_ms,
            load_ms=self.parts.get("load", 0.0),
            recompute_ms=self.parts.get("recompute", 0.0),
            compose_ms=self.parts.get("compose", 0.0),
            prefill_ms=self.parts.get("prefill", 0.0),
            ttft_ms=self.parts.get("ttft", 0.0),
            decode_ms=self.parts.get("decode", 0.0),
        )
