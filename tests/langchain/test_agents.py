"""A LangGraph agent over `ChatCoinRAG`: what its tool retrieves is read as KV, now and after a checkpoint.

A random model says nothing sensible, so what it says is put into its mouth. Prompts, retrieval, KV and
every step of the graph are the real thing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.load import dumpd, load
from langchain_core.messages import (
    AIMessageChunk,
    AnyMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
)
from langchain_core.tools import BaseTool, create_retriever_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.engine.plan import arrange
from coinrag_integrations.engine.tool_calls import ToolCall, write_call
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain import ChatCoinRAG, CoinRAGRetriever, add_documents
from coinrag_integrations.langchain._convert import span_of
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex, open_client
from tests.adapters import QUESTION, WIDE
from tests.langchain.saying import say
from tests.tiny import CHAT_TEMPLATE, TOOL_TEMPLATE, HashEmbedder, tiny_model

ASKED = {"messages": [{"role": "user", "content": QUESTION}]}
AGAIN = {"messages": [{"role": "user", "content": "And who painted the lighthouse?"}]}
CALL = write_call(ToolCall(name="search", arguments={"query": QUESTION}))
CALL_AGAIN = write_call(ToolCall(name="search", arguments={"query": "Who painted the lighthouse?"}))
FORMS = ("content", "content_and_artifact")
# How a result says which spans it is made of. As bare words it does not.
MARKED = [(form, "marked") for form in FORMS] + [("content_and_artifact", "text")]


@pytest.fixture(params=[TOOL_TEMPLATE, CHAT_TEMPLATE], ids=["template", "words"])
def rag(request, tmp_path, documents) -> Iterator[CoinRAG]:
    model = tiny_model()
    model.tokenizer.hf.chat_template = request.param
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read")
    with Engine(model, tmp_path / "store", config) as engine:
        index = SpanIndex(open_client(None), HashEmbedder(), f"agents{id(engine)}")
        rag = CoinRAG(engine, index, retrieval=WIDE)
        add_documents(rag, documents)
        yield rag


def tool_of(rag: CoinRAG, form: Any = "content", **options: Any) -> BaseTool:
    retriever = CoinRAGRetriever(rag=rag, k=3, **options)
    return create_retriever_tool(retriever, "search", "Finds passages.", response_format=form)


def agent_of(rag: CoinRAG, tool: BaseTool, saver: InMemorySaver | None = None) -> Any:
    """A new agent; what it remembers is in `saver`."""
    return create_agent(
        ChatCoinRAG(rag=rag, max_tokens=6),
        [tool],
        system_prompt="Answer from what search finds.",
        checkpointer=saver or InMemorySaver(),
    )


def thread(name: str = "one") -> dict[str, Any]:
    return {"configurable": {"thread_id": name}}


def retrieved(rag: CoinRAG, *questions: str) -> list[list[Any]]:
    """The spans that the tool finds, in the order in which a prompt reads them."""
    spans = []
    for question in questions:
        documents = CoinRAGRetriever(rag=rag, k=3).invoke(question)
        spans += arrange([span_of(document).ref for document in documents])
    return [[ref.chunk_id, ref.start, ref.stop] for ref in spans]


def spans_of(message: AnyMessage) -> list[list[Any]]:
    return message.response_metadata["coinrag"]["spans"]


def cached(message: Any) -> int:
    return message.usage_metadata["input_token_details"]["cache_read"]


def check_turn(messages: list[AnyMessage], spans: list[list[Any]]) -> None:
    """A call, its result and an answer; what the tool found was read as KV."""
    _, called, found, answered = messages
    assert [it.type for it in messages] == ["human", "ai", "tool", "ai"]
    assert [call["name"] for call in called.tool_calls] == ["search"]
    assert found.tool_call_id == called.tool_calls[0]["id"]
    assert spans_of(called) == []
    assert spans_of(answered) == spans != []
    assert cached(answered) >= cached(called) + sum(stop - start for _, start, stop in spans)
    assert answered.response_metadata["coinrag"]["refused"] == {}
    assert answered.content


# -- turns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "render"), MARKED)
def test_what_a_tool_finds_is_read_as_kv(rag, monkeypatch, form, render):
    say(monkeypatch, rag.engine, CALL)
    agent = agent_of(rag, tool_of(rag, form, render=render))
    check_turn(agent.invoke(ASKED, thread())["messages"], retrieved(rag, QUESTION))


def test_bare_words_are_words(rag, monkeypatch):
    say(monkeypatch, rag.engine, CALL)
    agent = agent_of(rag, tool_of(rag, render="text"))
    answered = agent.invoke(ASKED, thread())["messages"][-1]
    assert spans_of(answered) == []
    assert answered.response_metadata["coinrag"]["refused"] == {}


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_after_a_checkpoint_reads_what_the_one_before_it_found(rag, monkeypatch, form):
    saver = InMemorySaver()
    streams = say(monkeypatch, rag.engine, CALL, None, CALL_AGAIN)
    first = agent_of(rag, tool_of(rag, form), saver).invoke(ASKED, thread())["messages"]
    rag.engine._conversations.kept.forget()  # as in another process
    second = agent_of(rag, tool_of(rag, form), saver).invoke(AGAIN, thread())["messages"]
    assert [it.content for it in second[:4]] == [it.content for it in first]
    assert spans_of(second[5]) == retrieved(rag, QUESTION) != []
    assert cached(second[5]) > 0
    assert spans_of(second[7]) == retrieved(rag, QUESTION, "Who painted the lighthouse?")
    assert [stream.answer.refused for stream in streams] == [{}] * 4
    # What another thread has found is not seen.
    say(monkeypatch, rag.engine, "Hello.")
    other = agent_of(rag, tool_of(rag, form), saver).invoke(AGAIN, thread("two"))["messages"]
    assert spans_of(other[-1]) == []


def test_the_step_after_a_tool_computes_only_what_is_new(rag, monkeypatch):
    streams = say(monkeypatch, rag.engine, CALL)
    agent_of(rag, tool_of(rag)).invoke(ASKED, thread())
    first, second = (stream.answer.usage for stream in streams)
    assert second.kept >= first.online + first.cached


def test_several_tools_are_called_at_once(rag, monkeypatch):
    say(monkeypatch, rag.engine, f"I look twice.\n{CALL}\n{CALL_AGAIN}")
    messages = agent_of(rag, tool_of(rag)).invoke(ASKED, thread())["messages"]
    assert [it.type for it in messages] == ["human", "ai", "tool", "tool", "ai"]
    assert messages[1].content == "I look twice."
    assert spans_of(messages[-1]) == retrieved(rag, QUESTION, "Who painted the lighthouse?")


def test_a_call_that_cannot_be_made_is_answered(rag, monkeypatch):
    saver = InMemorySaver()
    unknown = write_call(ToolCall(name="fly", arguments={}))
    streams = say(monkeypatch, rag.engine, unknown, CALL[:40])
    agent = agent_of(rag, tool_of(rag), saver)
    messages = agent.invoke(ASKED, thread())["messages"]
    assert messages[2].status == "error"
    assert "fly is not a valid tool" in messages[2].content
    assert [it["args"] for it in messages[3].invalid_tool_calls] == [CALL[:40]]
    assert (messages[3].content, messages[3].tool_calls) == ("", [])
    agent.invoke(AGAIN, thread())
    said = [turn.content for turn in streams[-1].turns]
    assert CALL[:40] in said  # the model sees what it wrote, and that it was no call
    assert any("malformed or truncated" in content for content in said)


# -- asynchronous ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
async def test_an_asynchronous_agent_does_the_same(rag, monkeypatch, form):
    say(monkeypatch, rag.engine, CALL, None, CALL)
    expected = agent_of(rag, tool_of(rag, form)).invoke(ASKED, thread())["messages"]
    agent = agent_of(rag, tool_of(rag, form))
    messages = (await agent.ainvoke(ASKED, thread()))["messages"]
    check_turn(messages, retrieved(rag, QUESTION))
    assert [it.content for it in messages] == [it.content for it in expected]


async def test_an_agent_is_streamed(rag, monkeypatch):
    saver = InMemorySaver()
    say(monkeypatch, rag.engine, f"I look.\n{CALL}", None, f"I look.\n{CALL}")
    agent = agent_of(rag, tool_of(rag), saver)
    modes = ["updates", "messages"]
    parts = [part async for part in agent.astream(ASKED, thread(), stream_mode=modes)]
    steps = [step for mode, part in parts if mode == "updates" for step in part.items()]
    assert [name for name, _ in steps] == ["model", "tools", "model"]
    check_turn((await agent.aget_state(thread())).values["messages"], retrieved(rag, QUESTION))
    chunks = [it[0] for mode, it in parts if mode == "messages"]
    first = [it for it in chunks if isinstance(it, AIMessageChunk) and it.id == chunks[0].id]
    assert len([it for it in first if it.content]) > 1
    assert "".join(it.content for it in first) == "I look."
    assert [it["name"] for it in sum(first[1:], first[0]).tool_calls] == ["search"]
    steps = [*agent_of(rag, tool_of(rag)).stream(ASKED, thread(), stream_mode="updates")]
    assert [name for step in steps for name in step] == ["model", "tools", "model"]


# -- what is kept of a thread ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
@pytest.mark.parametrize("form", FORMS)
def test_a_thread_is_made_of_plain_values(rag, monkeypatch, caplog, form):
    saver = InMemorySaver(serde=JsonPlusSerializer(pickle_fallback=False))
    say(monkeypatch, rag.engine, CALL, None, CALL_AGAIN, CUT := CALL[:40])
    agent = agent_of(rag, tool_of(rag, form), saver)
    with caplog.at_level(logging.WARNING):
        agent.invoke(ASKED, thread())
        agent.invoke(AGAIN, thread())
        values = agent.get_state(thread()).values
        again = saver.serde.loads_typed(saver.serde.dumps_typed(values))
    assert caplog.records == []
    messages = values["messages"]
    assert set(values) == {"messages"}
    for message in messages:
        plain = message.model_dump(exclude={"artifact"})  # a retriever tool's documents
        assert json.loads(json.dumps(plain)) == plain
    assert messages[-1].invalid_tool_calls[0]["args"] == CUT
    assert again["messages"] == messages
    assert load(json.loads(json.dumps(dumpd(messages))), allowed_objects="core") == messages
    written = json.dumps(messages_to_dict(messages), default=lambda it: it.model_dump())
    read = messages_from_dict(json.loads(written))
    assert [it.content for it in read] == [it.content for it in messages]
    ours = ChatCoinRAG(rag=rag, max_tokens=1)
    asked = [*read, {"role": "user", "content": "So?"}]
    assert spans_of(ours.invoke(asked)) == spans_of(ours.invoke([*messages, asked[-1]])) != []


@pytest.mark.parametrize(("form", "render"), MARKED)
def test_a_result_that_was_changed_is_read_as_text(rag, monkeypatch, form, render):
    """One word of one passage: it is not believed, and counted; the others are read as KV."""

    def change(message: ToolMessage) -> ToolMessage:
        if form == "content":
            content = message.content.replace("Bastien Roule", "Somebody Else", 1)
            return message.model_copy(update={"content": content})
        documents = [it.model_copy() for it in message.artifact]
        words = documents[0].page_content
        documents[0].page_content = words.replace("organ", "piano", 1)
        assert documents[0].page_content != words
        return message.model_copy(update={"artifact": documents})

    saver = InMemorySaver()
    streams = say(monkeypatch, rag.engine, CALL)
    agent = agent_of(rag, tool_of(rag, form, render=render), saver)
    messages = agent.invoke(ASKED, thread())["messages"]
    found = messages[2]
    agent.update_state(thread(), {"messages": [change(found)]})
    answered = agent.invoke(AGAIN, thread())["messages"][-1]
    assert answered.response_metadata["coinrag"]["refused"] == {"altered": 1}
    assert cached(answered) > 0
    before = spans_of(messages[-1])
    assert spans_of(answered) != before
    kept = {(ref[0], i) for ref in spans_of(answered) for i in range(ref[1], ref[2])}
    assert kept < {(ref[0], i) for ref in before for i in range(ref[1], ref[2])}
    assert streams[-1].turns[3].content.count("⟦/k⟧") >= 1


def test_what_was_removed_since_is_read_as_text(rag, monkeypatch):
    saver = InMemorySaver()
    say(monkeypatch, rag.engine, CALL)
    agent = agent_of(rag, tool_of(rag), saver)
    spans = spans_of(agent.invoke(ASKED, thread())["messages"][-1])
    assert rag.delete(["organ"]) == 1
    answered = agent.invoke(AGAIN, thread())["messages"][-1]
    assert spans_of(answered) != spans
    assert answered.response_metadata["coinrag"]["refused"]["unknown"] > 0


def test_an_agent_that_has_to_call_a_tool_is_refused(rag):
    """As a response format wants it."""
    agent = create_agent(
        ChatCoinRAG(rag=rag), [tool_of(rag)], response_format={"title": "X", "type": "object"}
    )
    with pytest.raises(ConfigError, match="tool_choice='any': a local model cannot be made"):
        agent.invoke(ASKED)
