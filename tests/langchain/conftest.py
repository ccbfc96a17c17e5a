"""A small corpus as LangChain documents, and a store that holds it."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.langchain import add_documents
from coinrag_integrations.rag import CoinRAG
from tests.adapters import TEXTS, WIDE


@pytest.fixture
def documents() -> list[Document]:
    return [
        Document(page_content=text, metadata={"source": name, "title": name.title()})
        for name, text in TEXTS.items()
    ]


@pytest.fixture
def filled(rag: CoinRAG, documents: list[Document]) -> CoinRAG:
    rag.generation = GenerationConfig(max_new_tokens=8)
    rag.retrieval = WIDE
    add_documents(rag, documents)
    return rag
