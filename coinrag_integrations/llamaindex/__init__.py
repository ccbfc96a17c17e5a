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
from coinrag_integrations.llamaindex.chat_engine import CoinRAGChatEngine
from coinrag_integrations.llamaindex.events import KVComposeEndEvent, KVComposeStartEvent
from coinrag_integrations.llamaindex.index import CoinRAGIndex
from coinrag_integrations.llamaindex.ingest import CoinRAGIngestor, add_documents
from coinrag_integrations.llamaindex.llm import CoinRAGLLM
from coinrag_integrations.llamaindex.node_parser import NuggetNodeParser
from coinrag_integrations.llamaindex.postprocessors import CoinRAGRerank, StripHandles
from coinrag_integrations.llamaindex.prompt_helper import MarkedPromptHelper
from coinrag_integrations.llamaindex.query_engine import CoinRAGQueryEngine
from coinrag_integrations.llamaindex.retriever import CoinRAGRetriever
from coinrag_integrations.llamaindex.settings import use_coinrag, using_coinrag
from coinrag_integrations.llamaindex.span_node import SpanNode
from coinrag_integrations.llamaindex.synthesizer import CoinRAGSynthesizer
from coinrag_integrations.llamaindex.vector_store import CoinRAGVectorStore

__all__ = [
    "CoinRAGChatEngine",
    "CoinRAGIndex",
    "CoinRAGIngestor",
    "CoinRAGLLM",
    "CoinRAGQueryEngine",
    "CoinRAGRerank",
    "CoinRAGRetriever",
    "CoinRAGSynthesizer",
    "CoinRAGVectorStore",
    "KVComposeEndEvent",
    "KVComposeStartEvent",
    "LlamaIndexEmbedder",
    "MarkedPromptHelper",
    "NuggetNodeParser",
    "SpanNode",
    "StripHandles",
    "add_documents",
    "complete_with",
    "use_coinrag",
    "using_coinrag",
]
