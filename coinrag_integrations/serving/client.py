"""Answers from a model that a vLLM server runs, behind prefixes that are composed there.

Retrieval, catalog and handles stay here; what goes to the server are token ids, handles and a salt. If it
cannot use them, the text is sent as tokens to be computed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

import httpx

from coinrag_integrations.engine import (
    Answer,
    Engine,
    GenerationConfig,
    Message,
    Timings,
    Usage,
)
from coinrag_integrations.engine.chat import Prepared, chat_pieces, text_pieces
from coinrag_integrations.engine.generation import FinishReason
from coinrag_integrations.engine.handles import Reason, without_handles
from coinrag_integrations.engine.plan import Piece, begin_alike
from coinrag_integrations.engine.prompt import Prompt
from coinrag_integrations.engine.text import TrimmedText
from coinrag_integrations.errors import ServingError
from coinrag_integrations.serving.writing import PrefixWriter, Written
from coinrag_integrations.types import SpanRef

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0


class ServedModel:
    """The model of a store, run by a server. May be used by many threads.

    >>> with ServedModel.of(rag.engine, "http://localhost:8000") as served:
    ...     stream = served.stream(question, [span.ref for span in rag.retrieve(question)])
    ...     print("".join(stream), stream.answer.usage)
    """

    def __init__(
        self,
        writer: PrefixWriter,
        prompt: Prompt,
        stop_ids: Collection[int],
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Nothing is sent yet. `model` is the name that the server gives it; None: its only one."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=timeout_s,
            transport=transport,
            limits=httpx.Limits(max_connections=None),
        )
        self._writer, self._prompt, self._model = writer, prompt, model
        self._stop_ids = sorted(stop_ids)

    @classmethod
    def of(cls, engine: Engine, base_url: str, **options: Any) -> Self:
        """The server at `base_url` for an engine's store; `options` are those of the class.

        Raises:
            StoreError: what the server needs cannot be written into the store.
        """
        writer = PrefixWriter.of(engine)
        return cls(writer, engine.prompt, engine.model.stop_ids, base_url, **options)

    def stream(
        self,
        question: str,
        context: Sequence[SpanRef | str],
        generation: GenerationConfig | None = None,
        *,
        earlier: Sequence[SpanRef] = (),
    ) -> ServedStream:
        """Answer from spans, best first, and from texts, a piece of text at a time.

        `earlier` are the spans of a conversation's last turn (`stream.answer.spans`): those that come
        again come first, so that the server has their blocks already.

        Raises:
            ServingError: the server cannot be reached (also while pieces come).
        """
        if earlier:
            n = next((i for i, it in enumerate(context) if isinstance(it, str)), len(context))
            first = [it for it in context[:n] if isinstance(it, SpanRef)]
            context = [*begin_alike(first, earlier), *context[n:]]
        return self.stream_pieces(self._prompt.around(question, context), generation)

    def stream_pieces(
        self, pieces: Sequence[Piece], generation: GenerationConfig | None = None
    ) -> ServedStream:
        """Go on after spans and text in any order, the last of them text. See `PrefixWriter.write`.

        Raises:
            ConfigError: the last piece is not text.
            ServingError: the server cannot be reached (also while pieces come).
        """
        written = self._writer.write(pieces)
        body = self._body(generation or GenerationConfig())
        return ServedStream(self._http, body, written)

    def chat(
        self,
        messages: Sequence[Message],
        generation: GenerationConfig | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        use_kv: bool = True,
    ) -> ServedStream:
        """Go on after a conversation with handles in it, as `Engine.chat` does.

        Raises:
            ConfigError: no messages, the template refuses them, or tools without names of their own.
            ServingError: the server cannot be reached (also while pieces come).
        """
        resolve = self._writer.handles.resolve if use_kv else without_handles
        prepared = chat_pieces(self._prompt.tokenizer, messages, resolve, tools)
        return self._go_on(prepared, generation)

    def complete(
        self, text: str, generation: GenerationConfig | None = None, *, use_kv: bool = True
    ) -> ServedStream:
        """Go on after a text with handles in it, without a template.

        Raises:
            ServingError: the server cannot be reached (also while pieces come).
        """
        resolve = self._writer.handles.resolve if use_kv else without_handles
        return self._go_on(text_pieces(self._prompt.tokenizer, text, resolve), generation)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """The object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _go_on(self, prepared: Prepared, generation: GenerationConfig | None) -> ServedStream:
        pieces = self._writer.ending_in_text(prepared.pieces)
        stream = self.stream_pieces(pieces, generation)
        stream.refused = prepared.refused
        return stream

    def _body(self, generation: GenerationConfig) -> dict[str, Any]:
        if self._model is None:
            self._model = _only_model(self._http)
        body = {
            "model": self._model,
            "max_tokens": generation.max_new_tokens,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": generation.top_k,
            "repetition_penalty": 1.0,  # a server takes the model's own otherwise, the engine does not
            "stop_token_ids": self._stop_ids,
            "stop": list(generation.stop),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if generation.seed is None else {**body, "seed": generation.seed}


@dataclass(slots=True)
class _Said:
    """What a server has said so far of one answer."""

    finish: FinishReason = "length"
    ended: bool = False
    n_generated: int = 0
    ttft_ms: float = 0.0


class ServedStream:
    """Iterates over the text of one answer; `answer` is complete once it has ended.

    The pieces, joined, are the answer's text. `fallback` says why the spans were computed as text, if
    they were, `refused` counts the prompt's handles that were read as words.
    """

    def __init__(self, http: httpx.Client, body: dict[str, Any], written: Written) -> None:
        """Nothing is sent before the first piece is asked for."""
        self._http, self._body, self._written = http, body, written
        self.fallback = "" if written.params else "not sent"
        self.refused: Mapping[Reason, int] = {}
        self._said, self._pieces = _Said(), list[str]()
        self._began = time.perf_counter()
        self._steps = self._run()

    def __iter__(self) -> Iterator[str]:
        """The stream itself."""
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        return next(self._steps)

    def body_of_prefix(self) -> dict[str, Any]:
        """The request for /v1/completions that asks for the composed prefix, for other clients."""
        return {
            **self._body,
            "prompt": list(self._written.prompt),
            "kv_transfer_params": self._written.params,
            "cache_salt": self._written.salt,
        }

    def close(self) -> None:
        """Stop generating."""
        self._steps.close()

    @property
    def answer(self) -> Answer:
        """What has been answered so far. Of a prefix that was not used, all spans count as recomputed."""
        written, said = self._written, self._said
        n_cached = 0 if self.fallback else written.n_entries
        return Answer(
            text="".join(self._pieces),
            finish_reason=said.finish,
            spans=written.refs,
            recomputed=written.refs if self.fallback else (),
            usage=Usage(
                cached=n_cached,
                online=len(written.text if self.fallback else written.prompt) - n_cached,
                generated=said.n_generated,
            ),
            timings=Timings(ttft_ms=said.ttft_ms),
            refused=self.refused,
        )

    def _run(self) -> Generator[str]:
        trimmed = TrimmedText()
        for piece in self._texts():
            if not self._said.ttft_ms:
                self._said.ttft_ms = (time.perf_counter() - self._began) * 1e3
            if shown := trimmed.push(piece):
                self._pieces.append(shown)
                yield shown

    def _texts(self) -> Iterator[str]:
        """The answer as the server sends it: behind the prefix, or else after its text."""
        if self._written.params:
            begun = False
            try:
                for text in self._send(self.body_of_prefix()):
                    begun = True
                    yield text
                return
            except _RefusedError as refusal:
                if begun:
                    raise ServingError(f"the answer broke off: {refusal}") from refusal
                self.fallback = str(refusal)
                logger.warning("the spans are computed as text: %s", refusal)
        try:
            yield from self._send({**self._body, "prompt": list(self._written.text)})
        except _RefusedError as refusal:
            raise ServingError(f"the server refuses: {refusal}") from refusal

    def _send(self, body: dict[str, Any]) -> Iterator[str]:
        """The texts of one request.

        Raises:
            _RefusedError: the server answers, but with an error.
            ServingError: it does not answer.
        """
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _RefusedError(f"{response.status_code}: {response.text:.200}")
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    yield from self._read(json.loads(line.removeprefix("data: ")))
            if not self._said.ended:  # as when a server is being ended
                raise ServingError("the answer broke off: ask again")
        except (httpx.HTTPError, ValueError) as error:
            raise ServingError(
                f"{self._http.base_url} cannot be reached ({type(error).__name__}: {error})"
            ) from error

    def _read(self, event: dict[str, Any]) -> Iterator[str]:
        """The text in an event; notes what else it says."""
        if error := event.get("error"):
            raise _RefusedError(f"{error}"[:200])
        if usage := event.get("usage"):
            self._said.n_generated = usage["completion_tokens"]
        for choice in event.get("choices", ()):
            reason = choice.get("finish_reason")
            if reason == "error":
                raise _RefusedError("the prefix could not be loaded")
            if reason in get_args(FinishReason):
                self._said.finish, self._said.ended = reason, True
            if choice.get("text"):
                yield choice["text"]


class _RefusedError(Exception):
    """The server has answered with an error."""


def _only_model(http: httpx.Client) -> str:
    try:
        response = http.get("/v1/models").raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ServingError(
            f"{http.base_url} does not say which model it serves ({type(error).__name__}: {error}): "
            "is it a vLLM server, and up?"
        ) from error
