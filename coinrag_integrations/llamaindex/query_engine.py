"""A LlamaIndex query engine that answers from the nodes' cached KV instead of their text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Self

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.instrumentation.events.synthesis import (
    SynthesizeEndEvent,
    SynthesizeStartEvent,
)
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index_instrumentation import get_dispatcher

from coinrag_integrations import _adapters
from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex._convert import span_of
from coinrag_integrations.llamaindex.retriever import CoinRAGRetriever
from coinrag_integrations.rag import CoinRAG, ReplyStream

dispatcher = get_dispatcher(__name__)

_EMPTY = "Empty Response"  # LlamaIndex's own words when nothing was retrieved


class CoinRAGQueryEngine(BaseQueryEngine):
    """Retrieves span nodes and answers from their KV; only the question is computed.

    Node postprocessors may drop and reorder nodes, but not rewrite them. `response.metadata`
    holds, besides the nodes' metadata, under "coinrag" the spans used, token counts and timings; of
    a streamed answer they are complete once the stream has ended.

        >>> engine = CoinRAGQueryEngine.from_args(rag, n_nuggets=5, streaming=True)
        >>> engine.query("Who built the tidal organ?").print_response_stream()
    """

    def __init__(
        self,
        rag: CoinRAG,
        retriever: BaseRetriever,
        *,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        generation: GenerationConfig | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """Join a store and a retriever whose nodes are spans of it."""
        super().__init__(callback_manager or Settings.callback_manager)
        self._rag, self._retriever = rag, retriever
        self._generation, self._streaming = generation, streaming
        self._node_postprocessors = list(node_postprocessors)
        for postprocessor in self._node_postprocessors:
            postprocessor.callback_manager = self.callback_manager

    @classmethod
    def from_args(
        cls,
        rag: CoinRAG,
        *,
        retriever: BaseRetriever | None = None,
        n_chunks: int | None = None,
        n_nuggets: int | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        generation: GenerationConfig | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
    ) -> Self:
        """An engine with a `CoinRAGRetriever` of the given widths, or with `retriever`.

        Raises:
            ConfigError: both a retriever and widths are given, or a width is below 1.
        """
        if retriever is not None and (n_chunks is not None or n_nuggets is not None):
            raise ConfigError("give n_chunks and n_nuggets to the retriever, or no retriever")
        return cls(
            rag,
            retriever
            or CoinRAGRetriever(
                rag, n_chunks=n_chunks, n_nuggets=n_nuggets, callback_manager=callback_manager
            ),
            node_postprocessors=node_postprocessors,
            generation=generation,
            streaming=streaming,
            callback_manager=callback_manager,
        )

    @property
    def retriever(self) -> BaseRetriever:
        """Where the nodes come from."""
        return self._retriever

    def retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """The nodes for a question, after the postprocessors."""
        nodes = self._retriever.retrieve(query_bundle)
        for postprocessor in self._node_postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    async def aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        """Like `retrieve`, off the event loop."""
        nodes = await self._retriever.aretrieve(query_bundle)
        for postprocessor in self._node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(nodes, query_bundle=query_bundle)
        return nodes

    @dispatcher.span
    def synthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Answer from span nodes, best first; the additional ones are only listed as sources.

        Raises:
            ConfigError: a node is not a span of ours, or its text was changed.
            BudgetError: spans, question and answer do not fit the model's window.
        """
        return self._synthesize(query_bundle, nodes, additional_source_nodes or ())

    @dispatcher.span
    async def asynthesize(
        self,
        query_bundle: QueryBundle,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
    ) -> RESPONSE_TYPE:
        """Like `synthesize`, off the event loop."""
        return await self._asynthesize(query_bundle, nodes, additional_source_nodes or ())

    def _get_prompt_modules(self) -> PromptMixinType:
        return {}

    @dispatcher.span
    def _query(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(CBEventType.QUERY, query_bundle) as finish:
            begin = time.perf_counter()
            nodes = self.retrieve(query_bundle)
            retrieve_ms = (time.perf_counter() - begin) * 1e3
            return finish(self._synthesize(query_bundle, nodes, (), retrieve_ms))

    @dispatcher.span
    async def _aquery(self, query_bundle: QueryBundle) -> RESPONSE_TYPE:
        with self._event(CBEventType.QUERY, query_bundle) as finish:
            begin = time.perf_counter()
            nodes = await self.aretrieve(query_bundle)
            retrieve_ms = (time.perf_counter() - begin) * 1e3
            return finish(await self._asynthesize(query_bundle, nodes, (), retrieve_ms))

    def _synthesize(
        self,
        query: QueryBundle,
        nodes: Sequence[NodeWithScore],
        additional: Sequence[NodeWithScore],
        retrieve_ms: float = 0.0,
    ) -> RESPONSE_TYPE:
        sources = [*nodes, *additional]
        with self._synthesis(query) as finish:
            stream = self._open(query, nodes, retrieve_ms)
            metadata = _metadata(stream, sources, retrieve_ms)
            pieces = _pieces(stream, metadata)
            if self._streaming:
                return finish(StreamingResponse(pieces, sources, metadata))
            return finish(Response("".join(pieces), sources, metadata))

    async def _asynthesize(
        self,
        query: QueryBundle,
        nodes: Sequence[NodeWithScore],
        additional: Sequence[NodeWithScore],
        retrieve_ms: float = 0.0,
    ) -> RESPONSE_TYPE:
        sources = [*nodes, *additional]
        with self._synthesis(query) as finish:
            stream = await asyncio.to_thread(self._open, query, nodes, retrieve_ms)
            metadata = _metadata(stream, sources, retrieve_ms)
            pieces = _apieces(stream, metadata)
            if self._streaming:
                return finish(AsyncStreamingResponse(pieces, sources, metadata))
            text = "".join([piece async for piece in pieces])
            return finish(Response(text, sources, metadata))

    def _open(
        self, query: QueryBundle, nodes: Sequence[NodeWithScore], retrieve_ms: float
    ) -> ReplyStream | None:
        """Compose the prefix; without nodes there is nothing to answer from."""
        if not nodes:
            return None
        return self._rag.stream_spans(
            query.query_str,
            [span_of(node) for node in nodes],
            generation=self._generation,
            retrieve_ms=retrieve_ms,
        )

    @contextmanager
    def _synthesis(self, query: QueryBundle) -> Iterator[_Finish]:
        """The events around a synthesis; the end has to be told the response."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        with self._event(CBEventType.SYNTHESIZE, query) as finish:

            def end(response: RESPONSE_TYPE) -> RESPONSE_TYPE:
                finish(response)
                dispatcher.event(SynthesizeEndEvent(query=query, response=response))
                return response

            yield end

    @contextmanager
    def _event(self, kind: CBEventType, query: QueryBundle) -> Iterator[_Finish]:
        """A callback event; its end has to be told the response."""
        payload: dict[str, Any] = {EventPayload.QUERY_STR: query.query_str}
        with self.callback_manager.event(kind, payload=payload) as event:

            def end(response: RESPONSE_TYPE) -> RESPONSE_TYPE:
                event.on_end(payload={EventPayload.RESPONSE: response})
                return response

            yield end


_Finish = Callable[[RESPONSE_TYPE], RESPONSE_TYPE]


def _metadata(
    stream: ReplyStream | None, nodes: Sequence[NodeWithScore], retrieve_ms: float
) -> dict[str, Any]:
    by_node: dict[str, Any] = {node.node.node_id: node.node.metadata for node in nodes}
    return {**by_node, "coinrag": _adapters.report(stream, retrieve_ms)}


def _pieces(stream: ReplyStream | None, metadata: dict[str, Any]) -> Generator[str, None, None]:
    """The pieces of the answer; at the end, `metadata` is brought up to date."""
    if stream is None:
        yield _EMPTY
        return
    try:
        yield from stream
    finally:
        stream.close()
        metadata["coinrag"] = _adapters.report(stream)


async def _apieces(
    stream: ReplyStream | None, metadata: dict[str, Any]
) -> AsyncGenerator[str, None]:
    if stream is None:
        yield _EMPTY
        return
    try:
        async with aclosing(_adapters.off_loop(stream)) as pieces:
            async for piece in pieces:
                yield piece
    finally:
        metadata["coinrag"] = _adapters.report(stream)
