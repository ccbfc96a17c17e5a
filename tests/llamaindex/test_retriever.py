from __future__ import annotations

import pytest
from llama_index.core.schema import NodeWithScore, QueryBundle

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex import CoinRAGRetriever
from coinrag_integrations.llamaindex._convert import span_of
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION, TEXTS, SlowEmbedder, ticks_during


def spans(nodes: list[NodeWithScore]) -> list[tuple[str, int, int]]:
    return [(s.ref.chunk_id, s.ref.start, s.ref.stop) for s in map(span_of, nodes)]


def test_nodes_are_the_stores_spans_with_exact_offsets(filled: CoinRAG):
    nodes = CoinRAGRetriever(filled).retrieve(QUESTION)
    assert [span_of(node) for node in nodes] == filled.retrieve(QUESTION)
    for found in nodes:
        name = found.node.ref_doc_id
        start, end = found.node.start_char_idx, found.node.end_char_idx
        assert TEXTS[name][start:end] == found.node.text
        assert found.node.metadata["title"] == name.title()


def test_scores_are_there_and_fall(filled: CoinRAG):
    scores = [node.score for node in CoinRAGRetriever(filled).retrieve(QUESTION)]
    assert all(isinstance(score, float) for score in scores)
    # Ties that differ in the last bits are in the order of their spans.
    rounded = [round(score, 6) for score in scores]
    assert rounded == sorted(rounded, reverse=True)
    exact = "The lighthouse of Sorn is white."
    best = CoinRAGRetriever(filled).retrieve(exact)[0]
    assert best.node.text == exact
    assert best.score == pytest.approx(1.0, abs=1e-5)


def test_widths_bound_what_is_found(filled: CoinRAG):
    assert len(CoinRAGRetriever(filled, n_nuggets=2).retrieve(QUESTION)) == 2
    narrow = CoinRAGRetriever(filled, n_chunks=1).retrieve(QUESTION)
    assert len({span_of(node).ref.chunk_id for node in narrow}) == 1
    with pytest.raises(ConfigError, match="n_nuggets=0"):
        CoinRAGRetriever(filled, n_nuggets=0)


async def test_async_finds_the_same_and_leaves_the_event_loop_free(filled: CoinRAG):
    filled.index.embedder = SlowEmbedder(filled.index.embedder)
    retriever = CoinRAGRetriever(filled)
    nodes, ticks = await ticks_during(retriever.aretrieve(QueryBundle(QUESTION)))
    assert ticks >= 10
    assert nodes == retriever.retrieve(QUESTION)


def test_an_empty_store_has_no_nodes(rag: CoinRAG):
    assert CoinRAGRetriever(rag).retrieve(QUESTION) == []
