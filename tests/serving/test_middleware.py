"""Stock clients' requests through the middleware, to a server whose model is our own engine's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from coinrag_integrations.engine import Engine, GenerationConfig, Message, Text
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.checking import Incoming, check
from coinrag_integrations.serving.marked import head_of_request
from coinrag_integrations.serving.middleware import CoinRAGMiddleware
from coinrag_integrations.serving.prepared import prepare
from tests.serving.test_marked import chat, passage


@dataclass
class Server:
    """An ASGI application that answers as vLLM does: behind a prefix, or with an error."""

    served: Any
    state: Any
    fails: bool = False
    status: int = 200
    requests: list[tuple[str, Any]] = field(default_factory=list)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message["body"], message["more_body"]
        length = dict(scope["headers"])[b"content-length"]
        assert int(length) == len(raw)
        try:
            body = json.loads(raw)
        except ValueError:
            body = raw
        self.requests.append((scope["path"], body))
        status, content = self.answer(scope["path"], body)
        await self.send(send, status, content)

    async def send(self, send, status: int, content: bytes) -> None:
        kind = b"text/event-stream" if content.startswith(b"data: ") else b"application/json"
        headers = [(b"content-type", kind)]
        if kind != b"text/event-stream":
            headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i in range(0, len(content), 11):  # events in pieces that nobody cut to their measure
            part = {"body": content[i : i + 11], "more_body": True}
            await send({"type": "http.response.body", **part})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def answer(self, path: str, body: Any) -> tuple[int, bytes]:
        if path != "/v1/completions" or not isinstance(body, dict):
            return self.status, json.dumps({"as_it_came": True}).encode()
        stream = body.get("stream")
        try:
            pieces = self.pieces(body)
        except ConfigError as error:
            said = {"error": {"message": str(error)}}
            return (200, _events([said])) if stream else (500, json.dumps(said).encode())
        text = self.generated(pieces, body["max_tokens"])
        choice = {"index": 0, "logprobs": None, "stop_reason": None}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 5}
        whole = {"id": "cmpl-1", "object": "text_completion", "model": body["model"]}
        if not stream:
            choices = [{**choice, "text": text, "finish_reason": "length"}]
            return 200, json.dumps({**whole, "choices": choices, "usage": usage}).encode()
        texts = [*text, ""]
        events = [{**whole, "choices": [{**choice, "text": it}]} for it in texts]
        events[-1]["choices"][0]["finish_reason"] = "length"
        return 200, _events([*events, {**whole, "choices": [], "usage": usage}])

    def pieces(self, body: dict[str, Any]) -> list[Any]:
        params, salt = body.get("kv_transfer_params"), body.get("cache_salt")
        found = check(Incoming(params=params, prompt=body["prompt"], salt=salt), self.served.texts)
        if self.fails or found is None:
            raise ConfigError("the file is gone")
        rest = tuple(body["prompt"][found.n_entries :])
        return [Text(found.head), *found.refs, Text(rest)]

    def generated(self, pieces: list[Any], n: int) -> str:
        stream = self.served.engine.stream_pieces(pieces, GenerationConfig(max_new_tokens=n))
        return "".join(stream)


def _events(events: list[dict[str, Any]]) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


@dataclass
class Place:
    server: Server
    client: httpx.AsyncClient
    engine: Engine

    async def ask(self, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
        if isinstance(body, bytes):
            return await self.client.post(path, content=body)
        return await self.client.post(path, json=body)

    def own(self, body: dict[str, Any]) -> str:
        messages = [Message(**it) for it in body["messages"]]
        stream = self.engine.chat(messages, GenerationConfig(max_new_tokens=body["max_tokens"]))
        return "".join(stream)


@pytest.fixture
async def place(served, tmp_path) -> AsyncIterator[Place]:
    engine = served.engine
    engine.model.tokenizer.hf.save_pretrained(tmp_path / "model")
    prepare(engine, [head_of_request(engine.model.tokenizer, engine.handles, chat(served))])
    config = SimpleNamespace(
        model_config=SimpleNamespace(tokenizer=str(tmp_path / "model"), max_model_len=1000),
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"store": str(engine.disk.root)}
        ),
    )
    state = SimpleNamespace(vllm_config=config, args=SimpleNamespace(chat_template=None))
    server = Server(served, state)
    middleware = CoinRAGMiddleware(server)

    async def app(scope, receive, send) -> None:
        await middleware({**scope, "app": server}, receive, send)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield Place(server, client, engine)
    await app({"type": "lifespan"}, None, None)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_conversation_is_answered_behind_its_prefix(place, served):
    body = chat(served, max_tokens=5)
    response = await place.ask(body)
    said = response.json()
    assert said["choices"][0]["message"] == {"role": "assistant", "content": place.own(body)}
    assert said["choices"][0]["finish_reason"] == "length"
    assert (said["object"], said["id"]) == ("chat.completion", "chatcmpl-1")
    assert said["usage"]["completion_tokens"] == 5
    assert response.headers["x-coinrag"].startswith("composed: ")
    ((path, sent),) = place.server.requests
    assert path == "/v1/completions"
    assert len(sent["kv_transfer_params"]["handles"]) == 2


async def test_a_stream_of_it_is_one_of_chunks(place, served):
    body = chat(served, max_tokens=5, stream=True, stream_options={"include_usage": True})
    events = events_of(await place.ask(body))
    choices = [it["choices"][0] for it in events if it["choices"]]
    assert [it["delta"].get("role") for it in choices] == ["assistant"] + [None] * (
        len(choices) - 1
    )
    assert "".join(it["delta"]["content"] for it in choices) == place.own(body)
    assert choices[-1]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert {it["object"] for it in events} == {"chat.completion.chunk"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_is_answered_as_a_text(place, served, stream):
    engine, text = place.engine, f"{passage(served)} So"
    prepare(engine, [head_of_request(engine.model.tokenizer, engine.handles, {"prompt": text})])
    body = {"model": "tiny", "prompt": text, "max_tokens": 5, "stream": stream}
    response = await place.ask(body, "/v1/completions")
    answers = events_of(response) if stream else [response.json()]
    said = "".join(choice["text"] for it in answers for choice in it["choices"])
    assert said == "".join(engine.complete(text, GenerationConfig(max_new_tokens=5)))
    assert {it["object"] for it in answers} == {"text_completion"}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_loaded_goes_on_as_it_came_once(place, served, stream):
    place.server.fails = True
    response = await place.ask(chat(served, max_tokens=5, stream=stream))
    assert response.json() == {"as_it_came": True}
    assert response.headers["x-coinrag"].startswith("text: ")
    (first, _), (second, words) = place.server.requests
    assert (first, second) == ("/v1/completions", "/v1/chat/completions")
    assert served.chunks[1].text in words["messages"][1]["content"]
    assert "⟦k" not in str(words)


async def test_errors_say_nothing_of_handles(place, served):
    place.server.fails, place.server.status = True, 401
    response = await place.ask(chat(served, max_tokens=5))
    assert (response.status_code, response.json()) == (401, {"as_it_came": True})
    assert "x-coinrag" not in response.headers


async def test_a_client_that_leaves_while_it_asks_is_left(place, served):
    sent = [{"type": "http.request", "body": passage(served).encode(), "more_body": True}]
    sent.append({"type": "http.disconnect"})
    seen = []

    async def receive() -> dict[str, Any]:
        return sent.pop(0)

    async def inner(scope, receive, send) -> None:
        seen.extend([await receive(), await receive()])

    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    await CoinRAGMiddleware(inner)(scope, receive, None)
    assert [it["type"] for it in seen] == ["http.request", "http.disconnect"]


async def test_what_has_no_handles_passes_untouched(place, served):
    bodies: list[Any] = [
        {"messages": [{"role": "user", "content": "Who?"}]},
        {**chat(served), "cache_salt": "mine"},
        {**chat(served), "kv_transfer_params": {"path": "/etc/passwd"}},
        [chat(served)],
        b"{half " + passage(served).encode(),
        b"\xff\xfe" + passage(served).encode(),
        b"",
    ]
    for body in bodies:
        response = await place.ask(body)
        assert response.json() == {"as_it_came": True}
        assert "x-coinrag" not in response.headers
        path, sent = place.server.requests[-1]
        assert (path, sent) == ("/v1/chat/completions", body)
    assert (await place.ask(chat(served), "/v1/embeddings")).json() == {"as_it_came": True}


async def test_forged_handles_are_words(place, served):
    body = chat(served, max_tokens=5)
    content = body["messages"][1]["content"]
    body["messages"][1]["content"] = content.replace("tidal", "brass")
    response = await place.ask(body)
    assert response.headers["x-coinrag"] == "text: no handle is believed"
    ((path, sent),) = place.server.requests
    assert path == "/v1/chat/completions"
    assert "⟦k" not in str(sent)


@pytest.mark.parametrize("wrong", ["store", "template", "tokenizer"])
async def test_a_server_that_is_set_up_wrongly_answers_all_the_same(place, served, wrong, tmp_path):
    state = place.server.state
    if wrong == "store":
        state.vllm_config.kv_transfer_config = None
    elif wrong == "template":
        state.args.chat_template = "{{ messages }}"
    else:
        tokenizer = place.engine.model.tokenizer.hf
        tokenizer.add_tokens(["another"])
        tokenizer.save_pretrained(tmp_path / "model")
    assert (await place.ask(chat(served))).json() == {"as_it_came": True}
    assert place.server.requests[-1][1] == chat(served)
