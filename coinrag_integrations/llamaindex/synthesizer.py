"""A LlamaIndex synthesizer that takes nodes for what they are: spans are placed, texts are read."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.instrumentation.events.llm import (
    LLMCompletionEndEvent,
    LLMCompletionStartEvent,
)
from llama_index.core.instrumentation.events.synthesis import (
    SynthesizeEndEvent,
    SynthesizeStartEvent,
)
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, QueryType
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher

from coinrag_integrations import _adapters
from coinrag_integrations.engine import GenerationConfig, strip_handles
from coinrag_integrations.engine.handles import Reason
from coinrag_integrations.llamaindex.events import composing
from coinrag_integrations.llamaindex.llm import CoinRAGLLM, completion_of
from coinrag_integrations.llamaindex.prompt_helper import MarkedPromptHelper
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.reply import ReplyStream
from coinrag_integrations.types import ScoredSpan

dispatcher = get_dispatcher(__name__)

_Finish = Callable[[RESPONSE_TYPE], RESPONSE_TYPE]


class CoinRAGSynthesizer(BaseSynthesizer):
    """Answers from nodes in one pass: those of our retriever as KV, all others as text.

    It uses the store's own prompt. `response.metadata` holds, besides the nodes' metadata, under
    "coinrag" the spans used, token counts and timings; of a streamed answer they are complete once the
    stream has ended. For LlamaIndex's response modes and prompts use `get_response_synthesizer` with a
    `CoinRAGLLM`.

        >>> RetrieverQueryEngine(retriever, response_synthesizer=CoinRAGSynthesizer(rag))
    """

    def __init__(
        self,
        rag: CoinRAG,
        *,
        generation: GenerationConfig | None = None,
        streaming: bool = False,
        callback_manager: CallbackManager | None = None,
        empty_response: str = "Empty Response",
    ) -> None:
        """`empty_response` is the answer from no nodes; the model is not asked."""
        llm = CoinRAGLLM.from_defaults(rag)
        super().__init__(
            llm=llm,
            callback_manager=callback_manager or Settings.callback_manager,
            prompt_helper=MarkedPromptHelper.from_rag(rag, llm),
            streaming=streaming,
            empty_response=empty_response,
        )
        self._rag, self._generation = rag, generation

    def _get_prompts(self) -> PromptDictType:
        return {}  # the store's prompt is part of how it was built

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass

    # -- from nodes ----------------------------------------------------------------------------

    @dispatcher.span
    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        retrieve_ms: float = 0.0,
        **_: Any,
    ) -> RESPONSE_TYPE:
        """Answer from nodes, best first; the additional ones are only listed as sources.

        Raises:
            BudgetError: nodes, question and answer do not fit the model's window.
        """
        query, sources = _bundle(query), [*nodes, *(additional_source_nodes or ())]
        with self._synthesis(query) as finish:
            stream = self._open(query, nodes, retrieve_ms)
            metadata = _metadata(stream, sources, retrieve_ms)
            pieces = self._pieces(query.query_str, stream, metadata)
            if self._streaming:
                return finish(StreamingResponse(pieces, sources, metadata))
            return finish(Response("".join(pieces), sources, metadata))

    @dispatcher.span
    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        retrieve_ms: float = 0.0,
        **_: Any,
    ) -> RESPONSE_TYPE:
        """Like `synthesize`, off the event loop."""
        query, sources = _bundle(query), [*nodes, *(additional_source_nodes or ())]
        with self._synthesis(query) as finish:
            stream = await asyncio.to_thread(self._open, query, nodes, retrieve_ms)
            metadata = _metadata(stream, sources, retrieve_ms)
            pieces = self._apieces(query.query_str, stream, metadata)
            if self._streaming:
                return finish(AsyncStreamingResponse(pieces, sources, metadata))
            text = "".join([piece async for piece in pieces])
            return finish(Response(text, sources, metadata))

    # -- from texts ----------------------------------------------------------------------------

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **_: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer from texts; handles in them are read as KV."""
        stream = composing(lambda: self._open_texts(query_str, text_chunks))
        pieces = self._pieces(query_str, stream, {})
        return pieces if self._streaming else "".join(pieces)

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **_: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Like `get_response`, off the event loop."""
        stream = await asyncio.to_thread(
            composing, lambda: self._open_texts(query_str, text_chunks)
        )
        pieces = self._apieces(query_str, stream, {})
        return pieces if self._streaming else "".join([piece async for piece in pieces])

    # -- to the engine -------------------------------------------------------------------------

    def _open(
        self, query: QueryBundle, nodes: Sequence[NodeWithScore], retrieve_ms: float
    ) -> ReplyStream | None:
        """Compose the prefix; without nodes there is nothing to answer from."""
        if not nodes:
            return None
        context = [_context(node) for node in nodes]
        return composing(
            lambda: self._rag.stream_spans(
                query.query_str,
                context,
                generation=self._generation,
                retrieve_ms=retrieve_ms,
                refused=_adapters.altered(context, [node.node.metadata for node in nodes]),
            )
        )

    def _open_texts(self, question: str, texts: Sequence[str]) -> ReplyStream:
        resolved = [self._rag.engine.handles.resolve(text) for text in texts]
        refused = sum((Counter(it.refused) for it in resolved), Counter[Reason]())
        pieces = [piece for it in resolved for piece in it.pieces]
        generation = self._generation or self._rag.generation
        return ReplyStream(self._rag.engine.stream(question, pieces, generation), (), 0.0, refused)

    def _pieces(
        self, question: str, stream: ReplyStream | None, metadata: dict[str, Any]
    ) -> Generator[str, None, None]:
        """The pieces of the answer; at the end, `metadata` is brought up to date."""
        if stream is None:
            yield self._empty_response
            return
        with self._generation_of(question, stream):
            try:
                yield from stream
            finally:
                stream.close()
                metadata["coinrag"] = _adapters.report(stream)

    async def _apieces(
        self, question: str, stream: ReplyStream | None, metadata: dict[str, Any]
    ) -> AsyncGenerator[str, None]:
        if stream is None:
            yield self._empty_response
            return
        with self._generation_of(question, stream):
            try:
                async with aclosing(_adapters.off_loop(stream)) as pieces:
                    async for piece in pieces:
                        yield piece
            finally:
                metadata["coinrag"] = _adapters.report(stream)

    @contextmanager
    def _generation_of(self, question: str, stream: ReplyStream) -> Iterator[None]:
        """The events of an LLM around a generation, so that tokens and times are seen."""
        model, manager = self._llm.to_payload(), self.callback_manager
        dispatcher.event(
            LLMCompletionStartEvent(prompt=question, additional_kwargs={}, model_dict=model)
        )
        begun: dict[str, Any] = {EventPayload.PROMPT: question, EventPayload.SERIALIZED: model}
        event_id = manager.on_event_start(CBEventType.LLM, payload=begun)
        try:
            yield
        except BaseException as error:
            ended: dict[str, Any] = {EventPayload.EXCEPTION: error}
            manager.on_event_end(CBEventType.LLM, payload=ended, event_id=event_id)
            raise
        response = completion_of(stream.reply.answer)
        ended = {EventPayload.PROMPT: question, EventPayload.COMPLETION: response}
        manager.on_event_end(CBEventType.LLM, payload=ended, event_id=event_id)
        dispatcher.event(LLMCompletionEndEvent(prompt=question, response=response))

    @contextmanager
    def _synthesis(self, query: QueryBundle) -> Iterator[_Finish]:
        """The events around a synthesis; the end has to be told the response."""
        dispatcher.event(SynthesizeStartEvent(query=query))
        payload: dict[str, Any] = {EventPayload.QUERY_STR: query.query_str}
        with self.callback_manager.event(CBEventType.SYNTHESIZE, payload=payload) as event:

            def end(response: RESPONSE_TYPE) -> RESPONSE_TYPE:
                event.on_end(payload={EventPayload.RESPONSE: response})
                dispatcher.event(SynthesizeEndEvent(query=query, response=response))
                return response

            yield end


def _bundle(query: QueryType) -> QueryBundle:
    return QueryBundle(query) if isinstance(query, str) else query


def _context(node: NodeWithScore) -> ScoredSpan | str:
    """A node's span, or what an LLM would be shown of it."""
    inner = node.node
    text = inner.get_content(metadata_mode=MetadataMode.NONE)
    found = _adapters.span_or_text(inner.metadata, text, f"node {inner.node_id!r}", node.score or 0)
    if isinstance(found, str):
        return strip_handles(inner.get_content(metadata_mode=MetadataMode.LLM))
    return found


def _metadata(
    stream: ReplyStream | None, nodes: Sequence[NodeWithScore], retrieve_ms: float
) -> dict[str, Any]:
    by_node: dict[str, Any] = {node.node.node_id: node.node.metadata for node in nodes}
    return {**by_node, "coinrag": _adapters.report(stream, retrieve_ms)}
