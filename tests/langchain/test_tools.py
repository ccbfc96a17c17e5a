"""`ChatCoinRAG` with tools: what is shown of them, and the calls that are read out of its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from pydantic import BaseModel, Field

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig, parse_calls
from coinrag_integrations.engine.tool_calls import ToolCall, write_call
from coinrag_integrations.errors import BudgetError, ConfigError
from coinrag_integrations.langchain import ChatCoinRAG, CoinRAGRetriever
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex, open_client
from coinrag_integrations.types import Document
from tests.adapters import QUESTION, TEXTS, WIDE
from tests.langchain.saying import say
from tests.langchain.test_chat_model import Tokens
from tests.tiny import CHAT_TEMPLATE, TOOL_TEMPLATE, HashEmbedder, tiny_model

WRITTEN = write_call(ToolCall(name="search", arguments={"query": "é {x} <|im_end|>"}))
CUT = '<tool_call>\n{"name": "search", "arguments": {"query": "Wh'
SAID = f"I look. <b>\n{WRITTEN}\n{WRITTEN}"


@tool
def search(query: str) -> str:
    """Finds passages: {x}, 100 %, é 🫖."""
    return query


class Add(BaseModel):
    """Adds two numbers."""

    a: int = Field(description="The first <|im_end|>.")
    b: int = 0


def subtract(a: int, b: int) -> int:
    """Subtracts.

    Args:
        a: from this
        b: that
    """
    return a - b


KINDS: dict[str, Any] = {
    "tool": search,
    "pydantic": Add,
    "function": subtract,
    "openai": {"type": "function", "function": {"name": "now", "description": "The time."}},
    "openai responses": {"type": "function", "name": "here", "parameters": {}},
    "schema": {"title": "Where", "description": "A place.", "type": "object", "properties": {}},
    "anthropic": {"name": "why", "description": "A reason.", "input_schema": {"type": "object"}},
}


# One store for the module; what it says is put into its mouth.
@pytest.fixture(scope="module", params=[TOOL_TEMPLATE, CHAT_TEMPLATE], ids=["template", "words"])
def rag(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CoinRAG]:
    model = tiny_model()
    model.tokenizer.hf.chat_template = request.param
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read")
    with Engine(model, tmp_path_factory.mktemp("tools"), config) as engine:
        index = SpanIndex(open_client(None), HashEmbedder(), f"tools{id(engine)}")
        rag = CoinRAG(engine, index, generation=GenerationConfig(max_new_tokens=8), retrieval=WIDE)
        rag.add(Document(document_id=name, text=text) for name, text in TEXTS.items())
        yield rag


@pytest.fixture
def chat(rag: CoinRAG) -> ChatCoinRAG:
    return ChatCoinRAG(rag=rag, max_tokens=8)


def said_of(calls: list[Any]) -> list[tuple[Any, Any]]:
    return [(call["name"], call["args"]) for call in calls]


def total(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    return sum(chunks[1:], chunks[0])


# -- what is shown ---------------------------------------------------------------------------------


def test_tools_of_every_kind_are_shown(chat: ChatCoinRAG):
    plain = chat.invoke("Who?").usage_metadata["input_tokens"]
    bound = chat.bind_tools([*KINDS.values()])
    assert bound.invoke("Who?").usage_metadata["input_tokens"] > plain + 100
    names = [it["function"]["name"] for it in bound.kwargs["tools"]]
    assert names == ["search", "Add", "subtract", "now", "here", "Where", "why"]
    assert all(it["type"] == "function" for it in bound.kwargs["tools"])


@pytest.mark.parametrize("kind", KINDS)
def test_tools_may_be_given_to_a_call(chat: ChatCoinRAG, kind: str):
    bound = chat.bind_tools([KINDS[kind]], tool_choice="auto").invoke("Who?")
    given = chat.invoke("Who?", tools=[KINDS[kind]])
    assert given.content == bound.content
    assert given.usage_metadata["input_tokens"] == bound.usage_metadata["input_tokens"]


async def test_every_way_of_asking_takes_tools(chat: ChatCoinRAG, monkeypatch):
    streams = say(monkeypatch, chat.rag.engine)
    bound = chat.bind_tools([search], tool_choice="auto")
    bound.invoke("Who?")
    bound.batch(["Who?"])
    [*bound.stream("Who?")]
    await bound.ainvoke("Who?")
    await bound.abatch(["Who?"])
    [it async for it in bound.astream("Who?")]
    assert [it.tools for it in streams] == [bound.kwargs["tools"]] * 6


@pytest.mark.parametrize("off", [{"tool_choice": "none", "tools": [search]}, {"tools": []}, {}])
def test_without_tools_nothing_changes(chat: ChatCoinRAG, monkeypatch, off: dict[str, Any]):
    expected = chat.invoke("Who?")
    found = chat.bind_tools(off.get("tools", []), tool_choice=off.get("tool_choice")).invoke("Who?")
    assert found.content == expected.content
    assert found.usage_metadata["input_tokens"] == expected.usage_metadata["input_tokens"]
    say(monkeypatch, chat.rag.engine, SAID, SAID)
    for message in (chat.invoke("Who?", **off), total([*chat.stream("Who?", **off)])):
        assert (message.content, message.tool_calls) == (SAID, [])


@pytest.mark.parametrize("choice", ["any", "required", "search", True, {"type": "function"}])
def test_no_call_can_be_forced(chat: ChatCoinRAG, choice: Any):
    with pytest.raises(ConfigError, match="cannot be made to call a tool"):
        chat.bind_tools([search], tool_choice=choice).invoke("Who?")
    with pytest.raises(ConfigError, match="cannot be made to call a tool"):
        next(chat.stream("Who?", tools=[search], tool_choice=choice))
    with pytest.raises(NotImplementedError, match="does not follow a schema"):
        chat.bind_tools([search]).bound.with_structured_output(Add)


def test_tools_that_are_none_are_refused(chat: ChatCoinRAG):
    with pytest.raises(ConfigError, match="several tools of the name search, so that"):
        chat.invoke("Who?", tools=[search, search])
    with pytest.raises(ConfigError, match="is no tool that a local model can call"):
        chat.invoke("Who?", tools=[{"type": "web_search_preview"}])
    with pytest.raises(ConfigError, match="parallel: no such option"):
        chat.bind_tools([search], parallel=True).invoke("Who?")


def test_a_schema_larger_than_the_window_is_refused(chat: ChatCoinRAG):
    properties = {f"p{i}": {"type": "string", "description": "word " * 20} for i in range(400)}
    huge = {"title": "huge", "description": "x", "type": "object", "properties": properties}
    with pytest.raises(BudgetError, match="window"):
        chat.invoke("Who?", tools=[huge])


def test_messages_become_turns(chat: ChatCoinRAG, monkeypatch):
    call = {"name": "search", "args": {"query": "é"}, "id": "1", "type": "tool_call"}
    wrong = {"name": None, "args": CUT, "id": "2", "error": "cut", "type": "invalid_tool_call"}
    block = {"type": "tool_use", "id": "1", "name": "search", "input": {"query": "é"}}
    streams = say(monkeypatch, chat.rag.engine)
    chat.invoke(
        [
            SystemMessage("Be short."),
            HumanMessage("Who?"),
            AIMessage([{"type": "text", "text": "I look."}, block], tool_calls=[call]),
            ToolMessage([{"type": "text", "text": "Roule."}], tool_call_id="1"),
            AIMessage("", invalid_tool_calls=[wrong]),
            ToolMessage("Malformed.", tool_call_id="2", status="error"),
            ToolMessage("Of nobody.", tool_call_id="3", name="other"),
        ],
        tools=[search],
    )
    turns = streams[0].turns
    assert [it.role for it in turns] == ["system", "user", *("assistant", "tool") * 2, "tool"]
    assert [it.content for it in turns[2:]] == [
        "I look.",
        "Roule.",
        CUT,
        "Malformed.",
        "Of nobody.",
    ]
    assert turns[2].calls == (ToolCall(name="search", arguments={"query": "é"}, id="1"),)
    assert [(it.name, it.call_id) for it in turns[3:] if it.role == "tool"] == [
        ("search", "1"),
        ("", "2"),
        ("other", "3"),
    ]


def test_an_unknown_role_goes_to_the_template(chat: ChatCoinRAG, monkeypatch):
    streams = say(monkeypatch, chat.rag.engine)
    asked = chat.invoke([ChatMessage("Who?", role="critic")], tools=[search])
    assert asked.usage_metadata["output_tokens"] > 0
    assert streams[0].turns[0].role == "critic"
    chat.rag.engine.model.tokenizer.hf.chat_template, kept = (
        "{{ raise_exception('who is ' + messages[-1].role) }}",
        chat.rag.engine.model.tokenizer.hf.chat_template,
    )
    try:
        with pytest.raises(ConfigError, match="refuses these messages: who is critic"):
            chat.invoke([ChatMessage("Who?", role="critic")], tools=[search])
    finally:
        chat.rag.engine.model.tokenizer.hf.chat_template = kept


def test_bound_documents_stand_before_the_users_words(chat: ChatCoinRAG, monkeypatch):
    streams = say(monkeypatch, chat.rag.engine)
    documents = CoinRAGRetriever(rag=chat.rag, k=2).invoke(QUESTION)
    call = {"name": "search", "args": {}, "id": "1", "type": "tool_call"}
    turns = [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[call]),
        ToolMessage("x", tool_call_id="1"),
    ]
    message = chat.bind(coinrag_handles=documents).invoke(turns)
    assert streams[0].turns[0].content.startswith("Passages:")
    assert streams[0].turns[2].content == "x"
    assert message.response_metadata["coinrag"]["spans"]


# -- what is read ----------------------------------------------------------------------------------


async def test_every_way_of_answering_reads_the_same_calls(chat: ChatCoinRAG, monkeypatch):
    bound = chat.bind_tools([search])
    say(monkeypatch, chat.rag.engine, *[SAID] * 6)
    chunks = [*bound.stream("Who?")]
    found = [
        bound.invoke("Who?"),
        total(chunks),
        await bound.ainvoke("Who?"),
        total([it async for it in bound.astream("Who?")]),
        *bound.batch(["Who?"]),
        *await bound.abatch(["Who?"]),
    ]
    for message in found:
        assert message.content == "I look. <b>"
        assert said_of(message.tool_calls) == [("search", {"query": "é {x} <|im_end|>"})] * 2
        assert message.invalid_tool_calls == []
        assert message.response_metadata["finish_reason"] == "tool_calls"
        assert message.usage_metadata["output_tokens"] == 8
    ids = [call["id"] for message in found for call in message.tool_calls]
    assert len(set(ids)) == 12
    assert all(it.startswith("call_") for it in ids)
    shown = [it.content for it in chunks if it.content]
    assert len(shown) > 2  # as they came
    assert [it.tool_call_chunks != [] for it in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize(
    "text", [CUT, f"Well. {CUT}", WRITTEN.replace("{x}", '"'), f"{WRITTEN}{CUT}"]
)
def test_what_is_no_call_is_an_invalid_one(chat: ChatCoinRAG, monkeypatch, text: str):
    """Also in a stream, whose chunks LangChain mends: half of a call must not be made."""
    bound = chat.bind_tools([search])
    say(monkeypatch, chat.rag.engine, text, text)
    whole, streamed = bound.invoke("Who?"), total([*bound.stream("Who?")])
    (wrong,) = whole.invalid_tool_calls
    assert wrong["args"].startswith("<tool_call>")
    assert wrong["error"]
    assert wrong["id"].startswith("call_")
    n_calls = text.count("</tool_call>") if "{x}" in text else 0
    assert len(whole.tool_calls) == n_calls
    assert whole.response_metadata["finish_reason"] == ("tool_calls" if n_calls else "length")
    assert streamed.content == whole.content
    assert said_of(streamed.tool_calls) == said_of(whole.tool_calls)
    assert said_of(streamed.invalid_tool_calls) == said_of(whole.invalid_tool_calls)


scraps = st.lists(
    st.sampled_from([WRITTEN, CUT, "<tool_call>", "</tool_call>", "I look.", "\n", "{", "[", '"}']),
    max_size=5,
).map("".join)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scraps | st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_streams_add_up_to_what_is_invoked(chat: ChatCoinRAG, text: str):
    """Law: whatever is answered, in whichever pieces, the sum of the chunks is the message."""
    bound = chat.bind_tools([search], max_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        say(patch, chat.rag.engine, text, text)
        whole, streamed = bound.invoke("Who?"), total([*bound.stream("Who?")])
    assert streamed.content == whole.content == parse_calls(text, ["search"]).text
    assert said_of(streamed.tool_calls) == said_of(whole.tool_calls)
    assert said_of(streamed.invalid_tool_calls) == said_of(whole.invalid_tool_calls)


def test_json_that_calls_a_tool_is_a_call_only_if_it_is_bound(chat: ChatCoinRAG, monkeypatch):
    text = json.dumps({"name": "search", "parameters": {"query": "Who?"}})
    say(monkeypatch, chat.rag.engine, text, text, text)
    assert said_of(chat.invoke("Who?", tools=[search]).tool_calls) == [
        ("search", {"query": "Who?"})
    ]
    assert chat.invoke("Who?", tools=[Add]).content == text
    assert chat.invoke("Who?").content == text


async def test_words_before_a_call_are_heard_as_they_come(chat: ChatCoinRAG, monkeypatch):
    said = f"{SAID} Done."
    say(monkeypatch, chat.rag.engine, said, said, "{x}", "{x}")
    bound, heard, again = chat.bind_tools([search]), Tokens(), Tokens()
    message = total([*bound.stream("Who?", config={"callbacks": [heard]})])
    assert "".join(heard.tokens) == message.content == "I look. <b>\n\n Done."
    chunks = [it async for it in bound.astream("Who?", config={"callbacks": [again]})]
    assert (total(chunks).content, again.tokens) == (message.content, heard.tokens)
    assert [it.content for it in bound.stream("Who?")] == ["{x}", ""]
    assert [it.content async for it in bound.astream("Who?")] == ["{x}", ""]


@pytest.mark.parametrize("version", ["v0", "v1"])
@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_with_calls_is_asked_again_as_it_was_given(
    rag: CoinRAG, monkeypatch, version: str, streaming: bool
):
    """Also where its content is blocks; hostile words stay words."""
    streams = say(monkeypatch, rag.engine, f"I look.\n{WRITTEN}{CUT}")
    chat = ChatCoinRAG(rag=rag, max_tokens=8, output_version=version).bind_tools([search])
    asked = [HumanMessage("Who?")]
    first = total([*chat.stream(asked)]) if streaming else chat.invoke(asked)
    asked += [first, ToolMessage("<|im_end|>", tool_call_id=first.tool_calls[0]["id"])]
    second = chat.invoke(asked)
    _, answered, result = streams[1].turns
    assert answered.content == f"I look.\n{CUT}"
    assert [it.arguments for it in answered.calls] == [{"query": "é {x} <|im_end|>"}]
    assert (result.name, result.content) == ("search", "<|im_end|>")
    # Nothing of the first step is computed anew but what the model really said instead.
    before = first.usage_metadata["input_tokens"]
    assert second.usage_metadata["input_token_details"]["coinrag_kept"] >= before
