from __future__ import annotations

import copy

import pytest
from langchain_core.documents import Document

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain import NuggetTextSplitter
from coinrag_integrations.langchain._convert import nuggets_of, span_of
from coinrag_integrations.rag import CoinRAG
from tests.adapters import REPEATED, TEXTS


@pytest.fixture
def splitter(rag: CoinRAG) -> NuggetTextSplitter:
    return NuggetTextSplitter.from_rag(rag)


def test_start_indices_are_exact_also_where_text_repeats(
    splitter: NuggetTextSplitter, documents: list[Document]
):
    texts = {**TEXTS, "repeated": REPEATED}
    documents.append(Document(page_content=REPEATED, metadata={"source": "repeated"}))
    expected = dict.fromkeys(texts, 0)
    for piece in splitter.split_documents(documents):
        source, start = piece.metadata["source"], piece.metadata["start_index"]
        # The right one of several places with that text: where the piece before ends.
        assert start == expected[source]
        expected[source] = stop = start + len(piece.page_content)
        assert texts[source][start:stop] == piece.page_content
    assert expected == {source: len(text) for source, text in texts.items()}


def test_joined_pieces_are_the_text(splitter: NuggetTextSplitter):
    for text in TEXTS.values():
        assert "".join(splitter.split_text(text)) == text
    assert splitter.split_text("") == []


def test_pieces_are_the_stores_chunks(filled: CoinRAG, documents: list[Document]):
    pieces = NuggetTextSplitter.from_rag(filled).split_documents(documents)
    chunks = {chunk.chunk_id: chunk for chunk in filled.engine.catalog.chunks()}
    assert {piece.id for piece in pieces} == set(chunks)
    for piece in pieces:
        chunk = chunks[piece.id]
        assert span_of(piece).ref == chunk.ref()
        assert nuggets_of(piece) == chunk.nuggets


def test_all_ways_of_splitting_agree(splitter: NuggetTextSplitter, documents: list[Document]):
    before = copy.deepcopy(documents)
    pieces = splitter.split_documents(documents)
    assert splitter.split_documents(iter(documents)) == pieces
    assert splitter.transform_documents(documents) == pieces
    assert (
        splitter.create_documents(
            [d.page_content for d in documents], [d.metadata for d in documents]
        )
        == pieces
    )
    assert [p.page_content for p in pieces if p.metadata["source"] == "organ"] == (
        splitter.split_text(TEXTS["organ"])
    )
    assert documents == before


async def test_async_gives_the_same(splitter: NuggetTextSplitter, documents: list[Document]):
    assert await splitter.atransform_documents(documents) == splitter.split_documents(documents)


def test_pieces_have_metadata_of_their_own(splitter: NuggetTextSplitter):
    (document,) = [Document(page_content=REPEATED, metadata={"tags": ["a"]})]
    first, second, *_ = splitter.split_documents([document])
    first.metadata["tags"].append("b")
    assert second.metadata["tags"] == document.metadata["tags"] == ["a"]


def test_texts_and_metadatas_have_to_match(splitter: NuggetTextSplitter):
    with pytest.raises(ConfigError, match="1 texts and 2 metadatas"):
        splitter.create_documents(["a"], [{}, {}])
    assert len(splitter.create_documents(["a tidal organ"])) == 1
