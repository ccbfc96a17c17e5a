from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, Document, MetadataMode, NodeRelationship, TextNode

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex import NuggetNodeParser
from coinrag_integrations.llamaindex._convert import nuggets_of, span_of
from coinrag_integrations.nuggets import LLMProposer, RuleProposer
from coinrag_integrations.rag import CoinRAG
from tests.adapters import REPEATED, TEXTS, ticks_during


@pytest.fixture
def parser(rag: CoinRAG) -> NuggetNodeParser:
    return NuggetNodeParser.from_defaults(rag=rag)


def by_document(nodes: Sequence[BaseNode]) -> dict[str, list[TextNode]]:
    groups: dict[str, list[TextNode]] = {}
    for node in nodes:
        assert isinstance(node, TextNode)
        groups.setdefault(str(node.ref_doc_id), []).append(node)
    return groups


def test_offsets_are_exact_also_where_text_repeats(
    parser: NuggetNodeParser, documents: list[Document]
):
    texts = {**TEXTS, "repeated": REPEATED}
    documents.append(Document(id_="repeated", text=REPEATED))
    groups = by_document(parser.get_nodes_from_documents(documents))
    assert set(groups) == set(texts)
    for name, nodes in groups.items():
        text = texts[name]
        assert "".join(node.text for node in nodes) == text
        for node in nodes:
            assert text[node.start_char_idx : node.end_char_idx] == node.text
        # The right one of several places with that text: where the node before ends.
        ends = [0, *(node.end_char_idx for node in nodes)]
        assert [node.start_char_idx for node in nodes] == ends[:-1]


def test_nodes_are_the_stores_chunks(filled: CoinRAG, documents: list[Document]):
    nodes = NuggetNodeParser.from_defaults(rag=filled).get_nodes_from_documents(documents)
    chunks = {chunk.chunk_id: chunk for chunk in filled.engine.catalog.chunks()}
    assert {node.node_id for node in nodes} == set(chunks)
    for node in nodes:
        chunk = chunks[node.node_id]
        assert span_of(node).ref == chunk.ref()
        assert nuggets_of(node) == chunk.nuggets


def test_ids_are_the_same_every_time(parser: NuggetNodeParser, documents: list[Document]):
    first = parser.get_nodes_from_documents(documents)
    second = parser.get_nodes_from_documents(documents)
    assert [n.node_id for n in first] == [n.node_id for n in second]
    assert [n.hash for n in first] == [n.hash for n in second]
    assert len({n.node_id for n in first}) == len(first)


def test_an_id_func_of_the_users_is_used(rag: CoinRAG, documents: list[Document]):
    parser = NuggetNodeParser.from_defaults(rag=rag, id_func=lambda i, doc: f"{doc.node_id}-{i}")
    nodes = parser.get_nodes_from_documents(documents[:1])
    assert [n.node_id for n in nodes] == [f"organ-{i}" for i in range(len(nodes))]


def test_models_read_the_users_metadata_and_none_of_ours(
    parser: NuggetNodeParser, documents: list[Document]
):
    documents[0].excluded_llm_metadata_keys = ["year"]
    for node in parser.get_nodes_from_documents(documents[:1]):
        text = node.get_content(metadata_mode=MetadataMode.NONE).rstrip()
        llm, embed = (node.get_content(metadata_mode=m) for m in (MetadataMode.LLM, "embed"))
        assert llm == f"title: Organ\n\n{text}"
        assert embed == f"title: Organ\nyear: 1923\n\n{text}"


def test_neighbours_and_source_are_linked_without_copies_of_nuggets(
    parser: NuggetNodeParser, documents: list[Document]
):
    nodes = parser.get_nodes_from_documents(documents[2:3])
    assert len(nodes) > 2
    for before, after in pairwise(nodes):
        assert before.next_node is not None
        assert before.next_node.node_id == after.node_id
        assert after.prev_node is not None
        assert after.prev_node.node_id == before.node_id
        assert "coinrag_nuggets" in before.metadata
        assert "coinrag_nuggets" not in before.next_node.metadata
    assert all(node.ref_doc_id == "wheel" for node in nodes)


def test_switches_of_the_base_class_are_kept(rag: CoinRAG, documents: list[Document]):
    parser = NuggetNodeParser.from_defaults(
        rag=rag, include_metadata=False, include_prev_next_rel=False
    )
    for node in parser.get_nodes_from_documents(documents):
        assert "title" not in node.metadata
        assert set(node.relationships) == {NodeRelationship.SOURCE}


def test_pieces_of_a_document_count_from_where_it_starts(
    parser: NuggetNodeParser, documents: list[Document]
):
    pieces = SentenceSplitter(chunk_size=30, chunk_overlap=0).get_nodes_from_documents(documents)
    for name, nodes in by_document(parser(pieces)).items():
        for node in nodes:
            assert TEXTS[name][node.start_char_idx : node.end_char_idx] == node.text


def test_documents_without_text_have_no_nodes(parser: NuggetNodeParser):
    assert parser.get_nodes_from_documents([Document(text="")]) == []


def test_node_parsing_is_announced(rag: CoinRAG, documents: list[Document]):
    handler = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([handler])
    NuggetNodeParser.from_defaults(rag=rag, callback_manager=manager)(documents)
    assert len(handler.get_event_pairs(CBEventType.NODE_PARSING)) == 1


class SlowProposer(RuleProposer):
    """Rules that think for 0.2 s, as an LLM would for longer."""

    def ranges(self, text: str) -> list[tuple[int, int]]:
        time.sleep(0.2)
        return super().ranges(text)


async def test_parsing_leaves_the_event_loop_free(filled: CoinRAG, documents: list[Document]):
    slow = CoinRAG(filled.engine, filled.index, proposer=SlowProposer())
    parser = NuggetNodeParser.from_defaults(rag=slow)
    nodes, ticks = await ticks_during(parser.aget_nodes_from_documents(documents[3:]))
    assert ticks >= 10
    assert nodes == parser.get_nodes_from_documents(documents[3:])


def test_a_parser_is_read_back_from_its_dict(
    rag: CoinRAG, parser: NuggetNodeParser, documents: list[Document]
):
    saved = parser.to_dict()
    assert saved["class_name"] == "NuggetNodeParser"
    assert saved["chunk_tokens"] == 32
    again = NuggetNodeParser.from_dict(saved, rag=rag)
    assert again.to_dict() == saved
    assert again(documents) == parser(documents)


def test_a_parser_without_its_store_says_so(parser: NuggetNodeParser, documents: list[Document]):
    lost = NuggetNodeParser.from_dict(parser.to_dict())
    assert lost.to_dict() == parser.to_dict()
    with pytest.raises(ConfigError, match="without its CoinRAG"):
        lost(documents)


def test_a_parser_can_be_pickled(parser: NuggetNodeParser, documents: list[Document]):
    again = pickle.loads(pickle.dumps(parser))
    assert again.to_dict() == parser.to_dict()
    assert again(documents) == parser(documents)


def test_a_proposer_that_cannot_be_pickled_is_missed_by_name(rag: CoinRAG, documents):
    proposer = LLMProposer(complete=lambda prompt: "[]", model_id="x")
    parser = NuggetNodeParser.from_defaults(rag=rag, proposer=proposer)
    assert parser(documents)
    with pytest.raises(ConfigError, match="pickled with a proposer that cannot be"):
        pickle.loads(pickle.dumps(parser))(documents)


def test_two_processes_make_the_nodes_of_one(parser: NuggetNodeParser, documents: list[Document]):
    steps = IngestionPipeline(transformations=[parser], disable_cache=True)
    alone = steps.run(documents=documents)
    together = steps.run(documents=documents, num_workers=2)
    assert sorted(map(_plain, together), key=str) == sorted(map(_plain, alone), key=str)


def _plain(node: BaseNode) -> object:
    return (node.node_id, node.text, node.start_char_idx, node.metadata)


def test_a_copy_shares_the_engine(parser: NuggetNodeParser, documents: list[Document]):
    assert copy.deepcopy(parser)(documents) == parser(documents)


def test_what_cannot_be_read_back_is_named(rag: CoinRAG, parser: NuggetNodeParser):
    with pytest.raises(ConfigError, match="chunk_tokens"):
        NuggetNodeParser.from_dict({**parser.to_dict(), "chunk_tokens": 64}, rag=rag)

    def my_ids(i: int, doc: BaseNode) -> str:
        return str(i)

    saved = NuggetNodeParser.from_defaults(rag=rag, id_func=my_ids).to_dict()
    with pytest.raises(ConfigError, match="my_ids"):
        NuggetNodeParser.from_dict(saved, rag=rag)
    assert NuggetNodeParser.from_dict(saved, rag=rag, id_func=my_ids).id_func is my_ids


def test_a_pipeline_runs_it_and_caches_its_nodes(
    parser: NuggetNodeParser, documents: list[Document]
):
    pipeline = IngestionPipeline(transformations=[parser])
    first = pipeline.run(documents=documents)
    assert pipeline.run(documents=documents) == first
    assert asyncio.run(pipeline.arun(documents=documents)) == first
