"""What a vLLM server runs in front of its interface, so that stock clients get composed prefixes.

    --middleware coinrag_integrations.serving.middleware.CoinRAGMiddleware

A request with handles in its text is sent on as one for /v1/completions that asks for the prefix, and its
answer given back in the form that was asked for. If the prefix cannot be loaded, the request goes on as it
came, once. Everything else passes untouched. The store is the connector's own. Imports no vllm.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from typing import Any

from transformers import AutoTokenizer

from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.chat_answers import chat_answer, chat_event
from coinrag_integrations.serving.config import ServingConfig
from coinrag_integrations.serving.loading import open_texts
from coinrag_integrations.serving.marked import MarkedText, Rewritten
from coinrag_integrations.serving.writing import PrefixWriter

logger = logging.getLogger(__name__)

ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
App = Callable[[ASGIMessage, Receive, Send], Awaitable[None]]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HEADER = b"x-coinrag"
_MARKS = "\u27e6k".encode(), b"\\u27e6k"  # as JSON may spell it


class CoinRAGMiddleware:
    """An ASGI application around another one. The store is opened when it is needed first."""

    def __init__(self, app: App) -> None:
        """Nothing is opened yet."""
        self._app = app
        self._marked: MarkedText | None = None
        self._lock, self._open = threading.Lock(), ExitStack()

    async def __call__(self, scope: ASGIMessage, receive: Receive, send: Send) -> None:
        """Answer a request, and close the store behind the server's last one."""
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or not path.endswith((CHAT, TEXT)):
            await self._app(scope, receive, send)
            if scope["type"] == "lifespan":
                self._open.close()
            return
        raw, left = await _read(receive)
        rewritten = None if left else await asyncio.to_thread(self._rewrite, scope, raw)
        if rewritten is None:
            await self._app(scope, _replayed(raw, receive, left), send)
            return
        why = rewritten.why
        if rewritten.composed is not None:
            there, body = _sent(scope, rewritten.composed, TEXT)
            answer = _Answer(send, chat=path.endswith(CHAT), n_entries=rewritten.n_entries)
            await self._app(there, _replayed(body, receive), answer)
            if not answer.refused:
                return
            why = answer.refused
            logger.warning("the spans of a request are computed as text: %s", why)
        there, body = _sent(scope, rewritten.words)
        await self._app(there, _replayed(body, receive), _noting(send, f"text: {why}"))

    def _rewrite(self, scope: ASGIMessage, raw: bytes) -> Rewritten | None:
        """What to send instead; None for what is to be sent as it came."""
        if not any(mark in raw.lower() for mark in _MARKS):
            return None
        try:
            body = json.loads(raw)
            if not isinstance(body, dict) or body.keys() & {"kv_transfer_params", "cache_salt"}:
                return None
            return self._reader(scope).rewrite(body, chat=scope["path"].endswith(CHAT))
        except Exception as error:  # noqa: BLE001 - whatever is wrong here, the server can answer
            logger.warning("a request with handles is left as it is: %s", error)
            return None

    def _reader(self, scope: ASGIMessage) -> MarkedText:
        """The store of the server's connector, opened once.

        Raises:
            ConfigError: the server's tokenizer is not that of the store.
            StoreError: it cannot be read.
        """
        with self._lock:
            if self._marked is None:
                with ExitStack() as stack:  # what is opened stays open only if all of it is there
                    self._marked = open_marked(scope["app"].state, stack)
                    self._open = stack.pop_all()
            return self._marked


def open_marked(state: Any, stack: ExitStack) -> MarkedText:
    """The reader for a server in this state (`app.state`); `stack` closes what it has open.

    Raises:
        ConfigError: the server's tokenizer or chat template is not that of the store.
        StoreError: the store cannot be read.
    """
    if state.args.chat_template is not None:
        raise ConfigError("the server has a chat template of its own (--chat-template)")
    model = state.vllm_config.model_config
    transfer = state.vllm_config.kv_transfer_config
    config = ServingConfig.parse(transfer.kv_connector_extra_config)
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(model.tokenizer))
    writers = []
    for served in config.scopes:
        texts, close = open_texts(config, served)
        stack.callback(close)
        if texts.tokenizer != tokenizer.digest:
            raise ConfigError(
                f"{model.tokenizer} is not the tokenizer that {served} was built with"
            )
        writers.append(PrefixWriter.over(texts))
    return MarkedText(tokenizer=tokenizer, writers=tuple(writers), window=model.max_model_len)


class _Answer:
    """Where a composed request's answer goes: to the client once it is one, else nowhere (`refused`)."""

    def __init__(self, send: Send, *, chat: bool, n_entries: int) -> None:
        """Nothing has come yet."""
        self._send = _noting(send, f"composed: {n_entries} entries")
        self._chat, self._begun = chat, set[int]()
        self._start: ASGIMessage | None = None
        self._held, self.refused = b"", ""

    async def __call__(self, message: ASGIMessage) -> None:
        """Take what the server says next."""
        if self.refused:
            return
        if message["type"] == "http.response.start":
            self._start = message
            if message["status"] != 200:
                self.refused = f"status {message['status']}"
            return
        self._held += message.get("body", b"")
        more = message.get("more_body", False)
        headers = dict(self._start["headers"]) if self._start else {}
        if headers.get(b"content-type", b"text/event-stream").startswith(b"text/event-stream"):
            *events, rest = self._held.split(b"\n\n")
            out = b"".join(self._event(it) + b"\n\n" for it in events)
            self._held = rest
        elif more:
            return
        else:
            out = self._held
            if self._chat and (said := json.loads(out)):  # null for a client that has left
                out = _json(chat_answer(said))
        if self.refused or (more and not out):
            return
        if self._start is not None:
            await self._send(_with_length(self._start, len(out)))
            self._start = None
        await self._send({"type": "http.response.body", "body": out, "more_body": more})

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: ") or event == b"data: [DONE]":
            return event
        said = json.loads(event.removeprefix(b"data: "))
        failed = any(it.get("finish_reason") == "error" for it in said.get("choices", ()))
        if "error" in said or failed:
            if self._start is not None:  # nothing has been said yet
                self.refused = "the prefix could not be loaded"
            return event
        return b"data: " + _json(chat_event(said, self._begun)) if self._chat else event


async def _read(receive: Receive) -> tuple[bytes, bool]:
    """The body of a request, and whether the client has left in the middle of it."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(parts), True
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts), False


def _replayed(body: bytes, receive: Receive, left: bool = False) -> Receive:
    """A body, then whatever else comes of the client."""
    waiting: list[ASGIMessage] = [{"type": "http.request", "body": body, "more_body": left}]
    if left:
        waiting.append({"type": "http.disconnect"})

    async def next_one() -> ASGIMessage:
        return waiting.pop(0) if waiting else await receive()

    return next_one


def _sent(
    scope: ASGIMessage, body: dict[str, Any], path: str | None = None
) -> tuple[ASGIMessage, bytes]:
    """The request with another body, and perhaps to another end of its path."""
    content = _json(body)
    there = {**scope, "headers": _lengths(scope["headers"], len(content))}
    if path is not None:
        before = scope["path"].removesuffix(TEXT).removesuffix(CHAT)
        there |= {"path": before + path, "raw_path": (before + path).encode()}
    return there, content


def _noting(send: Send, note: str) -> Send:
    """The same, with a header of answers that says what became of the handles."""
    said = (HEADER, note.encode("ascii", "replace")[:200])

    async def noting(message: ASGIMessage) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            message = {**message, "headers": [*message["headers"], said]}
        await send(message)

    return noting


def _with_length(start: ASGIMessage, n: int) -> ASGIMessage:
    return {**start, "headers": _lengths(start["headers"], n)}


def _lengths(headers: Any, n: int) -> list[tuple[bytes, bytes]]:
    """Headers with the length put right, if they tell it."""
    length = b"content-length"
    return [(name, str(n).encode() if name.lower() == length else it) for name, it in headers]


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
