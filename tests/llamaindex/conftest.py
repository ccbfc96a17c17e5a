"""A small corpus as LlamaIndex documents, and a store that holds it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.schema import Document

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.llamaindex import add_documents
from coinrag_integrations.rag import CoinRAG
from tests.adapters import TEXTS, WIDE
from tests.llamaindex.recorder import Recorder


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


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    root, handler = get_dispatcher(), Recorder()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)
