"""The index, and pipelines that add, replace and delete: nuggets and KV follow the documents."""

from __future__ import annotations

import pickle

import pytest
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import Document, NodeRelationship
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.types import VectorStoreQuery

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex import (
    CoinRAGIndex,
    CoinRAGIngestor,
    CoinRAGQueryEngine,
    CoinRAGVectorStore,
    NuggetNodeParser,
)
from coinrag_integrations.nuggets import RuleProposer
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION, TEXTS, WIDE, leaving_the_loop_free


def state(rag: CoinRAG) -> tuple[list[str], set[str], dict[str, int], set[str]]:
    """Documents, chunks, rows of the index, and files."""
    catalog = rag.engine.catalog
    chunks = {chunk.chunk_id for chunk in catalog.chunks()}
    return catalog.documents(), chunks, rag.index.counts(), set(rag.engine.store)


def pipeline(rag: CoinRAG, **options: object) -> IngestionPipeline:
    return IngestionPipeline(
        transformations=[NuggetNodeParser.from_defaults(rag=rag), CoinRAGIngestor(rag=rag)],
        **options,
    )


def test_a_pipeline_builds_what_adding_documents_builds(rag: CoinRAG, documents, tmp_path):
    rag.retrieval = WIDE
    nodes = pipeline(rag).run(documents=documents)
    built = state(rag)
    assert {node.node_id for node in nodes} == built[1] == built[3]
    again = CoinRAGIndex.from_documents(documents, rag)
    assert state(rag) == built
    assert again.ref_doc_ids == sorted(TEXTS)
    assert rag.retrieve(QUESTION)[0].metadata == {"title": "Organ", "year": 1923}


def test_the_nuggets_of_the_nodes_are_kept(rag: CoinRAG, documents):
    class Whole(RuleProposer):
        """Proposes a text's first twelve characters."""

        proposer_id = "first-twelve"

        def propose(self, text: str) -> list[str]:
            return [text[:12]]

        def ranges(self, text: str) -> list[tuple[int, int]]:
            return [(0, min(12, len(text)))]

    parser = NuggetNodeParser.from_defaults(rag=rag, proposer=Whole())
    CoinRAGIngestor(rag=rag)(parser.get_nodes_from_documents(documents))
    for chunk in rag.engine.catalog.chunks():
        assert [nugget.text for nugget in chunk.nuggets] == [chunk.text[:12].strip()]
    before = state(rag)
    CoinRAGIngestor(rag=rag)(parser.get_nodes_from_documents(documents))
    assert state(rag) == before


async def test_a_pipeline_replaces_and_deletes(rag: CoinRAG, documents):
    rag.retrieval = WIDE
    steps = pipeline(
        rag,
        docstore=SimpleDocumentStore(),
        vector_store=CoinRAGVectorStore(rag=rag),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )
    steps.run(documents=documents)
    before = state(rag)
    steps.run(documents=documents)  # nothing changed
    assert state(rag) == before
    light = Document(
        id_="light", text="The lighthouse of Sorn is red now.", metadata={"year": 1999}
    )
    kept = [it for it in documents if it.doc_id not in ("light", "wheel")]
    await steps.arun(documents=[*kept, light])
    after = state(rag)
    assert after[0] == ["café", "light", "organ"]
    assert after[1] == after[3]
    texts = [span.text for span in rag.retrieve("lighthouse of Sorn wheel")]
    assert any("red now" in text for text in texts)
    assert not any("Ada Quill" in text or "Wheel" in text for text in texts)


def test_the_cache_of_a_pipeline_skips_what_is_there(rag: CoinRAG, documents):
    steps = pipeline(rag, cache=IngestionCache())
    first = steps.run(documents=documents)
    rag.delete(TEXTS)
    again = steps.run(documents=documents)
    assert [node.node_id for node in again] == [node.node_id for node in first]
    assert state(rag)[0] == []  # the cache gave the nodes back, and nothing ran


def test_nodes_of_others_and_halves_of_documents_are_refused(rag: CoinRAG, documents):
    ingest = CoinRAGIngestor(rag=rag)
    with pytest.raises(ConfigError, match="comes from another parser"):
        ingest(SentenceSplitter(chunk_size=64, chunk_overlap=8).get_nodes_from_documents(documents))
    nodes = NuggetNodeParser.from_defaults(rag=rag).get_nodes_from_documents(documents)
    by_document = [node for node in nodes if node.ref_doc_id == "wheel"]
    for some in (by_document[1:], by_document[:-1], by_document[::2]):
        with pytest.raises(ConfigError, match="'wheel' are not all of its chunks"):
            ingest(some)
    by_document[0].set_content("Changed.")
    with pytest.raises(ConfigError):
        ingest(by_document)
    assert state(rag)[0] == []


def test_whole_documents_can_be_ingested_without_a_parser(rag: CoinRAG, documents):
    assert IngestionPipeline(transformations=[CoinRAGIngestor(rag=rag)]).run(documents=documents)
    assert state(rag)[0] == sorted(TEXTS)


async def test_ingesting_leaves_the_event_loop_free(rag: CoinRAG):
    long = Document(id_="long", text="The mill of Tarsk ground 40 tons of rye a day. " * 80)
    await leaving_the_loop_free(CoinRAGIngestor(rag=rag).acall([long]))


@pytest.mark.parametrize("kind", [CoinRAGIngestor, CoinRAGVectorStore])
def test_steps_can_be_written_down(rag: CoinRAG, kind, documents):
    step = kind(rag=rag)
    assert kind.from_dict(step.to_dict()).class_name() == kind.__name__
    bare = pickle.loads(pickle.dumps(step))
    with pytest.raises(ConfigError, match="without its CoinRAG"):
        bare.delete("x") if kind is CoinRAGVectorStore else bare(documents)


# -- nugget nodes ----------------------------------------------------------------------------------


def test_nuggets_are_nodes_of_their_chunks(filled: CoinRAG, documents):
    parser = NuggetNodeParser.from_defaults(rag=filled, nugget_nodes=True)
    nodes = parser.get_nodes_from_documents(documents)
    chunks = {n.node_id: n for n in nodes if NodeRelationship.PARENT not in n.relationships}
    nuggets = {n.node_id: n for n in nodes if NodeRelationship.PARENT in n.relationships}
    plain = NuggetNodeParser.from_defaults(rag=filled).get_nodes_from_documents(documents)
    assert list(chunks) == [node.node_id for node in plain]
    for node, same in zip(chunks.values(), plain, strict=True):
        for side in (NodeRelationship.PREVIOUS, NodeRelationship.NEXT):
            assert node.relationships.get(side) == same.relationships.get(side)
    children = [it.node_id for n in chunks.values() for it in n.child_nodes or ()]
    assert children == list(nuggets)
    for node in nuggets.values():
        text = TEXTS[node.ref_doc_id]
        assert text[node.start_char_idx : node.end_char_idx] == node.text
        assert node.parent_node.node_id in chunks
        assert node.metadata["title"] == node.ref_doc_id.title()
    found = {it.node.node_id for it in CoinRAGIndex(filled).as_retriever().retrieve(QUESTION)}
    assert found & set(nuggets)


# -- the index -------------------------------------------------------------------------------------


def test_documents_come_and_go_by_their_ids(filled: CoinRAG, documents):
    index = CoinRAGIndex(filled)
    assert index.refresh_ref_docs(documents) == [False] * len(documents)
    changed = Document(id_="light", text="The lighthouse of Sorn is gone.")
    assert index.refresh_ref_docs([changed]) == [True]
    assert index.update_ref_doc(changed).n_unchanged == 1
    assert index.delete_ref_doc("light")
    assert not index.delete_ref_doc("light")
    assert "light" not in index.ref_doc_ids
    texts = [node.text for node in index.as_retriever().retrieve("lighthouse of Sorn")]
    assert not any("Sorn" in text for text in texts)
    documents_, chunks, _, files = state(filled)
    assert files == chunks
    assert len(documents_) == len(documents) - 1


def test_query_engines_are_fast_or_the_frameworks(filled: CoinRAG):
    index = CoinRAGIndex(filled)
    assert isinstance(index.as_query_engine(), CoinRAGQueryEngine)
    assert isinstance(index.as_query_engine(similarity_top_k=2, streaming=True), CoinRAGQueryEngine)
    refined = index.as_query_engine(response_mode="refine", similarity_top_k=2)
    assert type(refined) is RetrieverQueryEngine
    assert len(refined.query(QUESTION).source_nodes) == 2
    with pytest.raises(ConfigError, match="generation belongs to the fast engine"):
        index.as_query_engine(response_mode="refine", generation=filled.generation)


def test_a_vector_store_query_needs_its_words(filled: CoinRAG):
    store = CoinRAGVectorStore(rag=filled)
    assert store.client is filled
    found = store.query(VectorStoreQuery(query_str=QUESTION, similarity_top_k=2))
    assert len(found.nodes) == len(found.ids) == len(found.similarities) == 2
    with pytest.raises(ConfigError, match="give query_str"):
        store.query(VectorStoreQuery(query_embedding=[0.1]))


def test_filters_reach_every_way_of_asking(filled: CoinRAG):
    only = MetadataFilters(filters=[MetadataFilter(key="title", value="Light")])
    index, store = CoinRAGIndex(filled), CoinRAGVectorStore(rag=filled)
    ways = [
        index.as_retriever(filters=only).retrieve(QUESTION),
        index.as_query_engine(filters=only).query(QUESTION).source_nodes,
    ]
    for nodes in ways:
        assert {node.node.ref_doc_id for node in nodes} == {"light"}
    found = store.query(VectorStoreQuery(query_str=QUESTION, similarity_top_k=9, filters=only))
    assert {node.ref_doc_id for node in found.nodes} == {"light"}
