"""A LlamaIndex LLM that reads passages from cached KV wherever a prompt holds their handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms import LLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from coinrag_integrations import _adapters
from coinrag_integrations.engine import (
    Answer,
    AnswerStream,
    GenerationConfig,
    Message,
    strip_handles,
)
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex._bound import Bound
from coinrag_integrations.llamaindex.events import composing
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.serving.answering import Answering
from coinrag_integrations.serving.client import ServedStream

_Response = TypeVar("_Response")
Stream = AnswerStream | ServedStream
_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


class CoinRAGLLM(LLM):
    """The store's own model, for any prompt of LlamaIndex.

    Passages whose handles a prompt holds (nodes of `CoinRAGRetriever` bring them along) are read from
    the store; everything else is computed, but for what an earlier turn of the same conversation has
    left. `chat` goes through the model's chat template, and so does `complete`, unless there is none.
    The fields can be given to each call as well. With `base_url` the model runs in a vLLM server (see
    docs/deploy.md); passages whose KV it cannot use are computed there as text.

        >>> llm = CoinRAGLLM.from_defaults(rag, max_tokens=64)
        >>> index.as_query_engine(llm=llm)  # any LlamaIndex index whose nodes came from us
    """

    model_name: str = Field(description="Names the model.")
    context_window: int = Field(description="Tokens of prompt and answer together.", gt=0)
    max_tokens: int = Field(default=256, description="Tokens of an answer.", gt=0)
    temperature: float = Field(default=0.0, description="0 is greedy.", ge=0)
    top_p: float = Field(default=1.0, description="Nucleus sampling.")
    top_k: int = Field(default=0, description="0 considers all tokens.")
    seed: int | None = Field(default=None, description="Makes sampling repeatable.")
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    use_kv: bool = Field(default=True, description="False reads all passages as text.")
    has_chat_template: bool = Field(default=True, description="Whether turns have a form.")
    base_url: str | None = Field(default=None, description="A vLLM server that runs the model.")
    api_key: str | None = Field(default=None, description="Its key.", exclude=True, repr=False)
    served_model: str | None = Field(default=None, description="Its name for the model.")
    _bound: Bound = PrivateAttr()
    _answering: Answering = PrivateAttr()

    def __init__(self, *, rag: CoinRAG | None = None, **data: Any) -> None:
        """Prefer `from_defaults`. Without `rag` the LLM can be kept, but not used."""
        super().__init__(**data)
        self._bound = Bound(rag)
        self._answering = Answering(self.base_url, self.api_key, self.served_model)
        if self.max_tokens >= self.context_window:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}, which leaves no room for a prompt in a window of "
                f"{self.context_window}: lower it"
            )

    @classmethod
    def class_name(cls) -> str:
        """The name under which the LLM is serialised."""
        return "CoinRAGLLM"

    @classmethod
    def from_defaults(cls, rag: CoinRAG, **fields: Any) -> Self:
        """The model of `rag`, with its window and its way of decoding unless `fields` say otherwise.

        Raises:
            ConfigError: `max_tokens` leaves no room for a prompt.
        """
        model, generation = rag.engine.model, rag.generation
        own = {
            "model_name": model.name,
            "context_window": model.window,
            "max_tokens": min(256, model.window // 4),
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "seed": generation.seed,
            "stop": list(generation.stop),
            "has_chat_template": bool(model.tokenizer.hf.chat_template),
        }
        return cls(rag=rag, **{**own, **fields})

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """The inverse of `to_dict`; give `rag` to be able to use it."""
        return super().from_dict({**data, **kwargs})

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks before it makes a prompt."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_tokens,
            is_chat_model=self.has_chat_template,
            is_function_calling_model=False,
            model_name=self.model_name,
        )

    # -- the eight ways of asking --------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        return _chat_response(_finished(self._chat(messages, kwargs)))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt."""
        return _completion(_finished(self._complete(prompt, formatted, kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation, a piece at a time."""
        return _streamed(self._chat(messages, kwargs), _chat_response)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Answer a prompt, a piece at a time."""
        return _streamed(self._complete(prompt, formatted, kwargs), _completion)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, off the event loop."""
        stream = await asyncio.to_thread(self._chat, messages, kwargs)
        return _chat_response(await _afinished(stream))

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Answer a prompt, off the event loop."""
        stream = await asyncio.to_thread(self._complete, prompt, formatted, kwargs)
        return _completion(await _afinished(stream))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer a conversation off the event loop, a piece at a time."""
        stream = await asyncio.to_thread(self._chat, messages, kwargs)
        return _astreamed(stream, _chat_response)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Answer a prompt off the event loop, a piece at a time."""
        stream = await asyncio.to_thread(self._complete, prompt, formatted, kwargs)
        return _astreamed(stream, _completion)

    # -- to the engine -------------------------------------------------------------------------

    def _chat(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Stream:
        turns = [_message(message) for message in messages]
        model = self._answering.of(self._bound.need(self).engine)
        generation, use_kv = self._options(kwargs)
        return composing(lambda: model.chat(turns, generation, use_kv=use_kv))

    def _complete(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> Stream:
        if self.has_chat_template and not formatted:
            return self._chat([ChatMessage(role=MessageRole.USER, content=prompt)], kwargs)
        model = self._answering.of(self._bound.need(self).engine)
        generation, use_kv = self._options(kwargs)
        return composing(lambda: model.complete(prompt, generation, use_kv=use_kv))

    def _options(self, kwargs: dict[str, Any]) -> tuple[GenerationConfig, bool]:
        """How to decode, and whether to use KV: the fields, unless a call says otherwise."""
        options = _adapters.call_options(self, kwargs, also=("stop",))
        return _adapters.generation_of(options, options["stop"]), options["use_kv"]


def _message(message: ChatMessage) -> Message:
    """A turn in the roles that chat templates know: tools answer as users do."""
    if not all(isinstance(block, TextBlock) for block in message.blocks):
        raise ConfigError("the model reads text only: leave images, audio and files out")
    return Message(role=_ROLES.get(message.role, "user"), content=message.content or "")


def completion_of(answer: Answer, delta: str | None = None) -> CompletionResponse:
    """An answer as LlamaIndex knows answers; `raw` is what it says of itself."""
    report, counts = _adapters.report_of(answer), _adapters.token_counts(answer)
    return CompletionResponse(
        text=strip_handles(answer.text),
        delta=delta,
        raw={**report, "usage": {**report["usage"], **counts}},
        additional_kwargs=counts,
    )


def _finished(stream: Stream) -> Stream:
    for _ in stream:
        pass
    return stream


async def _afinished(stream: Stream) -> Stream:
    async with aclosing(_adapters.off_loop(stream)) as pieces:
        async for _ in pieces:
            pass
    return stream


def _streamed(
    stream: Stream, response: Callable[[Stream, str], _Response]
) -> Generator[_Response, None, None]:
    try:
        for piece in stream:
            yield response(stream, piece)
    finally:
        stream.close()


async def _astreamed(
    stream: Stream, response: Callable[[Stream, str], _Response]
) -> AsyncGenerator[_Response, None]:
    async with aclosing(_adapters.off_loop(stream)) as pieces:
        async for piece in pieces:
            yield response(stream, piece)


def _completion(stream: Stream, delta: str | None = None) -> CompletionResponse:
    return completion_of(stream.answer, delta)


def _chat_response(stream: Stream, delta: str | None = None) -> ChatResponse:
    completion = _completion(stream, delta)
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=completion.text),
        delta=delta,
        raw=completion.raw,
        additional_kwargs=completion.additional_kwargs,
    )
