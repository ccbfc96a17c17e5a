"""A small corpus as LangChain documents, and a store that holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document

from coinrag_integrations.engine import AnswerStream, Engine, GenerationConfig
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


@pytest.fixture
def opened(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[AnswerStream]:
    """Every answer that the engine begins from now on, whichever way it is asked."""
    streams: list[AnswerStream] = []

    def watched(begin: Callable[..., AnswerStream]) -> Callable[..., AnswerStream]:
        def begun(*args: Any, **options: Any) -> AnswerStream:
            streams.append(begin(*args, **options))
            return streams[-1]

        return begun

    for name in ("chat", "complete", "stream"):
        monkeypatch.setattr(engine, name, watched(getattr(engine, name)))
    return streams
