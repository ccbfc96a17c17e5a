"""Staged entries to the device, on a stream of their own. On a CPU there is nothing to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coinrag_integrations.engine.kernels import Quantised


@dataclass(frozen=True, slots=True)
class Uploader:
    """Copies from pinned memory while the device computes; None: entries stay where they are."""

    stream: torch.cuda.Stream | None

    @classmethod
    def of(cls, device: torch.device) -> Uploader:
        """An uploader for a device."""
        if device.type != "cuda":
            return cls(None)
        return cls(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def upload(self, staged: torch.Tensor | Quantised) -> torch.Tensor | Quantised:
        """`staged` on the device. What is launched next on the current stream waits for it."""
        if self.stream is None:
            return staged
        if isinstance(staged, Quantised):
            return staged.map(self._copy)
        return self._copy(staged)

    def _copy(self, staged: torch.Tensor) -> torch.Tensor:
        assert self.stream is not None
        current = torch.cuda.current_stream(self.stream.device)
        with torch.cuda.stream(self.stream):
            there = staged.to(self.stream.device, non_blocking=True)
        current.wait_stream(self.stream)
        there.record_stream(current)
        return there
