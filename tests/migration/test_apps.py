"""The same application before and after it was moved: its answers rest on the same sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.language_models import BaseChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from llama_index.core import VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.schema import MetadataMode, NodeWithScore

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig
from coinrag_integrations.langchain import ChatCoinRAG, CoinRAGRetriever, LangChainEmbedder
from coinrag_integrations.llamaindex import CoinRAGIndex, CoinRAGVectorStore, LlamaIndexEmbedder
from coinrag_integrations.migration import migrate
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import Embedder, SpanIndex, open_client
from tests.migration.collections import (
    HashEmbedding,
    HashEmbeddings,
    fill_langchain,
    fill_llamaindex,
    langchain_store,
    llamaindex_store,
)
from tests.tiny import HashEmbedder, tiny_model

K = 3
THINGS = ["organ", "mill", "pier", "lamp", "canal", "bell", "ferry", "tower", "quarry", "market"]
TEXTS = [
    f"The {thing} of Port {i} was built in {1800 + i}. Its keeper was called Ada {i}. "
    f"People say that the {thing} is {'older' if i % 2 else 'younger'} than the harbour."
    for i, thing in enumerate(THINGS)
]
METADATA = [{"source": f"guide-{i // 3}.txt", "page": i} for i in range(len(TEXTS))]
# Each names three of the things, so that no fourth text is as near as the third.
QUESTIONS = [
    f"Were the {a}, the {b} and the {c} built before the harbour?"
    for a, b, c in zip(THINGS, THINGS[1:], THINGS[2:], strict=False)
]
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from this:\n\n{context}"), ("human", "{input}")]
)


def test_the_questions_leave_no_choice():
    embedder = HashEmbedder()
    for metadata in (False, True):  # LlamaIndex embeds metadata too
        texts = [
            "\n".join(f"{k}: {v}" for k, v in m.items()) + f"\n\n{t}" if metadata else t
            for t, m in zip(TEXTS, METADATA, strict=True)
        ]
        for question in QUESTIONS:
            scores = sorted(embedder.embed_documents(texts) @ embedder.embed_query(question))
            assert scores[-K] - scores[-K - 1] > 1e-3


def store(folder: Path, embedder: Embedder) -> CoinRAG:
    engine = Engine(tiny_model(), folder, EngineConfig(load="read"))
    index = SpanIndex(open_client(None), embedder, f"t{uuid4().hex}")
    return CoinRAG(engine, index, generation=GenerationConfig(max_new_tokens=4))


@pytest.fixture
def other_model(tmp_path: Path) -> Iterator[BaseChatModel]:
    """Any chat model, that reads everything as text."""
    with store(tmp_path / "other", LangChainEmbedder(HashEmbeddings())) as rag:
        yield ChatCoinRAG(rag=rag, max_tokens=4)


def langchain_app(retriever: BaseRetriever, model: BaseChatModel):
    """The application. Nothing in it knows where passages come from."""
    return create_retrieval_chain(retriever, create_stuff_documents_chain(model, PROMPT))


def test_a_langchain_app_answers_from_the_same_sources(tmp_path: Path, other_model: BaseChatModel):
    fill_langchain(tmp_path / "db", TEXTS, METADATA)
    with (
        langchain_store(tmp_path / "db") as vectors,
        store(tmp_path / "store", LangChainEmbedder(HashEmbeddings())) as rag,
    ):
        before = langchain_app(vectors.as_retriever(search_kwargs={"k": K}), other_model)
        migrate(rag, vectors)
        model = ChatCoinRAG(rag=rag, max_tokens=4)
        wide = langchain_app(CoinRAGRetriever(rag=rag, k=100, n_chunks=K), model)
        narrow = langchain_app(CoinRAGRetriever(rag=rag, k=2, n_chunks=K), model)
        for question in QUESTIONS:
            old = before.invoke({"input": question})
            new = wide.invoke({"input": question})
            rows = {document.id: document.metadata for document in old["context"]}
            for document in new["context"]:
                id_ = document.metadata["coinrag_document_id"]
                assert document.metadata.items() >= rows[id_].items()
            assert {it.metadata["coinrag_document_id"] for it in new["context"]} == set(rows)
            assert _sources(new) == _sources(old)
            few = narrow.invoke({"input": question})
            assert len(few["context"]) == 2
            assert _sources(few) <= _sources(old)
        usage = model.invoke(
            PROMPT.invoke({"context": few["context"][0].page_content, "input": "x"})
        )
        assert usage.usage_metadata["input_token_details"]["cache_read"] > 0


def _sources(result: dict) -> set[str]:
    return {document.metadata["source"] for document in result["context"]}


def test_a_llamaindex_app_answers_from_the_same_sources(tmp_path: Path):
    fill_llamaindex(tmp_path / "db", TEXTS, METADATA, excluded_llm_metadata_keys=["page"])
    with (
        llamaindex_store(tmp_path / "db") as vectors,
        store(tmp_path / "store", LlamaIndexEmbedder(HashEmbedding())) as rag,
    ):
        index = VectorStoreIndex.from_vector_store(vectors, embed_model=HashEmbedding())
        before = index.as_query_engine(llm=MockLLM(), similarity_top_k=K)
        migrate(rag, index)
        after = CoinRAGIndex(rag).as_query_engine(n_chunks=K, n_nuggets=100)
        for question in QUESTIONS:
            old = {it.node.node_id: it for it in before.query(question).source_nodes}
            found = after.query(question)
            new: dict[str, list[NodeWithScore]] = {}
            for it in found.source_nodes:
                new.setdefault(it.node.metadata["coinrag_document_id"], []).append(it)
            assert new.keys() == old.keys()
            for id_, nodes in new.items():
                for it in nodes:
                    assert it.node.ref_doc_id == old[id_].node.ref_doc_id
                    assert it.node.metadata.items() >= old[id_].node.metadata.items()
                    assert it.node.get_content(MetadataMode.NONE) in old[id_].node.text
                    shown = it.node.get_content(MetadataMode.LLM)
                    assert "source: guide-" in shown
                    assert "page" not in shown
            assert found.metadata["coinrag"]["usage"]["cached"] > 0


@pytest.mark.parametrize("through", ["index", "vector store"])
def test_deleting_a_document_deletes_all_nodes_of_it(tmp_path: Path, through: str):
    fill_llamaindex(tmp_path / "db", TEXTS)
    with store(tmp_path / "store", LlamaIndexEmbedder(HashEmbedding())) as rag:
        migrate(rag, tmp_path / "db")
        if through == "index":
            assert CoinRAGIndex(rag).delete_ref_doc("doc-1")
            assert not CoinRAGIndex(rag).delete_ref_doc("doc-1")
        else:
            CoinRAGVectorStore(rag=rag).delete("doc-1")
        left = {f"node-{i}" for i in range(len(TEXTS))} - {"node-2", "node-3"}
        assert set(rag.engine.catalog.documents()) == left
