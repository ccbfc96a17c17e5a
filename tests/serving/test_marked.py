"""Requests with handles in their text, and what is sent instead of them."""

from __future__ import annotations

import pytest

from coinrag_integrations.engine import Message, mark
from coinrag_integrations.engine.chat import chat_pieces
from coinrag_integrations.engine.handles import strip_handles
from coinrag_integrations.engine.plan import head_of
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.checking import Incoming, check
from coinrag_integrations.serving.marked import MarkedText, head_of_request
from coinrag_integrations.serving.prepared import prepare
from coinrag_integrations.serving.writing import PrefixWriter
from tests.serving.conftest import QUESTION

WINDOW = 1000


def passage(served, i: int = 1) -> str:
    chunk = served.chunks[i]
    return mark(served.engine.handles.handle(chunk.ref()), chunk.text)


def chat(served, **fields) -> dict:
    user = f"Passages:\n{passage(served)}{passage(served, 2)}\nQuestion: {QUESTION}"
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": user}]
    return {"model": "tiny", "messages": messages, **fields}


def marked(served) -> MarkedText:
    """Of a server that has no model of its own, with the head of `chat` prepared."""
    engine = served.engine
    prepare(engine, [head_of_request(engine.model.tokenizer, engine.handles, chat(served))])
    writers = tuple(map(PrefixWriter.over, served.texts.values()))
    return MarkedText(tokenizer=engine.model.tokenizer, writers=writers, window=WINDOW)


def test_a_conversation_becomes_a_request_for_its_prefix(served):
    body = chat(served, temperature=0, max_completion_tokens=7, stream=True, stop=["\n"])
    rewritten = marked(served).rewrite(body, chat=True)
    sent = dict(rewritten.composed)
    request = Incoming(
        params=sent.pop("kv_transfer_params"),
        prompt=sent.pop("prompt"),
        salt=sent.pop("cache_salt"),
    )
    found = check(request, served.texts)
    assert found.refs == (served.chunks[1].ref(), served.chunks[2].ref())
    assert found.n_entries == rewritten.n_entries
    messages = [Message(**it) for it in body["messages"]]
    engine = served.engine
    pieces = chat_pieces(engine.model.tokenizer, messages, engine.handles.resolve).pieces
    assert request.prompt == list(served.writer.write(pieces).prompt)
    expected = {"model": "tiny", "temperature": 0, "max_tokens": 7, "stream": True, "stop": ["\n"]}
    assert sent == expected


def test_an_answer_may_be_as_long_as_the_window(served):
    sent = marked(served).rewrite(chat(served), chat=True).composed
    assert sent["max_tokens"] == WINDOW - len(sent["prompt"])


def test_a_text_is_gone_on_after(served):
    text = f"{passage(served)} So"
    engine = served.engine
    prepare(engine, [head_of_request(engine.model.tokenizer, engine.handles, {"prompt": text})])
    sent = marked(served).rewrite({"prompt": text, "logprobs": 2}, chat=False).composed
    assert sent["logprobs"] == 2
    assert "max_tokens" not in sent
    assert tuple(sent["prompt"][1:][: len(served.chunks[1])]) == served.chunks[1].token_ids


def test_contents_may_come_in_parts(served):
    body = chat(served)
    text = body["messages"][1]["content"]
    body["messages"][1]["content"] = [{"type": "text", "text": text}]
    assert marked(served).rewrite(body, chat=True).composed


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function", "function": {"name": "look"}}]},
        {"logprobs": True},
        {"messages": None},
        {"messages": "text"},
        {"messages": []},
        {"messages": [7]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "tool", "content": "it", "tool_call_id": "1"}]},
        {"messages": [{"role": "assistant", "content": "it", "tool_calls": [{"id": "1"}]}]},
    ],
    ids=str,
)
def test_what_is_no_plain_conversation_stays_as_it_came(served, change):
    body = {**chat(served), **change}
    rewritten = marked(served).rewrite(body, chat=True)
    assert rewritten.composed is None
    assert rewritten.why
    assert rewritten.words.keys() == body.keys()
    assert "⟦k" not in str(rewritten.words)


def test_handles_that_are_not_believed_are_words(served):
    body = chat(served)
    text = body["messages"][1]["content"].replace("tidal", "brass")
    body["messages"][1]["content"] = text
    rewritten = marked(served).rewrite(body, chat=True)
    assert (rewritten.composed, rewritten.why) == (None, "no handle is believed")
    assert rewritten.words["messages"][1]["content"] == strip_handles(text)
    looks = f"⟦k:{'a' * 24}⟧ and ⟦k9⟧ and ⟦ k ⟧"
    body["messages"][1]["content"] = looks + text
    assert "⟦k9⟧ and ⟦ k ⟧" in str(marked(served).rewrite(body, chat=True).words)


def test_one_that_is_not_believed_does_not_spoil_the_others(served):
    body = chat(served)
    body["messages"][1]["content"] += f" ⟦k:{'a' * 24}⟧forged⟦/k⟧"
    sent = marked(served).rewrite(body, chat=True).composed
    assert len(sent["kv_transfer_params"]["handles"]) == 2
    tokenizer = served.engine.model.tokenizer
    assert "forged" in tokenizer.decode(sent["prompt"])
    assert "aaaa" not in tokenizer.decode(sent["prompt"])


def test_without_a_prepared_beginning_it_is_text(served):
    writers = tuple(map(PrefixWriter.over, served.texts.values()))
    tokenizer = served.engine.model.tokenizer
    reader = MarkedText(tokenizer=tokenizer, writers=writers, window=WINDOW)
    rewritten = reader.rewrite(chat(served), chat=True)
    assert (rewritten.composed, rewritten.why) == (None, "its beginning was not prepared")


def test_the_stores_own_prompt_needs_no_preparing(served):
    template = served.engine.config.prompt
    user = template.user.replace("{context}", passage(served)).replace("{question}", QUESTION)
    messages = [{"role": "system", "content": template.system}, {"role": "user", "content": user}]
    writers = tuple(map(PrefixWriter.over, served.texts.values()))
    tokenizer = served.engine.model.tokenizer
    reader = MarkedText(tokenizer=tokenizer, writers=writers, window=WINDOW)
    sent = reader.rewrite({"messages": messages}, chat=True).composed
    assert sent["prompt"] == list(served.written(served.chunks[1].ref()).prompt)


def test_the_beginning_of_a_request_is_what_stands_before_its_first_passage(served):
    engine, body = served.engine, chat(served)
    messages = [Message(**it) for it in body["messages"]]
    pieces = chat_pieces(engine.model.tokenizer, messages, engine.handles.resolve).pieces
    found = head_of_request(engine.model.tokenizer, engine.handles, body)
    assert found == head_of(pieces)
    with pytest.raises(ConfigError, match="no passage"):
        head_of_request(engine.model.tokenizer, engine.handles, {"prompt": "Who?"})
