from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tools import create_retriever_tool

from coinrag_integrations.engine import strip_handles
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain import CoinRAGRetriever
from coinrag_integrations.langchain._convert import span_of, text_of
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION, TEXTS, SlowEmbedder, ticks_during


def test_documents_are_the_stores_spans_with_exact_offsets(filled: CoinRAG):
    documents = CoinRAGRetriever(rag=filled).invoke(QUESTION)
    assert [span_of(document) for document in documents] == filled.retrieve(QUESTION)
    for found in documents:
        start, stop = (found.metadata[f"coinrag_char_{end}"] for end in ("start", "stop"))
        text = TEXTS[found.metadata["source"]][start:stop]
        assert strip_handles(found.page_content) == text != found.page_content
    plain = CoinRAGRetriever(rag=filled, render="text").invoke(QUESTION)
    assert [it.page_content for it in plain] == [text_of(it) for it in documents]


def test_scores_are_there_and_fall(filled: CoinRAG):
    documents = CoinRAGRetriever(rag=filled).invoke(QUESTION)
    scores = [document.metadata["coinrag_score"] for document in documents]
    # Ties that differ in the last bits are in the order of their spans.
    rounded = [round(score, 6) for score in scores]
    assert rounded == sorted(rounded, reverse=True)
    exact = "The lighthouse of Sorn is white."
    best = CoinRAGRetriever(rag=filled, render="text").invoke(exact)[0]
    assert best.page_content == exact
    assert best.metadata["coinrag_score"] == pytest.approx(1.0, abs=1e-5)


async def test_widths_can_be_given_for_good_or_for_one_call(filled: CoinRAG):
    retriever = CoinRAGRetriever(rag=filled, k=4)
    assert len(retriever.invoke(QUESTION)) == 4
    assert len(retriever.invoke(QUESTION, k=2)) == 2
    assert len(await retriever.ainvoke(QUESTION, k=3)) == 3
    narrow = CoinRAGRetriever(rag=filled).invoke(QUESTION, n_chunks=1)
    assert len({span_of(document).ref.chunk_id for document in narrow}) == 1
    with pytest.raises(ConfigError, match="n_nuggets=0"):
        retriever.invoke(QUESTION, k=0)
    with pytest.raises(TypeError, match="fetch_k"):
        retriever.invoke(QUESTION, fetch_k=2)


async def test_async_finds_the_same_and_leaves_the_event_loop_free(filled: CoinRAG):
    filled.index.embedder = SlowEmbedder(filled.index.embedder)
    retriever = CoinRAGRetriever(rag=filled)
    documents, ticks = await ticks_during(retriever.ainvoke(QUESTION))
    assert ticks >= 10
    assert documents == retriever.invoke(QUESTION)


def test_a_batch_finds_what_single_questions_find(filled: CoinRAG):
    retriever = CoinRAGRetriever(rag=filled)
    questions = [QUESTION, "Who painted the lighthouse?", "When does the café open?"]
    assert retriever.batch(questions) == [retriever.invoke(q) for q in questions]


class Recorder(BaseCallbackHandler):
    """Keeps what it is told of retrievals."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.found: list[Document] = []

    def on_retriever_start(self, *_: Any, metadata: dict[str, Any], **__: Any) -> None:
        self.started = metadata

    def on_retriever_end(self, documents: Any, **_: Any) -> None:
        self.found = list(documents)


def test_traces_say_what_was_searched(filled: CoinRAG):
    recorder = Recorder()
    documents = CoinRAGRetriever(rag=filled).invoke(QUESTION, {"callbacks": [recorder]})
    assert recorder.started["ls_vector_store_provider"] == "chroma"
    assert recorder.started["ls_embedding_model"] == "test-hash-64"
    assert recorder.started["ls_retriever_name"] == "coinrag"
    assert recorder.found == documents


def test_it_serves_as_a_tool(filled: CoinRAG):
    tool = create_retriever_tool(CoinRAGRetriever(rag=filled, k=2), "organ", "About the organ.")
    texts = [document.page_content for document in CoinRAGRetriever(rag=filled, k=2).invoke("tide")]
    assert tool.invoke("tide") == "\n\n".join(texts)


def test_an_empty_store_has_no_documents(rag: CoinRAG):
    assert CoinRAGRetriever(rag=rag).invoke(QUESTION) == []
