"""A store as a LlamaIndex user knows an index: retriever, query engine, chat engine, documents by id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.llms import LLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    ResponseMode,
    get_response_synthesizer,
)
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.response_synthesizers.no_text import NoText
from llama_index.core.schema import Document as LlamaDocument
from llama_index.core.settings import Settings
from llama_index.core.vector_stores import MetadataFilters

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.ingest import IngestReport, OnProgress
from coinrag_integrations.llamaindex.chat_engine import ChatMode, CoinRAGChatEngine
from coinrag_integrations.llamaindex.ingest import add_documents, delete_ref_docs
from coinrag_integrations.llamaindex.llm import CoinRAGLLM
from coinrag_integrations.llamaindex.prompt_helper import MarkedPromptHelper
from coinrag_integrations.llamaindex.query_engine import CoinRAGQueryEngine
from coinrag_integrations.llamaindex.retriever import CoinRAGRetriever
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval.config import Form

_OF_THE_FAST_ENGINE = {"node_postprocessors", "generation", "streaming", "callback_manager"}
_WITHOUT_LLM: dict[ResponseMode, type[NoText] | type[ContextOnly]] = {
    ResponseMode.NO_TEXT: NoText,
    ResponseMode.CONTEXT_ONLY: ContextOnly,
}


class CoinRAGIndex:
    """The documents of a store. Stands where a `VectorStoreIndex` stood.

    >>> index = CoinRAGIndex.from_documents(documents, CoinRAG.open("store", model="demo"))
    >>> index.as_query_engine(n_nuggets=5).query("Who built the tidal organ?")
    """

    def __init__(self, rag: CoinRAG) -> None:
        """The index of what is in the store already."""
        self.rag = rag

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[LlamaDocument],
        rag: CoinRAG,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """Add documents first; see `add_documents`."""
        add_documents(rag, documents, on_progress)
        return cls(rag)

    # -- documents -----------------------------------------------------------------------------

    def insert(self, document: LlamaDocument) -> IngestReport:
        """Add a document, or replace the one of its id."""
        return add_documents(self.rag, [document])

    def update_ref_doc(self, document: LlamaDocument) -> IngestReport:
        """The same as `insert`."""
        return self.insert(document)

    def refresh_ref_docs(self, documents: Sequence[LlamaDocument]) -> list[bool]:
        """Add documents; which of them were new or had changed."""
        return [self.insert(document).n_unchanged == 0 for document in documents]

    def delete_ref_doc(self, ref_doc_id: str) -> bool:
        """Remove a document with its nuggets and KV; whether it was there.

        Of a collection that was moved here, all nodes of the document go.
        """
        return delete_ref_docs(self.rag, [ref_doc_id]) > 0

    @property
    def ref_doc_ids(self) -> list[str]:
        """The documents that are there."""
        return self.rag.engine.catalog.documents()

    # -- questions -----------------------------------------------------------------------------

    def as_retriever(self, **options: Any) -> CoinRAGRetriever:
        """See `CoinRAGRetriever`. `similarity_top_k` is another name of `n_nuggets`."""
        if "similarity_top_k" in options:
            options["n_nuggets"] = options.pop("similarity_top_k")
        return CoinRAGRetriever(self.rag, **options)

    def as_query_engine(
        self,
        *,
        llm: LLM | None = None,
        response_mode: ResponseMode | str | None = None,
        n_chunks: int | None = None,
        n_nuggets: int | None = None,
        similarity_top_k: int | None = None,
        form: Form | None = None,
        ratio: int | None = None,
        n_raw: int | None = None,
        filters: MetadataFilters | None = None,
        **options: Any,
    ) -> BaseQueryEngine:
        """The fast engine (`CoinRAGQueryEngine`), or LlamaIndex's own.

        With a `response_mode`, or prompts of one's own, it is a `RetrieverQueryEngine` whose LLM (a
        `CoinRAGLLM` unless another is given) reads marked passages; other LLMs are given plain text.
        """
        retriever = self.as_retriever(
            n_chunks=n_chunks,
            n_nuggets=similarity_top_k if n_nuggets is None else n_nuggets,
            form=form,
            ratio=ratio,
            n_raw=n_raw,
            filters=filters,
            with_handles=llm is None or isinstance(llm, CoinRAGLLM),
        )
        if llm is None and response_mode is None and options.keys() <= _OF_THE_FAST_ENGINE:
            return CoinRAGQueryEngine.from_args(self.rag, retriever=retriever, **options)
        if "generation" in options:
            raise ConfigError(
                "generation belongs to the fast engine: leave response_mode, llm and prompts out, or "
                "give llm=CoinRAGLLM.from_defaults(rag, ...)"
            )
        mode = ResponseMode(response_mode or ResponseMode.COMPACT)
        manager = options.setdefault("callback_manager", Settings.callback_manager)
        return RetrieverQueryEngine(
            retriever,
            self._synthesizer(llm or CoinRAGLLM.from_defaults(self.rag), mode, options),
            node_postprocessors=options.get("node_postprocessors"),
            callback_manager=manager,
        )

    def _synthesizer(
        self, llm: LLM, mode: ResponseMode, options: Mapping[str, Any]
    ) -> BaseSynthesizer:
        options = {k: v for k, v in options.items() if k != "node_postprocessors"}
        if mode in _WITHOUT_LLM:  # LlamaIndex would ask for a global LLM
            return _WITHOUT_LLM[mode](llm=llm, callback_manager=options["callback_manager"])
        if isinstance(llm, CoinRAGLLM):
            options.setdefault("prompt_helper", MarkedPromptHelper.from_rag(self.rag, llm))
        return get_response_synthesizer(llm=llm, response_mode=mode, **options)

    def as_chat_engine(
        self, chat_mode: ChatMode = "condense_plus_context", **options: Any
    ) -> CoinRAGChatEngine:
        """See `CoinRAGChatEngine`."""
        return CoinRAGChatEngine.from_defaults(self.rag, chat_mode=chat_mode, **options)
