"""What is kept on disk: KV files, and the catalog of the texts behind them."""

from __future__ import annotations

from coinrag_integrations.engine.store.catalog import Catalog
from coinrag_integrations.engine.store.directory import KVStore

__all__ = ["Catalog", "KVStore"]
