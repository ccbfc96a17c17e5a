"""LlamaIndex nodes to and from spans and chunks, and its embeddings and LLMs as we call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    ObjectType,
    RelatedNodeInfo,
    TextNode,
)

from coinrag_integrations import _adapters
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex.span_node import SpanNode
from coinrag_integrations.retrieval.embedders import Vectors, unit_vectors
from coinrag_integrations.types import Chunk, Nugget, ScoredSpan


def node_of(span: ScoredSpan, handle: str = "") -> NodeWithScore:
    """A retrieved span as a node: its text, its place in the document, our metadata, its handle."""
    node = SpanNode(  # type: ignore[call-arg]  # mypy does not see the aliases of LlamaIndex
        handle=handle,
        id_=_adapters.span_id(span.ref),
        text=span.text,
        start_char_idx=span.char_start,
        end_char_idx=span.char_stop,
        metadata=_adapters.span_metadata(span),
        **_adapters.node_fields(span.metadata),
        relationships={
            NodeRelationship.SOURCE: RelatedNodeInfo(
                node_id=str(span.metadata.get(_adapters.REF_DOC_ID, span.document_id)),
                node_type=ObjectType.DOCUMENT,
            ),
            NodeRelationship.PARENT: RelatedNodeInfo(node_id=span.ref.chunk_id),
        },
    )
    hide_keys(node)
    return NodeWithScore(node=node, score=span.score)


def span_of(node: BaseNode | NodeWithScore) -> ScoredSpan:
    """The span that a node of our retriever or node parser stands for.

    Raises:
        ConfigError: the node is not ours, or its text was changed.
    """
    score = (node.score or 0.0) if isinstance(node, NodeWithScore) else 0.0
    node = node.node if isinstance(node, NodeWithScore) else node
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    return _adapters.read_span(node.metadata, text, f"node {node.node_id!r}", score)


def describe_chunk(node: TextNode, chunk: Chunk) -> None:
    """Write the chunk's triple and nuggets into a node that holds its text."""
    node.metadata = {**node.metadata, **_adapters.chunk_metadata(chunk)}
    hide_keys(node)


def nuggets_of(node: BaseNode) -> tuple[Nugget, ...]:
    """The nuggets of a node of our node parser; their characters count from the node's text.

    Raises:
        ConfigError: the node carries none.
    """
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    return _adapters.read_nuggets(node.metadata, text, f"node {node.node_id!r}")


def hide_keys(node: BaseNode) -> None:
    """Keep our metadata out of what LLMs and embedding models read."""
    for keys in (node.excluded_llm_metadata_keys, node.excluded_embed_metadata_keys):
        keys += [key for key in _adapters.HIDDEN if key not in keys]


class LlamaIndexEmbedder:
    """A LlamaIndex embedding model as an `Embedder`."""

    def __init__(self, model: BaseEmbedding, embedder_id: str | None = None) -> None:
        """`embedder_id` is made of class and model name if it is not given.

        Raises:
            ConfigError: the model does not say its name, so indexes could be mixed up.
        """
        if embedder_id is None and model.model_name in ("", "unknown"):
            raise ConfigError(
                f"{model.class_name()} has no model_name: give embedder_id, a name that changes "
                "whenever its vectors do"
            )
        self._model = model
        self.embedder_id = embedder_id or f"{model.class_name()}:{model.model_name}"

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """One unit vector a text: [n, d]."""
        return unit_vectors(self._model.get_text_embedding_batch(list(texts)))

    def embed_query(self, text: str) -> Vectors:
        """The question's unit vector: [d]."""
        return unit_vectors([self._model.get_query_embedding(text)])[0]  # type: ignore[no-any-return]  # numpy indexing


def complete_with(llm: LLM) -> Callable[[str], str]:
    """A LlamaIndex LLM as the function that `LLMProposer` calls."""

    def complete(prompt: str) -> str:
        if llm.metadata.is_chat_model:  # so that its chat template is applied
            return llm.chat([ChatMessage(role="user", content=prompt)]).message.content or ""
        return llm.complete(prompt).text

    return complete
