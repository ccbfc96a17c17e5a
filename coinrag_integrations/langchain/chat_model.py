"""A LangChain chat model that reads passages from cached KV wherever its messages hold their handles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document as LangDocument
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, model_validator

from coinrag_integrations import _adapters
from coinrag_integrations.engine import (
    Answer,
    AnswerStream,
    Message,
    strip_handles,
)
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain._convert import marked_text
from coinrag_integrations.rag import CoinRAG

HANDLES = "coinrag_handles"
_BETWEEN = "\n\n"


class ChatCoinRAG(BaseChatModel):
    """The store's own model, for any LangChain prompt, chain or agent.

    Setup:
        `pip install 'coinrag-integrations[langchain,cpu]'`; no key and no service.

    Key init args:
        rag: the store, opened with `CoinRAG.open`.
        max_tokens, temperature, top_p, top_k, seed, stop: how to decode; 0 is greedy.
        timeout: seconds after which an answer is given up with `TimeoutError`.
        use_kv: False reads all passages as text.

    Passages come marked in any text (documents of `CoinRAGRetriever` are), as artifacts of a retriever
    tool's `ToolMessage`, as documents bound with `model.bind(coinrag_handles=documents)`, or as content
    blocks of type "non_standard" with the value `{"coinrag": metadata, "text": page_content}` of a
    document. Those that are spans of the store are read as KV, all others as text.

        >>> model = ChatCoinRAG(rag=rag, max_tokens=64)
        >>> chain = create_stuff_documents_chain(model, prompt)
        >>> model.invoke("Who?").usage_metadata["input_token_details"]["cache_read"]
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
            "scope": str(engine.scope),
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
        stream = self._open(messages, stop, kwargs)
        with closing(self._in_time(stream, kwargs)) as pieces:
            for _ in pieces:
                pass
        return _result(self.model_name, stream.answer)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        stream = await asyncio.to_thread(self._open, messages, stop, kwargs)
        async with asyncio.timeout(self._timeout(kwargs)), _off_loop(stream) as pieces:
            async for _ in pieces:
                pass
        return _result(self.model_name, stream.answer)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        stream = self._open(messages, stop, kwargs)
        with closing(self._in_time(stream, kwargs)) as pieces:
            for piece in pieces:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield _last(self.model_name, stream.answer)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        stream = await asyncio.to_thread(self._open, messages, stop, kwargs)
        deadline = time.monotonic() + (self._timeout(kwargs) or float("inf"))
        async with _off_loop(stream) as pieces:
            async for piece in pieces:
                _check(deadline)
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield _last(self.model_name, stream.answer)

    # -- to the engine -------------------------------------------------------------------------

    def _open(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: dict[str, Any]
    ) -> AnswerStream:
        options = dict(kwargs)
        documents = options.pop(HANDLES, ())
        value = _adapters.call_options(self, options, also=("timeout",))
        generation = _adapters.generation_of(value, self.stop if stop is None else stop)
        turns = [self._turn(message) for message in messages]
        if documents:
            turns[-1] = self._behind(documents, turns[-1])
        return self.rag.engine.chat(turns, generation, use_kv=value["use_kv"])

    def _turn(self, message: BaseMessage) -> Message:
        match message:
            case SystemMessage():
                role = "system"
            case AIMessage():
                role = "assistant"
            case ChatMessage():
                role = message.role
            case _:  # what tools found is read as a user's words
                role = "user"
        if isinstance(message, ToolMessage) and (found := self._artifact(message.artifact)):
            return Message(role=role, content=found)
        return Message(role=role, content=self._content(message))

    def _content(self, message: BaseMessage) -> str:
        if isinstance(message.content, str):
            return message.content
        parts = []
        for block in message.content:
            if isinstance(block, str):
                parts.append(block)
            elif block.get("type") == "text":
                parts.append(str(block["text"]))
            elif isinstance(value := block.get("value"), Mapping) and "coinrag" in value:
                document = LangDocument(value["text"], metadata=dict(value["coinrag"]))
                parts.append(marked_text(self.rag, document))
            else:
                raise ConfigError(
                    f"the model reads text only: leave content of type {block.get('type')!r} out"
                )
        return "".join(parts)

    def _artifact(self, artifact: Any) -> str:
        """The documents of a retriever tool, marked; they are dicts once a checkpoint was read back."""
        if not isinstance(artifact, list | tuple) or not artifact:
            return ""
        documents = []
        for it in artifact:
            if isinstance(it, LangDocument):
                documents.append(it)
            elif isinstance(it, Mapping) and isinstance(it.get("page_content"), str):
                documents.append(
                    LangDocument(it["page_content"], metadata=dict(it.get("metadata") or {}))
                )
            else:
                return ""
        return _BETWEEN.join(marked_text(self.rag, document) for document in documents)

    def _behind(self, documents: Sequence[LangDocument], turn: Message) -> Message:
        """A question behind passages, in the store's own words."""
        context = "\n".join(marked_text(self.rag, document) for document in documents)
        before, after = self.rag.engine.config.prompt.user.split("{context}")
        content = f"{before}{context}{after.replace('{question}', turn.content)}"
        return Message(role=turn.role, content=content)

    def _timeout(self, kwargs: Mapping[str, Any]) -> float | None:
        timeout: float | None = kwargs.get("timeout", self.timeout)
        return timeout

    def _in_time(
        self, stream: AnswerStream, kwargs: Mapping[str, Any]
    ) -> Generator[str, None, None]:
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


def _off_loop(stream: AnswerStream) -> aclosing[Any]:
    return aclosing(_adapters.off_loop(stream))


def _usage(answer: Answer) -> UsageMetadata:
    counts = _adapters.token_counts(answer)
    details: dict[str, int] = {
        "cache_read": answer.usage.cached,
        "coinrag_online": answer.usage.online,
        "coinrag_kept": answer.usage.kept,
    }
    return UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
        input_token_details=InputTokenDetails(**details),  # type: ignore[typeddict-item]
    )


def _said_of(model_name: str, answer: Answer) -> dict[str, Any]:
    return {
        "model_name": model_name,
        "model_provider": "coinrag",
        "finish_reason": answer.finish_reason,
        "coinrag": _adapters.report_of(answer),
    }


def _result(model_name: str, answer: Answer) -> ChatResult:
    message = AIMessage(
        content=strip_handles(answer.text),
        usage_metadata=_usage(answer),
        response_metadata=_said_of(model_name, answer),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _last(model_name: str, answer: Answer) -> ChatGenerationChunk:
    """What can be said once the answer is there."""
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content="",
            usage_metadata=_usage(answer),
            response_metadata=_said_of(model_name, answer),
            chunk_position="last",
        )
    )
