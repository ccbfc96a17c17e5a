"""A LlamaIndex retriever that returns spans: nodes that are answered from as KV."""

from __future__ import annotations

import asyncio

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import IndexNode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.vector_stores import MetadataFilters

from coinrag_integrations import _adapters
from coinrag_integrations.llamaindex._convert import node_of
from coinrag_integrations.llamaindex._filters import condition_of
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval.config import Form


class CoinRAGRetriever(BaseRetriever):
    """The nuggets nearest to a question among those of the nearest chunks, best first.

    In another `form` (see `RetrievalConfig`) they are whole chunks, or C2KV's slots, one for every `ratio`
    tokens; of form "hybrid" the `n_raw` best chunks stay whole. A node's text is the exact text of its
    span, its score a cosine similarity. LLMs are shown its handle too, from which `CoinRAGLLM` reads KV;
    other LLMs need `StripHandles` behind the retriever. The store's own embedder is used, whatever
    embedding a `QueryBundle` may bring along. `filters` hold for documents' metadata.

        >>> nodes = CoinRAGRetriever(rag, n_nuggets=3).retrieve("Who built the tidal organ?")
    """

    def __init__(
        self,
        rag: CoinRAG,
        *,
        n_chunks: int | None = None,
        n_nuggets: int | None = None,
        form: Form | None = None,
        ratio: int | None = None,
        n_raw: int | None = None,
        filters: MetadataFilters | None = None,
        with_handles: bool = True,
        callback_manager: CallbackManager | None = None,
        objects: list[IndexNode] | None = None,
        verbose: bool = False,
    ) -> None:
        """Widths that are left out are the store's own.

        Raises:
            ConfigError: a width below 1, no such form, an `n_raw` below 0, or a filter that Chroma
                cannot check.
        """
        super().__init__(
            callback_manager=callback_manager or Settings.callback_manager,
            objects=objects,
            verbose=verbose,
        )
        self._rag, self._with_handles = rag, with_handles
        self._config = _adapters.retrieval_config(
            rag, n_chunks, n_nuggets, condition_of(filters), form, ratio, n_raw
        )

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        spans = self._rag.retrieve(query_bundle.query_str, config=self._config)
        if not self._with_handles:
            return [node_of(span) for span in spans]
        handle = self._rag.engine.handles.handle
        return [node_of(span, handle(span.ref)) for span in spans]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)
