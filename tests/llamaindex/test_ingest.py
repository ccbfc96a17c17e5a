from __future__ import annotations

import pytest
from llama_index.core.schema import Document, MetadataMode

from coinrag_integrations.errors import DocumentError
from coinrag_integrations.llamaindex import (
    CoinRAGIngestor,
    CoinRAGRetriever,
    NuggetNodeParser,
    add_documents,
)
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION


def test_documents_keep_their_ids_and_adding_again_changes_nothing(
    rag: CoinRAG, documents: list[Document]
):
    told: list[int] = []
    first = add_documents(rag, documents, lambda report: told.append(report.n_encoded))
    counts = rag.index.counts()
    again = add_documents(rag, iter(documents))
    assert (first.n_added, again.n_unchanged, again.n_encoded) == (4, 4, 0)
    assert rag.engine.catalog.documents() == sorted(d.doc_id for d in documents)
    assert rag.index.counts() == counts
    assert told[-1] == first.n_encoded > 0


def test_an_edited_document_replaces_the_old_one(rag: CoinRAG):
    add_documents(rag, [Document(id_="a", text="The organ is old.", metadata={"x": 1})])
    report = add_documents(rag, [Document(id_="a", text="The organ is new.", metadata={"y": 2})])
    assert report.n_updated == 1
    (span,) = rag.retrieve(QUESTION)
    assert (span.text, dict(span.metadata)) == ("The organ is new.", {"y": 2})


def test_metadata_is_kept_as_scalars_and_lists(rag: CoinRAG):
    metadata = {
        "none": None,
        "tags": ["a", "ö"],
        "nested": {"b": [1, None]},
        "n": 3,
        "share": 0.5,
        "open": True,
        "coinrag_start": "not ours",
    }
    add_documents(rag, [Document(id_="a", text="The organ is old.", metadata=metadata)])
    (span,) = rag.retrieve(QUESTION)
    assert span.metadata == {
        "tags": ["a", "ö"],
        "nested": '{"b": [1, null]}',
        "n": 3,
        "share": 0.5,
        "open": True,
    }


def test_a_number_that_chroma_would_lose_is_refused(rag: CoinRAG):
    with pytest.raises(DocumentError, match=r"metadata 'score' of document 'a' is nan"):
        add_documents(rag, [Document(id_="a", text="Old.", metadata={"score": float("nan")})])


@pytest.mark.parametrize("through_pipeline", [False, True])
def test_what_is_hidden_of_a_document_stays_hidden(rag: CoinRAG, through_pipeline: bool):
    shown = Document(
        id_="organ",
        text="The organ is old.",
        metadata={"path": "/home/me", "year": 1923},
        excluded_llm_metadata_keys=["path"],
        excluded_embed_metadata_keys=["path", "year"],
        text_template="({metadata_str}) {content}",
    )
    if through_pipeline:
        parser = NuggetNodeParser.from_defaults(rag=rag)
        CoinRAGIngestor(rag=rag)(parser.get_nodes_from_documents([shown]))
    else:
        add_documents(rag, [shown])
    (found,) = CoinRAGRetriever(rag, with_handles=False).retrieve("organ")
    for mode in MetadataMode:
        if mode is not MetadataMode.ALL:  # which shows our own keys as well
            assert found.node.get_content(mode) == shown.get_content(mode)
    assert found.node.metadata.items() >= shown.metadata.items()
    assert through_pipeline or add_documents(rag, [shown]).n_unchanged == 1
