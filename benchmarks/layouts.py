"""Layouts of real models, for benchmarks that need no weights."""

from __future__ import annotations

import torch

from coinrag_integrations.engine.layout import KVLayout

LAYOUTS = {
    "smollm2-135m": KVLayout(n_layers=30, n_kv_heads=3, head_dim=64, dtype=torch.bfloat16),
    "qwen2-7b": KVLayout(n_layers=28, n_kv_heads=4, head_dim=128, dtype=torch.bfloat16),
}
