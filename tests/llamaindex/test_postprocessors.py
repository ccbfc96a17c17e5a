from __future__ import annotations

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex import (
    CoinRAGQueryEngine,
    CoinRAGRerank,
    CoinRAGRetriever,
    StripHandles,
)
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import CrossEncoder
from tests.adapters import QUESTION
from tests.llamaindex.recorder import Recorder
from tests.tiny import save_tiny_reranker


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    return save_tiny_reranker(tmp_path_factory.mktemp("reranker"))


@pytest.fixture
def nodes() -> list[NodeWithScore]:
    texts = ["It was built in 1923.", "Rye bread.", "Bastien Roule built it."]
    return [NodeWithScore(node=TextNode(text=text), score=0.5) for text in texts]


def test_nodes_are_ordered_by_the_cross_encoder(reranker, nodes, recorder: Recorder):
    rerank = CoinRAGRerank(model=reranker, top_n=2, device="cpu")
    assert isinstance(rerank, BaseNodePostprocessor)
    found = rerank.postprocess_nodes(nodes, query_str="When?")
    scores = CrossEncoder(reranker, device="cpu").score("When?", [n.node.text for n in nodes])
    expected = sorted(zip(scores, nodes, strict=True), key=lambda it: -it[0])[:2]
    assert [n.node.text for n in found] == [n.node.text for _, n in expected]
    assert [n.score for n in found] == pytest.approx([score for score, _ in expected])
    assert [n.score for n in nodes] == [0.5] * 3  # theirs are left alone
    assert recorder.names == ["ReRankStartEvent", "ReRankEndEvent"]
    assert rerank.postprocess_nodes([], query_str="When?") == []


async def test_it_says_what_it_needs_and_can_be_written_down(reranker, nodes):
    handler = LlamaDebugHandler(print_trace_on_end=False)
    rerank = CoinRAGRerank(
        model=reranker, device="cpu", callback_manager=CallbackManager([handler])
    )
    with pytest.raises(ConfigError, match="needs the question"):
        rerank.postprocess_nodes(nodes)
    again = CoinRAGRerank.from_dict(rerank.to_dict())
    assert (again.model, again.top_n) == (str(reranker), 5)
    found = await rerank.apostprocess_nodes(nodes, query_str="When?")
    assert len(found) == 3
    assert len(handler.get_event_pairs(CBEventType.RERANKING)) == 1


def test_reranked_spans_are_still_answered_from_kv(filled: CoinRAG, reranker):
    rerank = CoinRAGRerank(model=reranker, top_n=3, device="cpu")
    response = CoinRAGQueryEngine.from_args(filled, node_postprocessors=[rerank]).query(QUESTION)
    assert len(response.source_nodes) == 3
    kept = {node.node.metadata["coinrag_chunk_id"] for node in response.source_nodes}
    used = response.metadata["coinrag"]
    assert {chunk_id for chunk_id, _, _ in used["spans"]} == kept
    assert used["usage"]["online"] < 60


def test_handles_are_stripped_of_copies(filled: CoinRAG):
    marked = CoinRAGRetriever(filled).retrieve(QUESTION)
    other = NodeWithScore(node=TextNode(text="x"), score=1.0)
    stripped = StripHandles().postprocess_nodes([*marked, other])
    assert stripped[-1] is other
    for before, after in zip(marked, stripped[:-1], strict=True):
        assert "⟦k:" in before.node.get_content(MetadataMode.LLM)
        assert "⟦k:" not in after.node.get_content(MetadataMode.LLM)
        assert (before.node.text, before.score) == (after.node.text, after.score)
