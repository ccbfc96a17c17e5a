"""A LangChain retriever that returns spans: documents that the chain answers from as KV."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document as LangDocument
from langchain_core.retrievers import BaseRetriever, LangSmithRetrieverParams
from pydantic import ConfigDict

from coinrag_integrations import _adapters
from coinrag_integrations.langchain._convert import document_of
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import Condition, all_of, where_of
from coinrag_integrations.retrieval.config import Form


class CoinRAGRetriever(BaseRetriever):
    """The nuggets nearest to a question among those of the nearest chunks, best first.

    In another `form` (see `RetrievalConfig`) they are whole chunks, or C2KV's slots, one for every `ratio`
    tokens; of form "hybrid" the `n_raw` best chunks stay whole. `k` is how many nuggets to return,
    `n_chunks` how many chunks to look into; both are the store's own if left out, and may be given for one
    call, as may `filter`, a condition on documents' metadata in Chroma's form or `{"key": value, …}`.
    `page_content` is the exact text of the span behind its handle, from which `ChatCoinRAG` reads KV in
    any prompt; `render="text"` leaves the handle out, for other models and for people.
    `metadata["coinrag_score"]` is a cosine similarity.

        >>> CoinRAGRetriever(rag=rag, k=5).invoke("Who built the tidal organ?", k=3)
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    rag: CoinRAG
    k: int | None = None
    n_chunks: int | None = None
    form: Form | None = None
    ratio: int | None = None
    n_raw: int | None = None
    filter: dict[str, Any] | None = None
    render: Literal["marked", "text"] = "marked"

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun | None = None,
        k: int | None = None,
        n_chunks: int | None = None,
        filter: dict[str, Any] | None = None,
    ) -> list[LangDocument]:
        return self._search(query, k, n_chunks, filter)

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun | None = None,
        k: int | None = None,
        n_chunks: int | None = None,
        filter: dict[str, Any] | None = None,
    ) -> list[LangDocument]:
        return await asyncio.to_thread(self._search, query, k, n_chunks, filter)

    def _search(
        self, query: str, k: int | None, n_chunks: int | None, where: Condition | None
    ) -> list[LangDocument]:
        config = _adapters.retrieval_config(
            self.rag,
            self.n_chunks if n_chunks is None else n_chunks,
            self.k if k is None else k,
            all_of([where_of(self.filter), where_of(where)]),
            self.form,
            self.ratio,
            self.n_raw,
        )
        spans = self.rag.retrieve(query, config=config)
        if self.render == "text":
            return [document_of(span) for span in spans]
        handle = self.rag.engine.handles.handle
        return [document_of(span, handle(span.ref)) for span in spans]

    def _get_ls_params(self, **kwargs: Any) -> LangSmithRetrieverParams:
        params = super()._get_ls_params(**kwargs)
        embedder = self.rag.index.embedder
        params["ls_vector_store_provider"] = "chroma"
        params["ls_embedding_provider"] = type(embedder).__name__
        params["ls_embedding_model"] = embedder.embedder_id
        return params
