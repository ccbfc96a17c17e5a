"""A LlamaIndex chat engine in which every turn brings its own passages, and earlier turns stay computed.

LlamaIndex's own context engines rewrite the system message each turn, so everything behind it has to be
computed anew. Here passages stand in the turn that asked for them and are not repeated later: what was
computed before is a prefix of what comes next, and is kept (`engine.kept`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, Literal, Self

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager, trace_method
from llama_index.core.chat_engine.types import (
    AgentChatResponse,
    BaseChatEngine,
    StreamingAgentChatResponse,
)
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.memory import BaseMemory, Memory
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.core.settings import Settings
from llama_index.core.tools import ToolOutput

from coinrag_integrations.engine import mark
from coinrag_integrations.errors import ConfigError, SpanError
from coinrag_integrations.llamaindex.llm import CoinRAGLLM
from coinrag_integrations.llamaindex.prompt_helper import count_with
from coinrag_integrations.llamaindex.retriever import CoinRAGRetriever
from coinrag_integrations.llamaindex.span_node import SpanNode
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval.config import Form
from coinrag_integrations.types import ChunkId, SpanRef

ChatMode = Literal["context", "condense_plus_context"]

# Where a user's message in the memory keeps what it was shown with: passages by the ids of their nodes.
PASSAGES = "coinrag_passages"
_PER_MESSAGE = 16  # tokens that a chat template may put around a message, generously
_CONDENSE = (
    "Rewrite the last question so that it can be understood without the conversation before it. "
    "Answer with the question only.\n\n{history}\n\nLast question: {question}\nRewritten question:"
)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a question is answered with."""

    messages: list[ChatMessage]
    asked: ChatMessage
    nodes: list[NodeWithScore]
    source: ToolOutput


class CoinRAGChatEngine(BaseChatEngine):
    """Retrieves for every message, and answers behind the conversation so far.

    `chat_mode` "context" searches with the message itself, "condense_plus_context" with a question that
    the model makes of message and history. When a conversation outgrows the window, its oldest turns are
    left out of the prompt; the memory keeps them.

        >>> chat = CoinRAGChatEngine.from_defaults(rag)
        >>> chat.chat("Who built the tidal organ?")
        >>> chat.chat("And when?").metadata["coinrag"]["usage"]["kept"]
    """

    def __init__(
        self,
        rag: CoinRAG,
        *,
        retriever: BaseRetriever,
        llm: CoinRAGLLM,
        memory: BaseMemory,
        chat_mode: ChatMode = "condense_plus_context",
        system_prompt: str | None = None,
        node_postprocessors: Sequence[BaseNodePostprocessor] = (),
        callback_manager: CallbackManager | None = None,
    ) -> None:
        """Prefer `from_defaults`. Without `system_prompt` the store's own is used.

        Raises:
            ConfigError: an unknown `chat_mode`.
        """
        if chat_mode not in ("context", "condense_plus_context"):
            raise ConfigError(
                f"chat_mode is {chat_mode!r}: use 'context' or 'condense_plus_context'"
            )
        self._retriever, self._llm, self._memory = retriever, llm, memory
        self._condenses = chat_mode == "condense_plus_context"
        self._template = rag.engine.config.prompt
        self._system = self._template.system if system_prompt is None else system_prompt
        self._count = count_with(rag)
        self._node_postprocessors = list(node_postprocessors)
        self.callback_manager = callback_manager or Settings.callback_manager
        for postprocessor in self._node_postprocessors:
            postprocessor.callback_manager = self.callback_manager

    @classmethod
    def from_defaults(
        cls,
        rag: CoinRAG,
        *,
        retriever: BaseRetriever | None = None,
        form: Form | None = None,
        ratio: int | None = None,
        n_raw: int | None = None,
        llm: CoinRAGLLM | None = None,
        memory: BaseMemory | None = None,
        chat_history: list[ChatMessage] | None = None,
        **options: Any,
    ) -> Self:
        """An engine with a retriever, a model and a memory of its own, unless they are given.

        `form`, `ratio` and `n_raw` are those of its `CoinRAGRetriever`.

        Raises:
            ConfigError: a retriever is given as well, no such form, or an unknown `chat_mode`.
        """
        if retriever is not None and (form, ratio, n_raw) != (None, None, None):
            raise ConfigError("give form, ratio and n_raw to the retriever, or no retriever")
        llm = llm or CoinRAGLLM.from_defaults(rag)
        return cls(
            rag,
            retriever=retriever or CoinRAGRetriever(rag, form=form, ratio=ratio, n_raw=n_raw),
            llm=llm,
            memory=memory
            or Memory.from_defaults(
                chat_history=chat_history,
                token_limit=llm.context_window,
                tokenizer_fn=count_with(rag),
            ),
            **options,
        )

    @property
    def chat_history(self) -> list[ChatMessage]:
        """The conversation so far."""
        return self._memory.get_all()

    def reset(self) -> None:
        """Forget the conversation."""
        self._memory.reset()

    @trace_method("chat")
    def chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Answer a message."""
        turn = self._turn(message, chat_history)
        response = self._llm.chat(turn.messages)
        self._memory.put(turn.asked)
        self._memory.put(response.message)
        return _response(turn, str(response.message.content or ""), response.raw)

    @trace_method("chat")
    async def achat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> AgentChatResponse:
        """Answer a message, off the event loop."""
        turn = await self._aturn(message, chat_history)
        response = await self._llm.achat(turn.messages)
        await self._memory.aput(turn.asked)
        await self._memory.aput(response.message)
        return _response(turn, str(response.message.content or ""), response.raw)

    @trace_method("chat")
    def stream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """Answer a message, a piece at a time."""
        turn = self._turn(message, chat_history)
        response = StreamingAgentChatResponse(
            chat_stream=self._llm.stream_chat(turn.messages),
            sources=[turn.source],
            source_nodes=turn.nodes,
        )
        self._memory.put(turn.asked)
        thread = Thread(target=response.write_response_to_history, args=(self._memory,))
        response.write_response_to_history_thread = thread
        thread.start()
        return response

    @trace_method("chat")
    async def astream_chat(
        self, message: str, chat_history: list[ChatMessage] | None = None
    ) -> StreamingAgentChatResponse:
        """Answer a message off the event loop, a piece at a time."""
        turn = await self._aturn(message, chat_history)
        response = StreamingAgentChatResponse(
            achat_stream=await self._llm.astream_chat(turn.messages),
            sources=[turn.source],
            source_nodes=turn.nodes,
        )
        await self._memory.aput(turn.asked)
        response.awrite_response_to_history_task = asyncio.create_task(
            response.awrite_response_to_history(self._memory)
        )
        return response

    # -- one turn ------------------------------------------------------------------------------

    def _turn(self, message: str, chat_history: list[ChatMessage] | None) -> _Turn:
        if chat_history is not None:
            self._memory.set(chat_history)
        history = self._memory.get(input=message)
        question = message
        if self._condenses and history:
            question = self._llm.complete(self._condensing(history, message)).text or message
        nodes = self._retriever.retrieve(question)
        for postprocessor in self._node_postprocessors:
            nodes = postprocessor.postprocess_nodes(nodes, query_bundle=QueryBundle(question))
        return self._with_passages(history, message, question, nodes)

    async def _aturn(self, message: str, chat_history: list[ChatMessage] | None) -> _Turn:
        if chat_history is not None:
            await self._memory.aset(chat_history)
        history = await self._memory.aget(input=message)
        question = message
        if self._condenses and history:
            condensed = await self._llm.acomplete(self._condensing(history, message))
            question = condensed.text or message
        nodes = await self._retriever.aretrieve(question)
        for postprocessor in self._node_postprocessors:
            nodes = await postprocessor.apostprocess_nodes(
                nodes, query_bundle=QueryBundle(question)
            )
        return self._with_passages(history, message, question, nodes)

    def _condensing(self, history: Sequence[ChatMessage], message: str) -> str:
        said = "\n".join(f"{it.role.value}: {it.content}" for it in history)
        return _CONDENSE.replace("{history}", said).replace("{question}", message)

    def _with_passages(
        self,
        history: Sequence[ChatMessage],
        message: str,
        question: str,
        nodes: list[NodeWithScore],
    ) -> _Turn:
        """The prompt: as much of the history as fits, then the message with what is new to it."""
        found = {node.node.node_id: _passage(node) for node in nodes}
        past = [it for it in history if it.role in (MessageRole.USER, MessageRole.ASSISTANT)]
        while True:
            shown = {node_id for it in past for node_id in it.additional_kwargs.get(PASSAGES, {})}
            new = {node_id: text for node_id, text in found.items() if not is_shown(node_id, shown)}
            asked = ChatMessage(
                role=MessageRole.USER, content=message, additional_kwargs={PASSAGES: new}
            )
            messages = [
                ChatMessage(role=MessageRole.SYSTEM, content=self._system),
                *(self._as_shown(it) for it in (*past, asked)),
            ]
            n_tokens = sum(len(self._count(it.content or "")) + _PER_MESSAGE for it in messages)
            if not past or n_tokens + self._llm.max_tokens <= self._llm.context_window:
                break
            past = past[1:]
            while past and past[0].role != MessageRole.USER:
                past = past[1:]
        source = ToolOutput(
            tool_name="retriever",
            content="\n\n".join(node.node.get_content(MetadataMode.NONE) for node in nodes),
            raw_input={"message": question},
            raw_output=nodes,
        )
        return _Turn(messages, asked, nodes, source)

    def _as_shown(self, message: ChatMessage) -> ChatMessage:
        """A message of the memory as the model is shown it: a question behind its passages."""
        passages = message.additional_kwargs.get(PASSAGES)
        if not passages:
            return ChatMessage(role=message.role, content=message.content)
        context = "\n".join(passages.values())
        before, after = self._template.user.split("{context}")
        content = f"{before}{context}{after.replace('{question}', message.content or '')}"
        return ChatMessage(role=message.role, content=content)


def is_shown(node_id: str, shown: Collection[str]) -> bool:
    """Whether a conversation shows what an id stands for: it, or all of its tokens as finely or finer.

    Ids are those of spans (`_adapters.span_id`), or of anything else.
    """
    if node_id in shown or (wanted := _span_of_id(node_id)) is None:
        return node_id in shown
    return any(
        it.chunk_id == wanted.chunk_id
        and it.start <= wanted.start
        and wanted.stop <= it.stop
        and it.ratio <= wanted.ratio
        for it in map(_span_of_id, shown)
        if it is not None
    )


def _span_of_id(node_id: str) -> SpanRef | None:
    """The inverse of `_adapters.span_id`; None for the ids of others."""
    chunk_id, *numbers = node_id.split(":")
    try:
        start, stop, *ratio = map(int, numbers)
        return SpanRef(ChunkId(chunk_id), start, stop, *ratio)
    except (ValueError, TypeError, SpanError):
        return None


def _passage(node: NodeWithScore) -> str:
    inner = node.node
    if isinstance(inner, SpanNode):
        return mark(inner.handle, inner.text)
    return inner.get_content(metadata_mode=MetadataMode.LLM)


def _response(turn: _Turn, text: str, report: Any) -> AgentChatResponse:
    return AgentChatResponse(
        response=text,
        sources=[turn.source],
        source_nodes=turn.nodes,
        metadata={"coinrag": report},
    )
