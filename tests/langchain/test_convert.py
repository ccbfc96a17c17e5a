from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.runnables import Runnable, RunnableLambda

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain._convert import (
    LangChainEmbedder,
    complete_with,
    document_id_of,
    document_of,
    span_of,
)
from coinrag_integrations.nuggets import LLMProposer
from coinrag_integrations.types import ChunkId, ScoredSpan, SpanRef
from tests.tiny import HashEmbedder

SPAN = ScoredSpan(
    ref=SpanRef(ChunkId("c" * 32), 3, 9),
    text="built by Bastien Roule",
    score=0.75,
    document_id="organ",
    char_start=30,
    char_stop=52,
    metadata={"title": "Organ"},
)


def test_a_span_comes_back_from_its_document():
    assert span_of(document_of(SPAN)) == SPAN


def test_a_document_survives_serialisation():
    document = Document.model_validate_json(document_of(SPAN).model_dump_json())
    assert span_of(document) == SPAN


def test_metadata_is_flat_and_the_score_is_in_it():
    document = document_of(SPAN)
    assert document.id == f"{'c' * 32}:3:9"
    assert document.page_content == SPAN.text
    assert document.metadata["coinrag_score"] == 0.75
    assert all(isinstance(value, str | int | float) for value in document.metadata.values())
    assert json.loads(json.dumps(document.metadata)) == document.metadata


def test_a_foreign_document_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"document 'Some other text\.' carries no span"):
        span_of(Document(page_content="Some other text."))


def test_a_changed_text_is_refused():
    document = document_of(SPAN)
    document.page_content = "built by [MASKED]"
    with pytest.raises(ConfigError, match="was changed"):
        span_of(document)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (Document(id="x", page_content="a", metadata={"source": "s"}), "x"),
        (Document(page_content="a", metadata={"source": "s.pdf", "page": 0}), "s.pdf#0"),
        (Document(page_content="a", metadata={"source": "s.txt"}), "s.txt"),
        (Document(page_content="a"), "sha256:ca978112ca1bbdcafac231b39a23dc4d"),
    ],
)
def test_a_document_is_called_by_id_source_or_content(document: Document, expected: str):
    assert document_id_of(document) == expected


class WordEmbeddings(Embeddings):
    """Word counts that are not of unit length."""

    def __init__(self, model: str | None = None) -> None:
        self.model = model

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [(7 * row).tolist() for row in HashEmbedder().embed_documents(texts)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def test_embeddings_become_an_embedder_of_unit_vectors():
    embedder = LangChainEmbedder(WordEmbeddings("words-64"))
    vectors = embedder.embed_documents(["a tidal organ", "a lighthouse", ""])
    assert vectors.shape == (3, 64)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(embedder.embed_query("a lighthouse"), vectors[1])


def test_an_embedder_is_called_by_its_class_and_model():
    assert LangChainEmbedder(WordEmbeddings("words-64")).embedder_id == "WordEmbeddings:words-64"
    assert LangChainEmbedder(WordEmbeddings(), "mine").embedder_id == "mine"
    with pytest.raises(ConfigError, match="embedder_id"):
        LangChainEmbedder(WordEmbeddings())


REPLY = '["Oslo is cold"]'
MODELS: Sequence[Runnable] = [
    FakeListChatModel(responses=[REPLY]),
    FakeListLLM(responses=[REPLY]),
    RunnableLambda(lambda prompt: REPLY),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_model_proposes_nuggets(model: Runnable):
    proposer = LLMProposer(complete=complete_with(model), model_id="fixed")
    assert proposer.propose("Oslo is cold.") == ["Oslo is cold"]
