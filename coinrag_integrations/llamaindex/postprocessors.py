"""What may stand between a retriever and an LLM: a reranker, and a way to other LLMs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index_instrumentation import get_dispatcher

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex.span_node import SpanNode
from coinrag_integrations.retrieval import CrossEncoder
from coinrag_integrations.retrieval.rerank import BGE_RERANKER

dispatcher = get_dispatcher(__name__)


class CoinRAGRerank(BaseNodePostprocessor):
    """Orders nodes by FlagEmbedding's cross-encoder, which reads question and passage together.

    Scores become the cross-encoder's, from 0 to 1. Needs the extra `bge`.
    """

    model: str = Field(default=BGE_RERANKER, description="Hub name or local folder.")
    top_n: int = Field(default=5, description="How many nodes to keep.", gt=0)
    device: str | None = Field(default=None, description="Where to run; None chooses.")
    _encoder: CrossEncoder = PrivateAttr()

    def __init__(self, *, model: str | Path = BGE_RERANKER, **data: Any) -> None:
        """Nothing is loaded before the first question."""
        super().__init__(model=str(model), **data)  # type: ignore[call-arg]  # pydantic's fields
        self._encoder = CrossEncoder(self.model, device=self.device)

    @classmethod
    def class_name(cls) -> str:
        """The name under which the reranker is serialised."""
        return "CoinRAGRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ConfigError("a reranker needs the question: pass query_bundle or query_str")
        question = query_bundle.query_str
        dispatcher.event(
            ReRankStartEvent(
                query=query_bundle, nodes=nodes, top_n=self.top_n, model_name=self.model
            )
        )
        payload: dict[str, Any] = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: self.model,
            EventPayload.QUERY_STR: question,
            EventPayload.TOP_K: self.top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
            scores = self._encoder.score(question, texts)
            ranked = [
                NodeWithScore(node=node.node, score=score)
                for node, score in zip(nodes, scores, strict=True)
            ]
            ranked.sort(key=lambda node: -(node.score or 0.0))
            kept = ranked[: self.top_n]
            event.on_end(payload={EventPayload.NODES: kept})
        dispatcher.event(ReRankEndEvent(nodes=kept))
        return kept


class StripHandles(BaseNodePostprocessor):
    """Gives nodes without handles, for LLMs other than `CoinRAGLLM`."""

    @classmethod
    def class_name(cls) -> str:
        """The name under which the postprocessor is serialised."""
        return "StripHandles"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=node.node.model_copy(update={"handle": ""}), score=node.score)
            if isinstance(node.node, SpanNode)
            else node
            for node in nodes
        ]
