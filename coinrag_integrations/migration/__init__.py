"""Moving an application over: its Chroma collection into a store. Knows no framework, only their rows."""

from __future__ import annotations

from coinrag_integrations.migration.moving import (
    MigrationReport,
    check_embedder,
    fitting_chunk_tokens,
    migrate,
)
from coinrag_integrations.migration.opening import folder_bytes, open_collection
from coinrag_integrations.migration.rows import CollectionInfo, Notes, describe, read_documents

__all__ = [
    "CollectionInfo",
    "MigrationReport",
    "Notes",
    "check_embedder",
    "describe",
    "fitting_chunk_tokens",
    "folder_bytes",
    "migrate",
    "open_collection",
    "read_documents",
]
