"""Who sees whom: masks by position, wherever rows lie in the buffer. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# The position of rows that nothing may see: padding, and rows not yet written.
HIDDEN = 2**62


def visible(
    rows: torch.Tensor, queries: torch.Tensor, windows: Sequence[int | None]
) -> dict[int | None, torch.Tensor]:
    """For each window, which rows a query sees: bool [B, 1, m, N].

    rows [B, N] and queries [B, m] are positions, int64. A query sees the rows at its own position and
    before, in a window of w only the last w of them. Queries at `HIDDEN` are padding and see
    everything, so that no row of a softmax is empty.
    """
    distance = queries[:, :, None] - rows[:, None, :]  # [B, m, N]
    seen = distance >= 0
    return {
        window: (seen if window is None else seen & (distance < window))[:, None]
        for window in windows
    }
