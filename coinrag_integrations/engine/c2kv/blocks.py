"""Which tokens a slot stands for, where it stands, and what it sees. Knows no model.

A document's tokens fall into blocks of `ratio`; the last one may be shorter. Each block has one slot, at
the position of its last token. A slot sees the first block (the sink), its own block, the slots before it
and itself. Tokens see no slots. (Section 4 of arXiv 2607.17715; `overlap` is not in the paper.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from coinrag_integrations.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of `ratio` tokens; a slot also sees the `overlap` tokens before its block."""

    ratio: int
    overlap: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no blocks."""
        if self.ratio < 1 or self.overlap < 0:
            raise ConfigError(
                f"blocks of {self.ratio} tokens that see {self.overlap} before: use a ratio of at "
                "least 1 and an overlap of at least 0"
            )

    def n_slots(self, n_tokens: int) -> int:
        """S: blocks of a document, the short last one too."""
        return -(-n_tokens // self.ratio)

    def positions(self, n_tokens: int) -> NDArray[np.int64]:
        """Where the slots of a document stand, from its first token: int64 [S]."""
        last = np.arange(self.ratio - 1, n_tokens + self.ratio - 1, self.ratio)
        return np.minimum(last, n_tokens - 1)

    def tokens(self, first: int, stop: int, longest: int) -> list[int]:
        """All tokens that slots `[first, stop)` see, of documents with at most `longest`."""
        own = range(max(0, first * self.ratio - self.overlap), min(stop * self.ratio, longest))
        sink = range(min(self.ratio, own.start, longest))
        return [*sink, *own]

    def seen(
        self,
        first: int,
        stop: int,
        lengths: Sequence[int],
        windows: Sequence[int | None],
        device: torch.device,
    ) -> dict[int | None, torch.Tensor]:
        """For each window, what slots `[first, stop)` of B documents see: bool [B, 1, stop - first, n].

        The n rows are the documents' `tokens(first, stop, max(lengths))`, then slots `[0, stop)`. In a
        layer with a window of w, only the last w positions are seen. The slots of a shorter document
        that it does not have are padding, which sees at least itself and is seen by no other slot.
        """
        tokens = torch.tensor(self.tokens(first, stop, max(lengths)), dtype=torch.long)
        n_tokens = torch.tensor(lengths)[:, None]  # [B, 1]
        slots = torch.arange(stop)
        last = ((slots + 1) * self.ratio - 1).minimum(n_tokens - 1)  # [B, stop]
        start = (slots[first:] * self.ratio)[:, None]  # [stop - first, 1]
        own = (tokens >= start - self.overlap) & (tokens < start + self.ratio)
        theirs = (own | (tokens < self.ratio)) & (tokens < n_tokens)[:, None]  # [B, m, t]
        earlier = (slots <= slots[first:, None]).expand(len(lengths), -1, -1)  # [B, m, stop]
        allowed = torch.cat((theirs, earlier), dim=2)
        rows = torch.cat((tokens.expand(len(lengths), -1), last), dim=1)  # [B, n]
        distance = last[:, first:, None] - rows[:, None]
        return {
            window: (allowed if window is None else allowed & (distance < window))[:, None].to(
                device
            )
            for window in windows
        }
