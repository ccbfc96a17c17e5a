"""The load test's own arithmetic, against a server that says what it is told to."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.serving_load import Question, _measure, _percentile
from coinrag_integrations.engine import GenerationConfig, Text
from coinrag_integrations.serving import ServedModel
from coinrag_integrations.types import Span

OPTIONS = argparse.Namespace(clients=[1, 4])


class Handler(BaseHTTPRequestHandler):
    """Answers composed prompts with "own", plain ones with "text", and after a while wrongly."""

    composed, n_resets = 0, 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        if self.path == "/reset_prefix_cache":
            Handler.n_resets += 1
            self._send("{}")
            return
        text = "text"
        if "kv_transfer_params" in body:
            Handler.composed += 1
            text = "own" if Handler.composed != 7 else "another"
        events = [
            {"choices": [{"text": text, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 1}},
        ]
        self._send("".join(f"data: {json.dumps(event)}\n\n" for event in events))

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_answered_is_counted(served, address):
    head, tail = Text(served.engine.prompt.head), Text(served.engine.prompt.tail("Who?"))
    text = Text(served.chunks[0].token_ids)
    questions = [
        Question(
            roads={
                "plain": [head, text, tail],
                "composed": [head, served.chunks[i].ref(Span(0, 5)), tail],
            },
            own="own" if i else "something else",
        )
        for i in range(5)
    ]
    with ServedModel.of(served.engine, address) as model:
        result = _measure(model, address, questions, OPTIONS, GenerationConfig(max_new_tokens=4))
    assert result["clients"].keys() == {"1", "4"}
    for row in result["clients"].values():
        for road in ("plain", "composed"):
            assert row[road]["rps"] > 0
            assert 0 < row[road]["ttft_p50_ms"] <= row[road]["ttft_p99_ms"]
    assert Handler.n_resets == 4
    del result["clients"]
    assert result == {"equal_answers": 4, "answers": 5, "wrong": 1, "text": 0, "hung": 0}
    json.dumps(result)


def test_percentiles_are_those_of_what_was_measured():
    times = [float(i) for i in range(1, 11)]
    assert (_percentile(times, 50), _percentile(times, 99), _percentile([3.0], 50)) == (5, 10, 3)
