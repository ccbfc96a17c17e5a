"""What a server is asked, and what is made of its answers: over a transport that is no network."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import httpx
import pytest

from coinrag_integrations.engine import GenerationConfig, Message, Text, mark
from coinrag_integrations.engine.chat import chat_pieces
from coinrag_integrations.errors import ConfigError, ServingError
from coinrag_integrations.serving import ServedModel
from coinrag_integrations.serving.checking import Incoming, check
from coinrag_integrations.serving.writing import PrefixWriter
from coinrag_integrations.types import ChunkId, Span, SpanRef
from tests.serving.conftest import QUESTION

USAGE = {"usage": {"prompt_tokens": 9, "completion_tokens": 3}, "choices": []}


def said(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"text": text, "finish_reason": finish}]}


ANSWER = [said(" Bas"), said("tien"), said("", None), said(" Roule \n", "stop"), USAGE]
BROKEN = [{"error": {"message": "Internal server error", "code": 500}}]


class Server:
    """Answers each request with the next of some lists of events, or with a status."""

    def __init__(self, *answers) -> None:
        self.answers, self.bodies, self.headers = list(answers), [], []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        assert request.url.path == "/v1/completions"
        self.bodies.append(json.loads(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return httpx.Response(answer, json={"error": {"message": "Internal server error"}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in answer]
        return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


def asked(served, *answers, **options):
    server = Server(*answers)
    transport = httpx.MockTransport(server)
    model = ServedModel.of(served.engine, "http://here:8000/v1", transport=transport, **options)
    return model, server


def refs(served) -> list[SpanRef]:
    return [served.chunks[0].ref(Span(2, 9)), served.chunks[1].ref()]


def test_a_server_is_asked_behind_a_prefix(served):
    model, server = asked(served, ANSWER)
    stream = model.stream(
        QUESTION, refs(served), GenerationConfig(max_new_tokens=7, stop=("\n\n",))
    )
    assert list(stream) == ["Bas", "tien", " Roule"]
    (body,) = server.bodies
    written = served.written(*refs(served))
    assert body["prompt"] == list(written.prompt)
    assert (body["kv_transfer_params"], body["cache_salt"]) == (written.params, written.salt)
    assert check(served.incoming(*refs(served)), served.texts).refs == tuple(refs(served))
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("tiny", 7, 0.0)
    assert body["stop"] == ["\n\n"]
    assert set(body["stop_token_ids"]) == served.engine.model.stop_ids
    assert "seed" not in body


def test_the_answer_says_how_it_came_about(served):
    model, _ = asked(served, ANSWER)
    stream = model.stream(QUESTION, refs(served))
    for _ in stream:
        pass
    answer, n = stream.answer, served.written(*refs(served)).n_entries
    assert (answer.text, answer.finish_reason) == ("Bastien Roule", "stop")
    assert (answer.spans, answer.recomputed) == (tuple(refs(served)), ())
    tail = len(served.engine.prompt.tail(QUESTION))
    assert (answer.usage.cached, answer.usage.online, answer.usage.generated) == (n, tail, 3)
    assert answer.timings.ttft_ms > 0
    assert stream.fallback == ""


@pytest.mark.parametrize(
    "failure",
    [500, 400, 404, BROKEN, [said("", "error")]],
    ids=["500", "400", "404", "event", "end"],
)
def test_what_cannot_be_loaded_is_computed_as_text(served, failure, caplog):
    model, server = asked(served, failure, ANSWER)
    with caplog.at_level(logging.WARNING):
        stream = model.stream(QUESTION, refs(served))
        assert "".join(stream) == "Bastien Roule"
    assert "computed as text" in caplog.text
    first, second = server.bodies
    assert "kv_transfer_params" in first
    assert not {"kv_transfer_params", "cache_salt"} & second.keys()
    assert second["prompt"] == list(served.written(*refs(served)).text)
    assert stream.fallback
    assert stream.answer.recomputed == tuple(refs(served))
    assert stream.answer.usage.cached == 0


def test_spans_of_the_turn_before_come_first(served):
    a, b, c, d = (chunk.ref() for chunk in served.chunks[:4])
    part = served.chunks[1].ref(Span(0, 9))
    for context, earlier, order in (
        ([d, b, a], (a, b, c), (a, b, d)),
        ([d, b, a], (), (d, b, a)),
        ([d, part, a], (a, b, c), (a, d, part)),
        ([d, a, "words", b], (a, b, c), (a, d)),
    ):
        model, _ = asked(served, ANSWER)
        stream = model.stream(QUESTION, context, earlier=earlier)
        assert stream.body_of_prefix()["kv_transfer_params"]["handles"] == [
            served.engine.handles.name(ref) for ref in order
        ]


def test_the_text_of_slots_is_all_of_their_tokens(slotted):
    served, chunk = slotted, slotted.chunks[0]
    model, server = asked(served, 500, ANSWER)
    for _ in model.stream(QUESTION, [SpanRef(chunk.chunk_id, 0, len(chunk), 4)]):
        pass
    slots, text = (body["prompt"] for body in server.bodies)
    head = served.engine.prompt.head
    assert len(slots) == len(head) + 8 + len(served.engine.prompt.tail(QUESTION))
    assert tuple(text) == (*head, *chunk.token_ids, *served.engine.prompt.tail(QUESTION))


def test_a_server_that_refuses_the_text_too_is_an_error(served):
    model, server = asked(served, 500, 503)
    with pytest.raises(ServingError, match="refuses: 503"):
        list(model.stream(QUESTION, refs(served)))
    assert len(server.bodies) == 2


def test_an_answer_that_breaks_off_is_not_begun_again(served):
    model, server = asked(served, [said(" Bas"), *BROKEN])
    stream = model.stream(QUESTION, refs(served))
    assert next(stream) == "Bas"
    with pytest.raises(ServingError, match="broke off"):
        next(stream)
    assert stream.answer.text == "Bas"
    assert len(server.bodies) == 1


@pytest.mark.parametrize("last", [[], [said("", "abort")], [USAGE]], ids=["none", "abort", "usage"])
def test_an_answer_without_an_end_is_none(served, last):
    model, server = asked(served, [said(" Bas"), *last])
    with pytest.raises(ServingError, match="broke off"):
        list(model.stream(QUESTION, refs(served)))
    assert len(server.bodies) == 1


def test_a_server_that_is_not_there_is_an_error(served):
    model = ServedModel.of(served.engine, "http://127.0.0.1:9")
    with pytest.raises(ServingError, match=r"127.0.0.1:9.* is it a vLLM server"):
        model.stream(QUESTION, refs(served))
    model = ServedModel.of(served.engine, "http://127.0.0.1:9", model="tiny")
    with model, pytest.raises(ServingError, match="cannot be reached"):
        list(model.stream(QUESTION, refs(served)))


def test_what_is_no_server_is_an_error(served):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text="data: {half\n\n"))
    model = ServedModel.of(served.engine, "http://here", transport=transport)
    with pytest.raises(ServingError, match="which model"):
        model.stream(QUESTION, refs(served))
    model = ServedModel.of(served.engine, "http://here", transport=transport, model="x")
    with pytest.raises(ServingError, match="cannot be reached"):
        list(model.stream(QUESTION, refs(served)))


def test_without_spans_the_text_is_sent_once(served):
    model, server = asked(served, ANSWER)
    stream = model.stream(QUESTION, ["Somebody built it."])
    assert "".join(stream) == "Bastien Roule"
    assert not {"kv_transfer_params", "cache_salt"} & server.bodies[0].keys()
    assert (stream.fallback, stream.answer.usage.cached) == ("not sent", 0)


def test_spans_behind_later_text_are_written_as_text(served):
    prompt, chunk = served.engine.prompt, served.chunks[1]
    first, second = served.chunks[0].ref(), chunk.ref()
    between = Text((7, 8))
    pieces = [Text(prompt.head), first, between, second, Text(prompt.tail(QUESTION))]
    written = served.writer.write(pieces)
    assert written.refs == (first,)
    assert written.n_entries == len(prompt.head) + len(first)
    assert written.prompt[written.n_entries :][:2] == (7, 8)
    assert written.prompt[written.n_entries + 2 :][: len(second)] == chunk.token_ids


def test_other_heads_are_prepared_until_there_are_many(served):
    ref = served.chunks[0].ref()
    writer = PrefixWriter.of(served.engine, max_heads=3)
    for first in (1, 2, 1):
        written = writer.write([Text((first, 2, 3)), ref, Text((4,))])
        assert written.n_entries == 3 + len(ref)
        request = Incoming(params=written.params, prompt=written.prompt, salt=written.salt)
        assert check(request, served.texts).head == (first, 2, 3)
    written = writer.write([Text((3, 2, 3)), ref, Text((4,))])
    assert (written.params, written.salt, written.n_entries) == (None, None, 0)
    assert written.prompt == written.text == (3, 2, 3, *served.chunks[0].token_ids, 4)
    assert writer.write([ref, Text((4,))]).n_entries == len(ref)
    assert (
        PrefixWriter.of(served.engine, max_heads=3).write([Text((1, 2, 3)), ref, Text((4,))]).params
    )


def test_conversations_with_handles_are_what_the_engine_reads(served):
    engine, chunk = served.engine, served.chunks[1]
    words = mark(engine.handles.handle(chunk.ref()), chunk.text)
    messages = [
        Message(role="system", content="Answer from the passage."),
        Message(role="user", content=f"Passage: {words}\nWho built it?"),
    ]
    model, server = asked(served, ANSWER, ANSWER, ANSWER)
    stream = model.chat(messages)
    assert "".join(stream) == "Bastien Roule"
    assert (stream.answer.spans, stream.fallback) == ((chunk.ref(),), "")
    pieces = chat_pieces(engine.model.tokenizer, messages, engine.handles.resolve).pieces
    assert server.bodies[0]["prompt"] == list(served.writer.write(pieces).prompt)
    plain = model.chat(messages, use_kv=False)
    assert "".join(plain) == "Bastien Roule"
    assert plain.answer.spans == ()
    forged = [replace(messages[1], content=messages[1].content.replace("organ", "orgel"))]
    refused = model.chat(forged)
    for _ in refused:
        pass
    assert refused.answer.refused == {"altered": 1}


def test_texts_with_handles_at_their_end_are_gone_on_after(served):
    chunk = served.chunks[1]
    words = mark(served.engine.handles.handle(chunk.ref()), chunk.text)
    model, server = asked(served, ANSWER, ANSWER)
    for text, n in ((f"Read: {words} So", 1), (f"Read: {words}", 0)):
        stream = model.complete(text)
        for _ in stream:
            pass
        assert len(stream.answer.spans) == n
    assert "kv_transfer_params" in server.bodies[0]
    assert tuple(server.bodies[1]["prompt"][-len(chunk) :]) == chunk.token_ids


@pytest.mark.parametrize("pieces", [[], [Text((1,)), Text(())]])
def test_something_must_stand_behind_the_spans(served, pieces):
    with pytest.raises(ConfigError, match="must be text"):
        served.writer.write(pieces)
    with pytest.raises(ConfigError, match="must be text"):
        served.writer.write([*pieces, served.chunks[0].ref()])


def test_spans_of_no_document_are_an_error(served):
    with pytest.raises(KeyError):
        served.writer.write([SpanRef(ChunkId("0" * 32), 0, 4), Text((1,))])


def test_keys_and_seeds_are_sent(served):
    model, server = asked(served, ANSWER, api_key="secret")
    for _ in model.stream(QUESTION, refs(served), GenerationConfig(seed=3, temperature=0.5)):
        pass
    assert server.headers[-1]["authorization"] == "Bearer secret"
    assert (server.bodies[0]["seed"], server.bodies[0]["temperature"]) == (3, 0.5)


def test_leaving_early_closes_the_connection(served):
    model, _ = asked(served, ANSWER)
    stream = model.stream(QUESTION, refs(served))
    next(stream)
    stream.close()
    assert list(stream) == []
