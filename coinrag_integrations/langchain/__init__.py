"""CoinRAG for LangChain: documents in, span documents out, answers from cached KV.

rag = CoinRAG.open("store", model="demo")
add_documents(rag, DirectoryLoader("docs").load())
print(create_coinrag_chain(rag).invoke("Who built the tidal organ?")["answer"])
"""

from __future__ import annotations

try:
    import langchain_core as _core  # noqa: F401
    import langchain_text_splitters as _splitters  # noqa: F401
except ImportError as error:
    raise ImportError(
        "the LangChain adapter needs langchain-core and langchain-text-splitters: "
        f"pip install 'coinrag-integrations[langchain]' ({error})"
    ) from error

from coinrag_integrations.langchain._convert import LangChainEmbedder, complete_with
from coinrag_integrations.langchain.chain import CoinRAGGenerator, create_coinrag_chain
from coinrag_integrations.langchain.chat_model import ChatCoinRAG
from coinrag_integrations.langchain.compressor import CoinRAGRerank
from coinrag_integrations.langchain.ingest import add_documents
from coinrag_integrations.langchain.llm import CoinRAGLLM
from coinrag_integrations.langchain.retriever import CoinRAGRetriever
from coinrag_integrations.langchain.splitter import NuggetTextSplitter

__all__ = [
    "ChatCoinRAG",
    "CoinRAGGenerator",
    "CoinRAGLLM",
    "CoinRAGRerank",
    "CoinRAGRetriever",
    "LangChainEmbedder",
    "NuggetTextSplitter",
    "add_documents",
    "complete_with",
    "create_coinrag_chain",
]
