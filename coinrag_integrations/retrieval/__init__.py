"""Finding the chunks and nuggets that matter. Knows Chroma and embedders, not torch."""

from __future__ import annotations

from coinrag_integrations.retrieval.chroma import clean_metadata, is_list, open_client, pages
from coinrag_integrations.retrieval.config import RetrievalConfig
from coinrag_integrations.retrieval.embedders import BGEM3Embedder, Embedder, MiniLMEmbedder
from coinrag_integrations.retrieval.filters import Condition, all_of, any_of, where_of
from coinrag_integrations.retrieval.folder import ChromaFolder
from coinrag_integrations.retrieval.index import SpanIndex
from coinrag_integrations.retrieval.rerank import CrossEncoder

__all__ = [
    "BGEM3Embedder",
    "ChromaFolder",
    "Condition",
    "CrossEncoder",
    "Embedder",
    "MiniLMEmbedder",
    "RetrievalConfig",
    "SpanIndex",
    "all_of",
    "any_of",
    "clean_metadata",
    "is_list",
    "open_client",
    "pages",
    "where_of",
]
