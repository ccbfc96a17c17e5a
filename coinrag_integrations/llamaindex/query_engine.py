"""A LlamaIndex query engine that answers from the nodes' cached KV instead of their text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.vector_stores import MetadataFilters
from llama_index_instrumentation import get_dispatcher

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex.retriever import CoinRAGRetriever
from coinrag_integrations.llamaindex.synthesizer import CoinRAGSynthesizer
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval.config import Form

dispatcher = get_dispatcher(__name__)


class CoinRAGQueryEngine(RetrieverQueryEngine):
    """Retrieves span nodes and answers from their KV; only the question is computed.

    Node postprocessors may drop, reorder and rewrite nodes, and retrievers may mix ours with others: what
    is not a span of the store, word for word, is read as text. See `CoinRAGSynthesizer` for what
    `response.metadata` holds.

        >>> engine = CoinRAGQueryEngine.from_args(rag, n_nuggets=5, streaming=True)
        >>> engine.query("Who built the tidal organ?").print_response_stream()
    """

    _response_synthesizer: CoinRAGSynthesizer

    @classmethod
    def from_args(  # type: ignore[override]  # a store takes the place of retriever and LLM
        cls,
        rag: CoinRAG,
        *,
        retriever: BaseRetriever | None = None,
        n_chunks: int | None = None,
        n_nuggets: int | None = None,
        form: Form | None = None,
        ratio: int | None = None,
        n_raw: int | None = None,
        filters: MetadataFilters | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        generation: GenerationConfig | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> Self:
        """An engine with a `CoinRAGRetriever` of the given widths, form and filters, or with `retriever`.

        Raises:
            ConfigError: both a retriever and any of these are given, or they are impossible.
        """
        given = (n_chunks, n_nuggets, form, ratio, n_raw, filters)
        if retriever is not None and any(it is not None for it in given):
            raise ConfigError(
                "give n_chunks, n_nuggets, form, ratio, n_raw and filters to the retriever, or no "
                "retriever"
            )
        manager = callback_manager or Settings.callback_manager
        return cls(
            retriever
            or CoinRAGRetriever(
                rag,
                n_chunks=n_chunks,
                n_nuggets=n_nuggets,
                form=form,
                ratio=ratio,
                n_raw=n_raw,
                filters=filters,
                callback_manager=manager,
            ),
            CoinRAGSynthesizer(
                rag, generation=generation, streaming=streaming, callback_manager=manager
            ),
            node_postprocessors=list(node_postprocessors),
            callback_manager=manager,
        )

    @dispatcher.span
    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(query_bundle) as finish:
            begin = time.perf_counter()
            nodes = self.retrieve(query_bundle)
            retrieve_ms = (time.perf_counter() - begin) * 1e3
            return finish(
                self._response_synthesizer.synthesize(query_bundle, nodes, retrieve_ms=retrieve_ms)
            )

    @dispatcher.span
    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(query_bundle) as finish:
            begin = time.perf_counter()
            nodes = await self.aretrieve(query_bundle)
            retrieve_ms = (time.perf_counter() - begin) * 1e3
            return finish(
                await self._response_synthesizer.asynthesize(
                    query_bundle, nodes, retrieve_ms=retrieve_ms
                )
            )

    @contextmanager
    def _event(self, query: QueryBundle) -> Iterator[Callable[[RESPONSE_TYPE], RESPONSE_TYPE]]:
        """The query's callback event; its end has to be told the response."""
        payload: dict[str, Any] = {EventPayload.QUERY_STR: query.query_str}
        with self.callback_manager.event(CBEventType.QUERY, payload=payload) as event:

            def end(response: RESPONSE_TYPE) -> RESPONSE_TYPE:
                event.on_end(payload={EventPayload.RESPONSE: response})
                return response

            yield end
