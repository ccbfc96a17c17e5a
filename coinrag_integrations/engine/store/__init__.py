"""What is kept on disk: KV files, and the catalog of the texts behind them."""

from __future__ import annotations

from coinrag_integrations.engine.store.catalog import Catalog
from coinrag_integrations.engine.store.codec import CODECS
from coinrag_integrations.engine.store.directory import KVStore
from coinrag_integrations.engine.store.disk import Disk, Limits, scope_folder, scopes
from coinrag_integrations.engine.store.format import PackedChunk
from coinrag_integrations.engine.store.near import ReadReport
from coinrag_integrations.engine.store.opening import open_scope
from coinrag_integrations.engine.store.remote import Remote
from coinrag_integrations.engine.store.stage import Stage

__all__ = [
    "CODECS",
    "Catalog",
    "Disk",
    "KVStore",
    "Limits",
    "PackedChunk",
    "ReadReport",
    "Remote",
    "Stage",
    "open_scope",
    "scope_folder",
    "scopes",
]
