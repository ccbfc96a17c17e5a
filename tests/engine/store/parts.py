"""A small store and chunks for it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.types import ChunkId, Span, SpanRef

LAYOUT = KVLayout(n_layers=2, n_kv_heads=1, head_dim=4, dtype=torch.float32)
FINGERPRINT = Fingerprint(
    weights="w", tokenizer="t", rope="r", layout="2x2x1x4", dtype="float32", context="alone"
)


def chunk_id(name: object) -> ChunkId:
    return ChunkId(hashlib.md5(str(name).encode(), usedforsecurity=False).hexdigest())


def make_kv(n_tokens: int, layout: KVLayout = LAYOUT, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(layout.staged(n_tokens), generator=random).to(layout.dtype)


def open_store(folder: Path, layout: KVLayout = LAYOUT, **changes: str) -> KVStore:
    return KVStore(folder, layout, replace(FINGERPRINT, **changes))


def read(store: KVStore, *refs: SpanRef) -> torch.Tensor:
    """The entries of spans; raises the first error."""
    out = torch.full(store.layout.staged(sum(map(len, refs))), torch.nan, dtype=store.layout.dtype)
    for _, error in sorted(store.read(refs, out).items()):
        raise error
    return out


def whole(n_tokens: int) -> list[Span]:
    return [Span(0, n_tokens)]
