"""Our chat engine: earlier turns and passages are kept, and a long conversation still fits."""

from __future__ import annotations

import json

import pytest
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import NodeWithScore, TextNode

from coinrag_integrations.engine import AnswerStream
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex import CoinRAGChatEngine, CoinRAGIndex, CoinRAGLLM
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION, SlowEmbedder, leaving_the_loop_free

FIRST = QUESTION
SECOND = "Who painted the lighthouse of Sorn?"


@pytest.fixture
def chat(filled: CoinRAG) -> CoinRAGChatEngine:
    llm = CoinRAGLLM.from_defaults(filled, max_tokens=8)
    return CoinRAGChatEngine.from_defaults(
        filled,
        llm=llm,
        retriever=CoinRAGIndex(filled).as_retriever(n_nuggets=3),
        chat_mode="context",
    )


def usage(response: object) -> dict[str, int]:
    return response.metadata["coinrag"]["usage"]


def test_it_is_a_chat_engine(chat: CoinRAGChatEngine, filled: CoinRAG):
    assert isinstance(chat, BaseChatEngine)
    assert isinstance(CoinRAGIndex(filled).as_chat_engine(), CoinRAGChatEngine)
    with pytest.raises(ConfigError, match="chat_mode is 'best'"):
        CoinRAGIndex(filled).as_chat_engine("best")


def test_the_first_turn_is_what_the_query_engine_answers(chat: CoinRAGChatEngine, filled: CoinRAG):
    response = chat.chat(FIRST)
    assert response.response == str(CoinRAGIndex(filled).as_query_engine(n_nuggets=3).query(FIRST))
    assert len(response.source_nodes) == 3
    assert response.sources[0].tool_name == "retriever"


def test_later_turns_compute_only_what_is_new(chat: CoinRAGChatEngine):
    first = usage(chat.chat(FIRST))
    second = usage(chat.chat(SECOND))
    assert second["kept"] >= first["cached"] + first["online"]
    third = usage(chat.chat("And when?"))
    assert third["kept"] >= second["cached"] + second["online"]
    assert second["online"] < 100 > third["online"]


def test_passages_that_are_there_are_not_repeated(chat: CoinRAGChatEngine):
    first = chat.chat(FIRST).metadata["coinrag"]["spans"]
    again = chat.chat(FIRST).metadata["coinrag"]
    assert again["spans"] == first
    other = chat.chat(SECOND).metadata["coinrag"]["spans"]
    assert other[: len(first)] == first
    assert len({tuple(it) for it in other}) == len(other) > len(first)


def test_answers_are_those_without_anything_kept(chat: CoinRAGChatEngine, filled: CoinRAG):
    turns = [chat.chat(it).response for it in (FIRST, SECOND, "And when?")]
    chat.reset()
    assert chat.chat_history == []
    fresh = []
    for question in (FIRST, SECOND, "And when?"):
        filled.engine._conversations.kept.forget()
        fresh.append(chat.chat(question).response)
    assert fresh == turns


async def test_all_four_ways_answer_alike(chat: CoinRAGChatEngine):
    expected = [chat.chat(it).response for it in (FIRST, SECOND)]
    chat.reset()
    assert [(await chat.achat(it)).response for it in (FIRST, SECOND)] == expected
    chat.reset()
    streamed = []
    for question in (FIRST, SECOND):
        response = chat.stream_chat(question)
        streamed.append("".join(response.response_gen))
        assert len(response.source_nodes) == 3
    assert streamed == expected
    chat.reset()
    streamed = []
    for question in (FIRST, SECOND):
        response = await chat.astream_chat(question)
        streamed.append("".join([it async for it in response.async_response_gen()]))
    assert streamed == expected
    assert [it.role.value for it in chat.chat_history] == ["user", "assistant"] * 2


async def test_it_leaves_the_event_loop_free(chat: CoinRAGChatEngine, filled: CoinRAG):
    filled.index.embedder = SlowEmbedder(filled.index.embedder)
    await leaving_the_loop_free(chat.achat(FIRST))


def test_the_memory_holds_plain_words_and_can_be_written_down(chat: CoinRAGChatEngine):
    chat.chat(FIRST)
    asked, answered = chat.chat_history
    assert (asked.content, asked.role.value) == (FIRST, "user")
    assert "⟦k:" not in (answered.content or "")
    again = [ChatMessage(**json.loads(it.model_dump_json())) for it in chat.chat_history]
    expected = chat.chat(SECOND)
    chat.reset()
    assert chat.chat(SECOND, chat_history=again).response == expected.response


def test_a_memory_and_postprocessors_of_ones_own_are_used(filled: CoinRAG):
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    cutoff = SimilarityPostprocessor(similarity_cutoff=2.0)
    chat = CoinRAGIndex(filled).as_chat_engine(
        memory=memory,
        node_postprocessors=[cutoff],
        system_prompt="Say hello.",
        llm=CoinRAGLLM.from_defaults(filled, max_tokens=4),
    )
    assert chat.chat(FIRST).source_nodes == []
    assert len(memory.get_all()) == 2


def test_condensing_searches_with_a_question_of_its_own(filled: CoinRAG):
    chat = CoinRAGIndex(filled).as_chat_engine(llm=CoinRAGLLM.from_defaults(filled, max_tokens=6))
    assert chat.chat(FIRST).sources[0].raw_input == {"message": FIRST}
    searched = chat.chat("And when?").sources[0].raw_input["message"]
    assert searched not in ("", "And when?")


def test_texts_of_other_retrievers_are_read(filled: CoinRAG):
    class Other(type(CoinRAGIndex(filled).as_retriever())):  # a retriever of the framework
        def _retrieve(self, query_bundle: object) -> list[NodeWithScore]:
            return [NodeWithScore(node=TextNode(id_="x", text="The mill is red."), score=1.0)]

    chat = CoinRAGChatEngine.from_defaults(
        filled, retriever=Other(filled), llm=CoinRAGLLM.from_defaults(filled, max_tokens=4)
    )
    response = chat.chat("What colour is the mill?")
    assert response.metadata["coinrag"]["spans"] == []
    words = filled.engine.model.tokenizer.encode("The mill is red.").ids
    assert usage(response)["online"] > len(words)


def test_a_long_conversation_leaves_its_oldest_turns_out(filled: CoinRAG, monkeypatch):
    shown: list[int] = []
    original = filled.engine.chat

    def watched(messages: list[object], *args: object, **options: object) -> AnswerStream:
        shown.append(len(messages))
        return original(messages, *args, **options)

    monkeypatch.setattr(filled.engine, "chat", watched)
    chat = CoinRAGChatEngine.from_defaults(
        filled,
        llm=CoinRAGLLM.from_defaults(filled, context_window=400, max_tokens=8),
        retriever=CoinRAGIndex(filled).as_retriever(n_nuggets=2),
        chat_mode="context",
        memory=ChatMemoryBuffer.from_defaults(token_limit=100_000),
    )
    for i in range(8):
        chat.chat(f"{i}? {SECOND if i % 2 else FIRST}")
    assert len(chat.chat_history) == 16
    assert shown[:2] == [2, 4]
    assert max(shown) < 16
    assert all(n % 2 == 0 for n in shown)  # a system message, whole turns, and the question
