"""Rows come to lie where a paged cache looks for them."""

from __future__ import annotations

import pytest
import torch

from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.paged import Share, check_layout, heads_of, slots_of, write_rows
from tests.serving.fakes import BLOCK, empty_layers, rows_in

LAYOUT = KVLayout(n_layers=3, n_kv_heads=4, head_dim=6, dtype=torch.float32)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 20), (3, 20), (8, 16), (15, 17), (4, 4)])
def test_rows_lie_in_the_blocks_of_their_request(start, stop):
    layers, blocks = empty_layers(LAYOUT), (7, 2, 30)
    kv = torch.randn(3, 2, 4, stop - start, 6)
    slots = slots_of(blocks, BLOCK, range(start, stop))
    write_rows(Share(layers=layers, heads=slice(0, 4)), kv, slots)
    rows = rows_in(layers, blocks, 24)
    assert torch.equal(rows[..., start:stop, :], kv)
    assert rows[..., :start, :].isnan().all()
    assert rows[..., stop:, :].isnan().all()
    others = [i for i in range(32) if i not in blocks]
    assert layers[0].kv_cache[others].isnan().all()


@pytest.mark.parametrize(("size", "per_rank"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_ranks_hold_their_own_heads(size, per_rank):
    kv = torch.randn(3, 2, 4, 5, 6)
    for rank in range(size):
        layers = empty_layers(LAYOUT, n_heads=per_rank)
        heads = heads_of(4, rank, size)
        write_rows(Share(layers=layers, heads=heads), kv, slots_of((1,), BLOCK, range(5)))
        first = rank * 4 // size
        assert torch.equal(rows_in(layers, (1,), 5), kv[:, :, first : first + per_rank])


def test_a_pipeline_stage_holds_its_own_layers():
    layers = {2: empty_layers(LAYOUT)[2]}
    kv = torch.randn(3, 2, 4, 5, 6)
    write_rows(Share(layers=layers, heads=slice(0, 4)), kv, slots_of((0,), BLOCK, range(5)))
    assert torch.equal(rows_in(layers, (0,), 5)[0], kv[2])


def test_heads_that_cannot_be_shared_are_refused():
    with pytest.raises(ConfigError, match="3 KV heads"):
        heads_of(3, 0, 2)


def test_another_model_or_dtype_is_refused():
    same = {"n_layers": 3, "n_kv_heads": 4, "head_dim": 6, "dtype": torch.float32}
    check_layout(LAYOUT, **same)
    for change in ({"n_layers": 4}, {"n_kv_heads": 2}, {"head_dim": 8}, {"dtype": torch.bfloat16}):
        with pytest.raises(ConfigError, match="serve the model that the store was built with"):
            check_layout(LAYOUT, **{**same, **change})
