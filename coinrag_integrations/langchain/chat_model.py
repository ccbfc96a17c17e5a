"""A LangChain chat model that reads passages from cached KV wherever its messages hold their handles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, Field, model_validator

from coinrag_integrations import _adapters
from coinrag_integrations.engine import CallReader, strip_handles
from coinrag_integrations.engine.tool_calls import tool_names
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain._messages import (
    last_chunk,
    message_of,
    offered_tools,
    openai_tool,
    turns_of,
)
from coinrag_integrations.langchain._served import Served, Stream
from coinrag_integrations.rag import CoinRAG

HANDLES = "coinrag_handles"


class ChatCoinRAG(Served, BaseChatModel):
    """The store's own model, for any LangChain prompt, chain or agent.

    Setup:
        `pip install 'coinrag-integrations[langchain,cpu]'`; no key and no service.

    Key init args:
        rag: the store, opened with `CoinRAG.open`.
        max_tokens, temperature, top_p, top_k, seed, stop: how to decode; 0 is greedy.
        timeout: seconds after which an answer is given up with `TimeoutError`.
        use_kv: False reads all passages as text.
        base_url: of a vLLM server that runs the model (docs/deploy.md); with api_key and served_model, its
            name for the model. Passages whose KV it cannot use are computed there as text.

    Passages come marked in any text (documents of `CoinRAGRetriever` are), as artifacts of a retriever
    tool's `ToolMessage`, as documents bound with `model.bind(coinrag_handles=documents)`, or as content
    blocks of type "non_standard" with the value `{"coinrag": metadata, "text": page_content}` of a
    document. Those that are spans of the store are read as KV, all others as text.

    Tools that are bound are shown in the form of the model's chat template, or in words where it has
    none that we can read; calls are read out of the answer.

        >>> model = ChatCoinRAG(rag=rag, max_tokens=64)
        >>> chain = create_stuff_documents_chain(model, prompt)
        >>> model.invoke("Who?").usage_metadata["input_token_details"]["cache_read"]
        >>> agent = create_agent(model, [create_retriever_tool(retriever, "search", "Finds passages.")])
    """

    model_config = ConfigDict(populate_by_name=True, arbitrary_types_allowed=True)

    rag: CoinRAG = Field(exclude=True, repr=False)
    max_tokens: int = Field(default=256, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    timeout: float | None = None
    max_retries: int = 0
    """Taken for the sake of applications that set it; a local model has nothing to try again."""
    use_kv: bool = True

    @model_validator(mode="after")
    def _leave_room(self) -> ChatCoinRAG:
        window = self.rag.engine.model.window
        if self.max_tokens >= window:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, which leaves no room for a prompt in a window of "
                f"{window}: lower it"
            )
        return self

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self.rag.engine.model.name

    # -- what LangChain asks -------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "coinrag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes an answer: two models that differ share no cache."""
        options = _adapters.call_options(self, {}, also=("timeout", "stop"))
        engine = self.rag.engine
        return {
            "model_name": self.model_name,
            "fingerprint": engine.fingerprint.digest,
            "adapter": engine.reader.adapter,
            "scope": str(engine.scope),
            "base_url": self.base_url,
            **options,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "coinrag"
        params["ls_model_name"] = kwargs.get("model", self.model_name)
        params["ls_temperature"] = kwargs.get("temperature", self.temperature)
        params["ls_max_tokens"] = kwargs.get("max_tokens", self.max_tokens)
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of a text; handles are none."""
        return list(self.rag.engine.model.tokenizer.encode(strip_handles(text)).ids)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools of any kind that LangChain knows, which it may call.

        With `tool_choice="none"` it is shown none of them. A call of what is returned raises
        `ConfigError` for any other choice but "auto", and for tools that share a name.
        """
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return self.bind(tools=[openai_tool(tool) for tool in tools], **kwargs)

    def with_structured_output(self, schema: Any, **kwargs: Any) -> NoReturn:
        """Refused: the model is not made to follow a schema.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "ChatCoinRAG does not follow a schema: ask for JSON in the prompt and parse it, e.g. with "
            "PydanticOutputParser"
        )

    # -- answers -------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        stream, reader = self._open(messages, stop, kwargs)
        with closing(self._in_time(stream, kwargs)) as pieces:
            for piece in pieces:
                reader.push(piece)
        return self._result(stream, reader)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        stream, reader = await asyncio.to_thread(self._open, messages, stop, kwargs)
        async with asyncio.timeout(self._timeout(kwargs)), _off_loop(stream) as pieces:
            async for piece in pieces:
                reader.push(piece)
        return self._result(stream, reader)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        def told(text: str) -> ChatGenerationChunk:
            chunk = _chunk(text)
            if run_manager is not None:
                run_manager.on_llm_new_token(text, chunk=chunk)
            return chunk

        stream, reader = self._open(messages, stop, kwargs)
        with closing(self._in_time(stream, kwargs)) as pieces:
            for piece in pieces:
                if text := reader.push(piece):
                    yield told(text)
        if text := reader.end()[0]:
            yield told(text)
        yield self._last(stream, reader)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async def told(text: str) -> ChatGenerationChunk:
            chunk = _chunk(text)
            if run_manager is not None:
                await run_manager.on_llm_new_token(text, chunk=chunk)
            return chunk

        stream, reader = await asyncio.to_thread(self._open, messages, stop, kwargs)
        deadline = time.monotonic() + (self._timeout(kwargs) or float("inf"))
        async with _off_loop(stream) as pieces:
            async for piece in pieces:
                _check(deadline)
                if text := reader.push(piece):
                    yield await told(text)
        if text := reader.end()[0]:
            yield await told(text)
        yield self._last(stream, reader)

    # -- to the engine and back ----------------------------------------------------------------

    def _open(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: dict[str, Any]
    ) -> tuple[Stream, CallReader]:
        options = dict(kwargs)
        documents = options.pop(HANDLES, ())
        tools = offered_tools(options.pop("tools", None) or (), options.pop("tool_choice", None))
        value = _adapters.call_options(self, options, also=("timeout",))
        generation = _adapters.generation_of(value, self.stop if stop is None else stop)
        turns = turns_of(self.rag, messages, documents)
        reader = CallReader(tool_names(tools))
        model = self._answering.of(self.rag.engine)
        return model.chat(turns, generation, tools=tools, use_kv=value["use_kv"]), reader

    def _result(self, stream: Stream, reader: CallReader) -> ChatResult:
        message = message_of(self.model_name, stream.answer, reader.end()[1])
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _last(self, stream: Stream, reader: CallReader) -> ChatGenerationChunk:
        message = last_chunk(self.model_name, stream.answer, reader.end()[1])
        return ChatGenerationChunk(message=message)

    def _timeout(self, kwargs: Mapping[str, Any]) -> float | None:
        timeout: float | None = kwargs.get("timeout", self.timeout)
        return timeout

    def _in_time(self, stream: Stream, kwargs: Mapping[str, Any]) -> Generator[str, None, None]:
        deadline = time.monotonic() + (self._timeout(kwargs) or float("inf"))
        try:
            for piece in stream:
                _check(deadline)
                yield piece
        finally:
            stream.close()


def _check(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the answer took longer than timeout: raise it, or lower max_tokens")


def _off_loop(stream: Stream) -> aclosing[Any]:
    return aclosing(_adapters.off_loop(stream))


def _chunk(text: str) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=AIMessageChunk(content=text))
