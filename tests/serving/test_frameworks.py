"""Both frameworks' models, where a server answers: over loopback, from a server that is our own engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from coinrag_integrations.engine import Engine, GenerationConfig, Text
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.checking import Incoming, check
from coinrag_integrations.serving.config import ServingConfig
from coinrag_integrations.serving.loading import open_texts
from coinrag_integrations.types import Document

langchain = pytest.importorskip("coinrag_integrations.langchain")
llamaindex = pytest.importorskip("coinrag_integrations.llamaindex")

QUESTION = "Who built the tidal organ?"


@dataclass
class Server:
    """Answers as vLLM would: behind the prefix, if the request may have it, else with an error."""

    engine: Engine
    refuses: bool = False
    composed: list[int] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)

    def pieces(self, body: dict[str, Any]) -> list[Any]:
        prompt = body["prompt"]
        if "kv_transfer_params" not in body:
            self.composed.append(0)
            self.prompt = prompt
            return [Text(tuple(prompt))]
        config = ServingConfig.parse({"store": str(self.engine.disk.root)})
        texts, close = open_texts(config, self.engine.scope)
        asked = Incoming(
            params=body["kv_transfer_params"], prompt=prompt, salt=body.get("cache_salt")
        )
        try:
            found = check(asked, {self.engine.scope: texts})
        finally:
            close()
        if found is None or self.refuses:
            raise ConfigError("refused")
        self.composed.append(len(found.refs))
        return [Text(found.head), *found.refs, Text(tuple(prompt[found.n_entries :]))]

    def answer(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        generation = GenerationConfig(max_new_tokens=body["max_tokens"])
        stream = self.engine.stream_pieces(self.pieces(body), generation)
        for piece in stream:
            yield {"choices": [{"text": piece, "finish_reason": None}]}
        said = stream.answer
        yield {"choices": [{"text": "", "finish_reason": said.finish_reason}]}
        yield {"choices": [], "usage": {"completion_tokens": said.usage.generated}}


@pytest.fixture
def server(rag) -> Iterator[tuple[Server, str]]:
    rag.add([Document(document_id="a", text="The tidal organ was built by Roule. " * 5)])
    it = Server(rag.engine)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send(200, json.dumps({"data": [{"id": "tiny"}]}))

        def do_POST(self) -> None:
            it.keys.append(self.headers.get("Authorization"))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                events = [f"data: {json.dumps(event)}\n\n" for event in it.answer(body)]
            except ConfigError as error:
                self.send(500, str(error))
                return
            self.send(200, "".join([*events, "data: [DONE]\n\n"]))

        def send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield it, f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()


def marked(rag) -> str:
    """The found passages with their handles, as a prompt would hold them, and the question."""
    documents = langchain.CoinRAGRetriever(rag=rag, k=3).invoke(QUESTION)
    return "\n".join(document.page_content for document in documents) + f"\n{QUESTION}"


def test_langchains_chat_model_answers_from_a_server_as_from_the_engine(rag, server):
    it, url = server
    here = langchain.ChatCoinRAG(rag=rag, max_tokens=5)
    there = langchain.ChatCoinRAG(rag=rag, max_tokens=5, base_url=url, api_key="secret")
    prompt = marked(rag)
    ours, theirs = here.invoke(prompt), there.invoke(prompt)
    assert theirs.content == ours.content
    assert it.composed[-1] > 0
    assert it.keys == ["Bearer secret"]
    assert theirs.usage_metadata == ours.usage_metadata
    assert "".join(chunk.content for chunk in there.stream(prompt)) == ours.content
    assert there._identifying_params != here._identifying_params
    assert "secret" not in repr(there) + str(there.model_dump())
    assert len(it.composed) == 2


async def test_it_answers_off_the_loop(rag, server):
    _, url = server
    prompt = marked(rag)
    here = langchain.ChatCoinRAG(rag=rag, max_tokens=5)
    there = langchain.ChatCoinRAG(rag=rag, max_tokens=5, base_url=url)
    assert (await there.ainvoke(prompt)).content == here.invoke(prompt).content


def test_langchains_llm_answers_from_a_server(rag, server):
    it, url = server
    here, there = (
        langchain.CoinRAGLLM(rag=rag, max_tokens=5, base_url=base) for base in (None, url)
    )
    prompt = marked(rag)
    assert there.invoke(prompt) == here.invoke(prompt)
    assert it.composed


def test_llamaindexs_llm_answers_from_a_server(rag, server):
    it, url = server
    here = llamaindex.CoinRAGLLM.from_defaults(rag, max_tokens=5)
    there = llamaindex.CoinRAGLLM.from_defaults(rag, max_tokens=5, base_url=url, api_key="secret")
    prompt = marked(rag)
    assert there.complete(prompt).text == here.complete(prompt).text
    assert it.composed[-1] > 0
    pieces = [part.delta for part in there.stream_complete(prompt)]
    assert "".join(pieces).strip() == here.complete(prompt).text
    assert "secret" not in str(there.to_dict())
    again = llamaindex.CoinRAGLLM.from_dict(there.to_dict(), rag=rag)
    assert again.base_url == url
    assert again.complete(prompt).text == here.complete(prompt).text


def test_what_a_server_refuses_is_answered_from_the_text(rag, server):
    it, url = server
    it.refuses = True
    prompt = marked(rag)
    there = langchain.ChatCoinRAG(rag=rag, max_tokens=5, base_url=url)
    reply = there.invoke(prompt)
    assert it.composed == [0]
    words = rag.engine.model.tokenizer.hf.decode(it.prompt)
    assert "built by Roule" in words
    assert words.count(QUESTION) == 1
    assert "⟦k" not in words
    assert reply.content
    assert reply.usage_metadata["input_token_details"]["cache_read"] == 0
