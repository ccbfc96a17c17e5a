"""LangChain runnables that answer from the documents' cached KV instead of their text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from langchain_core.callbacks import (
    AsyncCallbackManagerForChainRun,
    CallbackManagerForChainRun,
)
from langchain_core.documents import Document as LangDocument
from langchain_core.retrievers import RetrieverLike
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.config import patch_config
from langchain_core.runnables.utils import AddableDict
from pydantic import ConfigDict

from coinrag_integrations import _adapters
from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain._convert import context_of
from coinrag_integrations.langchain.retriever import CoinRAGRetriever
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.reply import ReplyStream
from coinrag_integrations.retrieval.config import Form

T = TypeVar("T")

_QUESTION, _DOCUMENTS = ("question", "input"), ("documents", "context")


class CoinRAGGenerator(RunnableSerializable[dict[str, Any], str]):
    """Answers a "question" (or "input") from "documents" (or "context") of our retriever.

    Documents may be dropped, reordered and rewritten on the way: what is not a span of the store, word
    for word, is read as text. Without documents the answer is empty and the model is not asked.

        >>> generator = CoinRAGGenerator(rag=rag)
        >>> generator.invoke({"question": question, "documents": retriever.invoke(question)})
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    rag: CoinRAG
    generation: GenerationConfig | None = None

    def invoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> str:
        """The answer.

        Raises:
            ConfigError: a key is missing.
            BudgetError: spans, question and answer do not fit the model's window.
        """
        return self._call_with_config(self._answer, input, config, **kwargs)

    async def ainvoke(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> str:
        """Like `invoke`, off the event loop."""
        return await self._acall_with_config(self._aanswer, input, config, **kwargs)

    def stream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any | None
    ) -> Iterator[str]:
        """The answer, a piece of text at a time. Closing the iterator stops the generation."""
        yield from self._transform_stream_with_config(iter([input]), self._pieces, config, **kwargs)

    async def astream(
        self, input: dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any | None
    ) -> AsyncIterator[str]:
        """Like `stream`, off the event loop."""
        _no_options(kwargs)
        pieces = self._atransform_stream_with_config(_once(input), self._apieces, config, **kwargs)
        async with _closing(pieces):
            async for piece in pieces:
                yield piece

    def _answer(self, value: dict[str, Any]) -> str:
        stream = self._open(value)
        return "" if stream is None else "".join(stream)

    async def _aanswer(self, value: dict[str, Any]) -> str:
        stream = await asyncio.to_thread(self._open, value)
        return "" if stream is None else "".join([p async for p in _adapters.off_loop(stream)])

    def _pieces(self, values: Iterator[dict[str, Any]]) -> Iterator[str]:
        for value in values:
            yield from _iterate(self._open(value))

    async def _apieces(self, values: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        async for value in values:
            stream = await asyncio.to_thread(self._open, value)
            async with _closing(_aiterate(stream)) as pieces:
                async for piece in pieces:
                    yield piece

    def _open(self, value: Mapping[str, Any]) -> ReplyStream | None:
        question = value[_key(value, _QUESTION)]
        documents = value[_key(value, _DOCUMENTS)]
        return open_stream(self.rag, question, documents, self.generation)


def create_coinrag_chain(
    rag: CoinRAG,
    retriever: RetrieverLike | None = None,
    *,
    k: int | None = None,
    n_chunks: int | None = None,
    form: Form | None = None,
    ratio: int | None = None,
    n_raw: int | None = None,
    generation: GenerationConfig | None = None,
) -> Runnable[str | dict[str, Any], dict[str, Any]]:
    """Retrieve and answer: a question in, its answer with the documents it rests on out.

    The input is a string, or a dict with "question" or "input". The output holds the input's keys
    ("question" for a string), "context" (documents), "answer", and under "coinrag" the spans used,
    token counts and timings. Streaming yields these one after the other, the answer in pieces. `k`,
    `n_chunks`, `form`, `ratio` and `n_raw` are those of `CoinRAGRetriever`.

    Raises:
        ConfigError: both a retriever and what it should look for are given.
    """
    options: dict[str, Any] = {
        "k": k,
        "n_chunks": n_chunks,
        "form": form,
        "ratio": ratio,
        "n_raw": n_raw,
    }
    if retriever is not None and any(it is not None for it in options.values()):
        raise ConfigError(f"give {', '.join(options)} to the retriever, or no retriever")
    return _CoinRAGChain(
        rag=rag,
        retriever=retriever or CoinRAGRetriever(rag=rag, **options, render="text"),
        generation=generation,
    )


class _CoinRAGChain(RunnableSerializable[str | dict[str, Any], dict[str, Any]]):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    name: str | None = "coinrag_chain"
    rag: CoinRAG
    retriever: Runnable[str, list[LangDocument]]
    generation: GenerationConfig | None = None

    def invoke(
        self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return self._call_with_config(self._answer, input, config, **kwargs)

    async def ainvoke(
        self, input: str | dict[str, Any], config: RunnableConfig | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return await self._acall_with_config(self._aanswer, input, config, **kwargs)

    def stream(
        self,
        input: str | dict[str, Any],
        config: RunnableConfig | None = None,
        **kwargs: Any | None,
    ) -> Iterator[dict[str, Any]]:
        yield from self._transform_stream_with_config(
            iter([input]), self._transformed, config, **kwargs
        )

    async def astream(
        self,
        input: str | dict[str, Any],
        config: RunnableConfig | None = None,
        **kwargs: Any | None,
    ) -> AsyncIterator[dict[str, Any]]:
        _no_options(kwargs)
        steps = self._atransform_stream_with_config(
            _once(input), self._atransformed, config, **kwargs
        )
        async with _closing(steps):
            async for step in steps:
                yield step

    def _answer(
        self,
        value: str | dict[str, Any],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> dict[str, Any]:
        child = patch_config(config, callbacks=run_manager.get_child())
        return dict(sum(self._steps(value, child), AddableDict()))

    async def _aanswer(
        self,
        value: str | dict[str, Any],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> dict[str, Any]:
        child = patch_config(config, callbacks=run_manager.get_child())
        steps = [step async for step in self._asteps(value, child)]
        return dict(sum(steps, AddableDict()))

    def _transformed(
        self,
        values: Iterator[str | dict[str, Any]],
        run_manager: CallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> Iterator[dict[str, Any]]:
        for value in values:
            yield from self._steps(value, config)

    async def _atransformed(
        self,
        values: AsyncIterator[str | dict[str, Any]],
        run_manager: AsyncCallbackManagerForChainRun,
        config: RunnableConfig,
    ) -> AsyncIterator[dict[str, Any]]:
        async for value in values:
            async with _closing(self._asteps(value, config)) as steps:
                async for step in steps:
                    yield step

    def _steps(self, value: str | dict[str, Any], config: RunnableConfig) -> Iterator[AddableDict]:
        """The parts of the output, in order; added up they are the whole."""
        given = {"question": value} if isinstance(value, str) else value
        question = given[_key(given, _QUESTION)]
        yield AddableDict(given)
        begin = time.perf_counter()
        documents = self.retriever.invoke(question, config)
        retrieve_ms = (time.perf_counter() - begin) * 1e3
        yield AddableDict(context=documents, answer="")
        stream = open_stream(self.rag, question, documents, self.generation, retrieve_ms)
        for piece in _iterate(stream):
            yield AddableDict(answer=piece)
        yield AddableDict(coinrag=_adapters.report(stream, retrieve_ms))

    async def _asteps(
        self, value: str | dict[str, Any], config: RunnableConfig
    ) -> AsyncIterator[AddableDict]:
        given = {"question": value} if isinstance(value, str) else value
        question = given[_key(given, _QUESTION)]
        yield AddableDict(given)
        begin = time.perf_counter()
        documents = await self.retriever.ainvoke(question, config)
        retrieve_ms = (time.perf_counter() - begin) * 1e3
        yield AddableDict(context=documents, answer="")
        stream = await asyncio.to_thread(
            open_stream, self.rag, question, documents, self.generation, retrieve_ms
        )
        async with _closing(_aiterate(stream)) as pieces:
            async for piece in pieces:
                yield AddableDict(answer=piece)
        yield AddableDict(coinrag=_adapters.report(stream, retrieve_ms))


def open_stream(
    rag: CoinRAG,
    question: str,
    documents: Sequence[LangDocument],
    generation: GenerationConfig | None,
    retrieve_ms: float = 0.0,
) -> ReplyStream | None:
    """Compose the prefix of these documents; without any there is nothing to answer from."""
    if not documents:
        return None
    context = [context_of(document) for document in documents]
    return rag.stream_spans(
        question,
        context,
        generation=generation,
        retrieve_ms=retrieve_ms,
        refused=_adapters.altered(context, [document.metadata for document in documents]),
    )


def _iterate(stream: ReplyStream | None) -> Iterator[str]:
    if stream is None:
        return
    try:
        yield from stream
    finally:
        stream.close()


async def _aiterate(stream: ReplyStream | None) -> AsyncIterator[str]:
    if stream is None:
        return
    async with _closing(_adapters.off_loop(stream)) as pieces:
        async for piece in pieces:
            yield piece


def _no_options(given: Mapping[str, Any]) -> None:
    """Refuse options of a call; LangChain's own error of an async stream would not name them."""
    if given:
        raise TypeError(f"{', '.join(sorted(given))}: a call takes no options")


def _key(value: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if name in value:
            return name
    raise ConfigError(f"the input has neither {' nor '.join(names)}: got {sorted(value)}")


@asynccontextmanager
async def _closing(pieces: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an async generator when the block is left, not when it is collected some time later."""
    try:
        yield pieces
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


async def _once(value: Any) -> AsyncIterator[Any]:
    yield value
