"""A small corpus as LlamaIndex documents, and a store that holds it."""

from __future__ import annotations

import pytest
from llama_index.core.schema import Document

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.llamaindex import add_documents
from coinrag_integrations.rag import CoinRAG
from tests.adapters import TEXTS, WIDE


@pytest.fixture
def documents() -> list[Document]:
    return [
        Document(id_=name, text=text, metadata={"title": name.title(), "year": 1923})
        for name, text in TEXTS.items()
    ]


@pytest.fixture
def filled(rag: CoinRAG, documents: list[Document]) -> CoinRAG:
    rag.generation = GenerationConfig(max_new_tokens=8)
    rag.retrieval = WIDE
    add_documents(rag, documents)
    return rag
