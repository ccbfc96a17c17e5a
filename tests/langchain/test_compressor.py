from __future__ import annotations

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever

from coinrag_integrations.engine import strip_handles
from coinrag_integrations.langchain import ChatCoinRAG, CoinRAGRerank, CoinRAGRetriever
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import CrossEncoder
from tests.adapters import QUESTION
from tests.tiny import save_tiny_reranker


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return str(save_tiny_reranker(tmp_path_factory.mktemp("reranker")))


async def test_documents_between_retriever_and_model_are_ordered(filled: CoinRAG, reranker: str):
    rerank = CoinRAGRerank(model=reranker, top_n=3, device="cpu")
    base = CoinRAGRetriever(rag=filled, k=8)
    between = ContextualCompressionRetriever(base_compressor=rerank, base_retriever=base)
    found, given = between.invoke(QUESTION), base.invoke(QUESTION)
    texts = [strip_handles(document.page_content) for document in given]
    scores = CrossEncoder(reranker, device="cpu").score(QUESTION, texts)
    expected = sorted(zip(scores, given, strict=True), key=lambda it: -it[0])[:3]
    assert [it.page_content for it in found] == [it.page_content for _, it in expected]
    said = [it.metadata["coinrag_rerank_score"] for it in found]
    assert said == pytest.approx([score for score, _ in expected])
    assert [it.id for it in await between.ainvoke(QUESTION)] == [it.id for it in found]
    prompt = "\n".join(it.page_content for it in found)
    report = ChatCoinRAG(rag=filled, max_tokens=2).invoke(f"{prompt} Who?").response_metadata
    assert report["coinrag"]["refused"] == {}
    assert report["coinrag"]["spans"]


def test_nothing_is_loaded_for_nothing():
    assert CoinRAGRerank(model="no/such-model").compress_documents([], QUESTION) == []
