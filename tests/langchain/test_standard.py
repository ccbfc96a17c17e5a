"""LangChain's own tests of integrations, run on a tiny random model."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from typing import Any

from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    RetrieversIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests

from coinrag_integrations.engine import EngineConfig, GenerationConfig
from coinrag_integrations.langchain import ChatCoinRAG, CoinRAGRetriever
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document
from tests.adapters import QUESTION, TEXTS, WIDE
from tests.tiny import HashEmbedder, tiny_model


@cache
def store() -> CoinRAG:
    """A store that lives as long as the process: these tests take classes and parameters, no fixtures."""
    folder = tempfile.TemporaryDirectory(prefix="coinrag-standard-")
    rag = CoinRAG.open(
        folder.name,
        model=tiny_model(),
        embedder=HashEmbedder(),
        config=EngineConfig(chunk_tokens=32, coverage="all", load="read"),
        generation=GenerationConfig(max_new_tokens=8),
        retrieval=WIDE,
    )
    rag.add(Document(document_id=name, text=text) for name, text in TEXTS.items())
    atexit.register(folder.cleanup)
    atexit.register(rag.close)
    return rag


class _OneModel:
    """Follows no schema, and is the model of its store."""

    has_structured_output = False
    supports_model_override = False


class TestChatCoinRAGUnit(_OneModel, ChatModelUnitTests):
    has_tool_calling = True

    @property
    def chat_model_class(self) -> type[ChatCoinRAG]:
        return ChatCoinRAG

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"rag": store()}


class TestChatCoinRAGIntegration(_OneModel, ChatModelIntegrationTests):
    # These tests want a model that calls a tool when it should, and a random one calls nothing:
    # test_tools.py and test_agents.py put calls into its mouth.
    has_tool_calling = False

    @property
    def chat_model_class(self) -> type[ChatCoinRAG]:
        return ChatCoinRAG

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"rag": store(), "max_tokens": 12}


class TestCoinRAGRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[CoinRAGRetriever]:
        return CoinRAGRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"rag": store()}

    @property
    def retriever_query_example(self) -> str:
        return QUESTION
