"""Law: a query sees what stands at its own position and before, in a window only the last of it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.engine.visibility import HIDDEN, visible

positions = st.lists(st.integers(-300, 300), min_size=1, max_size=12)


@given(rows=positions, queries=positions, window=st.integers(1, 400))
def test_what_is_seen_depends_on_positions_alone(rows, queries, window):
    masks = visible(torch.tensor([rows]), torch.tensor([queries]), (None, window))
    for m, q in enumerate(queries):
        for n, r in enumerate(rows):
            assert bool(masks[None][0, 0, m, n]) == (r <= q)
            assert bool(masks[window][0, 0, m, n]) == (q - window < r <= q)


@given(rows=positions, queries=positions, window=st.integers(1, 400))
def test_hidden_rows_are_seen_by_nobody_but_padding_sees_something(rows, queries, window):
    hidden = torch.tensor([[*rows, HIDDEN, HIDDEN]])
    masks = visible(hidden, torch.tensor([[*queries, HIDDEN]]), (None, window))
    for mask in masks.values():
        assert not mask[0, 0, :-1, len(rows) :].any()
        assert mask[0, 0, -1].any()


def test_each_prefix_has_its_own_mask():
    rows = torch.tensor([[0, 1, 2, HIDDEN], [5, 0, 7, 1]])
    mask = visible(rows, torch.tensor([[1], [5]]), (None,))[None]
    assert mask.shape == (2, 1, 1, 4)
    assert mask[:, 0, 0].tolist() == [[True, True, False, False], [True, True, False, True]]
