"""A store in the place of a LlamaIndex vector store, for pipelines that replace and delete documents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from coinrag_integrations import _adapters
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex._bound import Bound
from coinrag_integrations.llamaindex._convert import node_of
from coinrag_integrations.llamaindex._filters import condition_of
from coinrag_integrations.llamaindex.ingest import CoinRAGIngestor, delete_ref_docs
from coinrag_integrations.rag import CoinRAG


class CoinRAGVectorStore(BasePydanticVectorStore):
    """Deletes and finds by document, and takes nodes of a `NuggetNodeParser` or whole documents.

    Questions are embedded by the store's own embedder, so a query needs its text.

        >>> IngestionPipeline(
        ...     transformations=[NuggetNodeParser.from_defaults(rag=rag), CoinRAGIngestor(rag=rag)],
        ...     docstore=SimpleDocumentStore(),
        ...     vector_store=CoinRAGVectorStore(rag=rag),
        ...     docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
        ... )
    """

    stores_text: bool = True
    is_embedding_query: bool = False
    flat_metadata: ClassVar[bool] = True
    _bound: Bound = PrivateAttr()

    def __init__(self, *, rag: CoinRAG | None = None, **data: Any) -> None:
        """Without `rag` it can be kept, but not used."""
        super().__init__(**data)
        self._bound = Bound(rag)

    @classmethod
    def class_name(cls) -> str:
        """The name under which the store is serialised."""
        return "CoinRAGVectorStore"

    @property
    def client(self) -> CoinRAG:
        """The CoinRAG behind it."""
        return self._bound.need(self)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Store nodes; see `CoinRAGIngestor`."""
        CoinRAGIngestor(rag=self.client)(nodes)
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        """Remove a document with its nuggets and KV; one that is not there is no error."""
        delete_ref_docs(self.client, [ref_doc_id])

    async def adelete(self, ref_doc_id: str, **kwargs: Any) -> None:
        """Like `delete`, off the event loop."""
        await asyncio.to_thread(self.delete, ref_doc_id, **kwargs)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """The nuggets nearest to the query's text, best first.

        Raises:
            ConfigError: the query has no text, or a filter that Chroma cannot check.
        """
        if not query.query_str:
            raise ConfigError("the store embeds questions itself: give query_str, not an embedding")
        rag = self.client
        config = _adapters.retrieval_config(
            rag, None, query.similarity_top_k, condition_of(query.filters)
        )
        handle = rag.engine.handles.handle
        found = [
            node_of(span, handle(span.ref)) for span in rag.retrieve(query.query_str, config=config)
        ]
        return VectorStoreQueryResult(
            nodes=[node.node for node in found],
            similarities=[node.score or 0.0 for node in found],
            ids=[node.node.node_id for node in found],
        )

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Like `query`, off the event loop."""
        return await asyncio.to_thread(self.query, query, **kwargs)
