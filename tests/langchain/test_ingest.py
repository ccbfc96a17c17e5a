from __future__ import annotations

import pytest
from langchain_core.documents import Document

from coinrag_integrations.errors import DocumentError
from coinrag_integrations.langchain import add_documents
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION, TEXTS


def test_documents_are_known_by_their_source_and_adding_again_changes_nothing(
    rag: CoinRAG, documents: list[Document]
):
    told: list[int] = []
    first = add_documents(rag, documents, lambda report: told.append(report.n_encoded))
    counts = rag.index.counts()
    again = add_documents(rag, iter(documents))
    assert (first.n_added, again.n_unchanged, again.n_encoded) == (4, 4, 0)
    assert rag.engine.catalog.documents() == sorted(TEXTS)
    assert rag.index.counts() == counts
    assert told[-1] == first.n_encoded > 0


def test_pages_of_one_source_are_documents_of_their_own(rag: CoinRAG):
    pages = [
        Document(page_content=f"The organ is on page {i}.", metadata={"source": "a.pdf", "page": i})
        for i in range(2)
    ]
    assert add_documents(rag, pages).n_added == 2
    assert rag.engine.catalog.documents() == ["a.pdf#0", "a.pdf#1"]


def test_two_texts_of_one_source_do_not_replace_each_other_silently(rag: CoinRAG):
    rows = [
        Document(page_content=f"Row {i} is here.", metadata={"source": "a.csv", "row": i})
        for i in range(2)
    ]
    with pytest.raises(DocumentError, match=r"both be called 'a\.csv'.*Document\.id"):
        add_documents(rag, rows)
    for i, row in enumerate(rows):
        row.id = f"a.csv#{i}"
    assert add_documents(rag, rows).n_added == 2


def test_an_edited_document_replaces_the_old_one(rag: CoinRAG):
    add_documents(rag, [Document(id="a", page_content="The organ is old.", metadata={"x": 1})])
    new = Document(id="a", page_content="The organ is new.", metadata={"y": 2})
    assert add_documents(rag, [new]).n_updated == 1
    (span,) = rag.retrieve(QUESTION)
    assert (span.text, dict(span.metadata)) == ("The organ is new.", {"y": 2})


def test_documents_without_metadata_and_the_same_text_twice_are_one(rag: CoinRAG):
    twice = [Document(page_content="The organ is old.")] * 2
    report = add_documents(rag, twice)
    assert (report.n_added, report.n_unchanged) == (1, 1)


def test_metadata_is_kept_as_scalars_and_lists(rag: CoinRAG):
    metadata = {"none": None, "tags": ["a", "ö"], "nested": {"b": [1]}, "n": 3, "open": True}
    add_documents(rag, [Document(page_content="The organ is old.", metadata=metadata)])
    (span,) = rag.retrieve(QUESTION)
    assert span.metadata == {"tags": ["a", "ö"], "nested": '{"b": [1]}', "n": 3, "open": True}


def test_a_number_that_chroma_would_lose_is_refused(rag: CoinRAG):
    with pytest.raises(DocumentError, match=r"metadata 'score' of document 'a' is inf"):
        add_documents(rag, [Document(id="a", page_content="Old.", metadata={"score": 1e999})])
