from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    CompletionResponseGen,
    CustomLLM,
    LLMMetadata,
)
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex._convert import (
    LlamaIndexEmbedder,
    complete_with,
    node_of,
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


def test_a_span_comes_back_from_its_node():
    assert span_of(node_of(SPAN)) == SPAN


def test_a_node_survives_serialisation():
    node = TextNode.from_dict(json.loads(json.dumps(node_of(SPAN).node.to_dict())))
    assert span_of(NodeWithScore(node=node, score=0.75)) == SPAN


def test_a_node_points_at_its_document():
    node = node_of(SPAN).node
    assert node.node_id == f"{'c' * 32}:3:9"
    assert node.ref_doc_id == "organ"
    assert (node.start_char_idx, node.end_char_idx) == (30, 52)


def test_models_read_the_users_metadata_and_none_of_ours():
    node = node_of(SPAN).node
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert node.get_content(metadata_mode=mode) == "title: Organ\n\nbuilt by Bastien Roule"


def test_metadata_is_flat_and_has_one_order():
    first = node_of(SPAN).node.metadata
    assert all(isinstance(value, str | int) for value in first.values())
    turned = ScoredSpan(
        **{**{f: getattr(SPAN, f) for f in SPAN.__slots__}, "metadata": {"b": 1, "a": 2}}
    )
    assert list(node_of(turned).node.metadata)[:2] == ["a", "b"]


def test_a_foreign_node_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"node 'n1' carries no span .*coinrag_chunk_id"):
        span_of(TextNode(id_="n1", text="Some other text."))


def test_a_changed_text_is_refused():
    node = node_of(SPAN)
    node.node.set_content("built by [MASKED]")
    with pytest.raises(ConfigError, match="was changed"):
        span_of(node)


class WordEmbedding(BaseEmbedding):
    """Word counts that are not of unit length."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return (7 * HashEmbedder().embed_query(text)).tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def test_an_embedding_model_becomes_an_embedder_of_unit_vectors():
    embedder = LlamaIndexEmbedder(WordEmbedding(model_name="words-64"))
    vectors = embedder.embed_documents(["a tidal organ", "a lighthouse", ""])
    assert vectors.shape == (3, 64)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(embedder.embed_query("a lighthouse"), vectors[1])


def test_an_embedder_is_called_by_its_class_and_model():
    named = LlamaIndexEmbedder(WordEmbedding(model_name="words-64"))
    assert named.embedder_id == f"{WordEmbedding.class_name()}:words-64"
    assert LlamaIndexEmbedder(WordEmbedding(), "mine").embedder_id == "mine"
    with pytest.raises(ConfigError, match="embedder_id"):
        LlamaIndexEmbedder(WordEmbedding())


class FixedLLM(CustomLLM):
    """Replies with a JSON array, and says how it was asked."""

    is_chat: bool = False

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=self.is_chat)

    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:
        return CompletionResponse(text='["Oslo is cold", "completed"]')

    def chat(self, messages: list[ChatMessage], **_: Any) -> ChatResponse:
        return ChatResponse(message=ChatMessage(role="assistant", content='["Oslo is cold"]'))

    def stream_complete(
        self, prompt: str, formatted: bool = False, **_: Any
    ) -> CompletionResponseGen:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("is_chat", "expected"), [(True, ["Oslo is cold"]), (False, ["Oslo is cold", "completed"])]
)
def test_an_llm_proposes_nuggets(is_chat: bool, expected: list[str]):
    proposer = LLMProposer(complete=complete_with(FixedLLM(is_chat=is_chat)), model_id="fixed")
    assert proposer.propose("Oslo is cold.") == expected
