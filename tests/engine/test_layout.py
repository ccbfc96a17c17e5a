from __future__ import annotations

import pytest
import torch

from coinrag_integrations.engine.layout import DTYPES, KVLayout, dtype_name
from coinrag_integrations.errors import ConfigError


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_sizes_agree_with_tensors_of_those_shapes(dtype):
    layout = KVLayout(n_layers=3, n_kv_heads=2, head_dim=16, dtype=dtype)
    staged = torch.empty(layout.staged(7), dtype=dtype)
    prefix = torch.empty(layout.prefixes(1, 7), dtype=dtype)
    assert staged.nbytes == prefix.nbytes == 7 * layout.bytes_per_entry
    assert staged.permute(1, 2, 3, 0, 4)[:, :, None].shape == prefix.shape


def test_the_sizes_of_known_models():
    qwen = KVLayout(n_layers=28, n_kv_heads=4, head_dim=128, dtype=torch.bfloat16)
    smol = KVLayout(n_layers=30, n_kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    assert (qwen.bytes_per_entry, smol.bytes_per_entry) == (57_344, 23_040)


def test_dtypes_have_names_and_others_are_refused():
    assert {dtype_name(d) for d in DTYPES.values()} == {"float32", "float16", "bfloat16"}
    for dtype in (torch.float64, torch.int8):
        with pytest.raises(ConfigError, match="cannot hold KV"):
            dtype_name(dtype)
