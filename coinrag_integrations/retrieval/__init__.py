"""Finding the chunks and nuggets that matter. Knows Chroma and embedders, not torch."""

from __future__ import annotations

from coinrag_integrations.retrieval.chroma import clean_metadata, open_client, pages
from coinrag_integrations.retrieval.embedders import BGEM3Embedder, Embedder, MiniLMEmbedder
from coinrag_integrations.retrieval.folder import ChromaFolder
from coinrag_integrations.retrieval.index import RetrievalConfig, SpanIndex

__all__ = [
    "BGEM3Embedder",
    "ChromaFolder",
    "Embedder",
    "MiniLMEmbedder",
    "RetrievalConfig",
    "SpanIndex",
    "clean_metadata",
    "open_client",
    "pages",
]
