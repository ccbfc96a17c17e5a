"""CoinRAG for LlamaIndex: documents in, span nodes out, answers from cached KV.

rag = CoinRAG.open("store", model="demo")
add_documents(rag, SimpleDirectoryReader("docs", filename_as_id=True).load_data())
print(CoinRAGQueryEngine.from_args(rag).query("Who built the tidal organ?"))
"""

from __future__ import annotations

try:
    import llama_index.core as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the LlamaIndex adapter needs llama-index-core: "
        f"pip install 'coinrag-integrations[llamaindex]' ({error})"
    ) from error

from coinrag_integrations.llamaindex._convert import LlamaIndexEmbedder, complete_with
from coinrag_integrations.llamaindex.ingest import add_documents
from coinrag_integrations.llamaindex.node_parser import NuggetNodeParser
from coinrag_integrations.llamaindex.query_engine import CoinRAGQueryEngine
from coinrag_integrations.llamaindex.retriever import CoinRAGRetriever

__all__ = [
    "CoinRAGQueryEngine",
    "CoinRAGRetriever",
    "LlamaIndexEmbedder",
    "NuggetNodeParser",
    "add_documents",
    "complete_with",
]
