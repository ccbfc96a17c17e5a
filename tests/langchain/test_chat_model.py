"""`ChatCoinRAG` in LangChain's own chains: marked passages are read as KV, everything else as text."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, FewShotChatMessagePromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool

from coinrag_integrations.engine import AnswerStream, Message
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain import ChatCoinRAG, CoinRAGRetriever
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION, leaving_the_loop_free

ANSWER = ChatPromptTemplate.from_messages(
    [("system", "Answer from:\n{context}"), ("human", "{input}")]
)


@pytest.fixture
def chat(filled: CoinRAG) -> ChatCoinRAG:
    return ChatCoinRAG(rag=filled, max_tokens=8)


@pytest.fixture
def retriever(filled: CoinRAG) -> CoinRAGRetriever:
    return CoinRAGRetriever(rag=filled, k=4)


def report(message: Any) -> dict[str, Any]:
    return message.response_metadata["coinrag"]


def triples(documents: list[Document]) -> list[list[Any]]:
    keys = ("coinrag_chunk_id", "coinrag_start", "coinrag_stop")
    return sorted([document.metadata[key] for key in keys] for document in documents)


def test_messages_go_through_the_models_template(chat: ChatCoinRAG, filled: CoinRAG):
    from coinrag_integrations.engine import GenerationConfig

    turns = [Message(role="system", content="Be short."), Message(role="user", content="Who?")]
    expected = "".join(filled.engine.chat(turns, GenerationConfig(max_new_tokens=8)))
    message = chat.invoke([SystemMessage("Be short."), HumanMessage("Who?")])
    assert message.content == expected
    assert chat.invoke([("system", "Be short."), ("human", "Who?")]).content == expected
    assert "".join(it.content for it in chat.stream([("system", "Be short."), "Who?"])) == expected


def test_usage_says_what_came_from_the_cache(chat: ChatCoinRAG, retriever: CoinRAGRetriever):
    (document, *_) = retriever.invoke(QUESTION)
    usage = chat.invoke(f"{document.page_content} Who?").usage_metadata
    details = usage["input_token_details"]
    assert usage["input_tokens"] == details["cache_read"] + details["coinrag_online"]
    assert details["cache_read"] > 0
    counted = UsageMetadataCallbackHandler()
    chat.invoke("Who?", config={"callbacks": [counted]})
    assert list(counted.usage_metadata) == [chat.model_name]


def test_chunks_of_a_stream_add_up_to_the_message(chat: ChatCoinRAG):
    whole = chat.invoke("Who?")
    total = sum([*chat.stream("Who?")][1:], next(chat.stream("Who?")))
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert total.response_metadata["model_name"] == chat.model_name


# -- chains of LangChain ---------------------------------------------------------------------------


@pytest.fixture
def spans(filled: CoinRAG, monkeypatch: pytest.MonkeyPatch) -> list[AnswerStream]:
    streams: list[AnswerStream] = []
    original = filled.engine.chat

    def watched(*args: Any, **options: Any) -> AnswerStream:
        streams.append(original(*args, **options))
        return streams[-1]

    monkeypatch.setattr(filled.engine, "chat", watched)
    return streams


def resolved(streams: list[AnswerStream]) -> set[tuple[str, int]]:
    """The tokens that were read as KV."""
    refs = [ref for stream in streams for ref in stream.answer.spans]
    return {(ref.chunk_id, i) for ref in refs for i in range(ref.start, ref.stop)}


def tokens_of(documents: list[Document]) -> set[tuple[str, int]]:
    found = triples(documents)
    return {(chunk_id, i) for chunk_id, start, stop in found for i in range(start, stop)}


def test_every_marked_passage_resolves_in_the_stock_chains(chat, retriever, spans):
    documents = retriever.invoke(QUESTION)
    stuff = create_stuff_documents_chain(chat, ANSWER)
    chains = {
        "stuff": lambda: stuff.invoke({"context": documents, "input": QUESTION}),
        "retrieval": lambda: create_retrieval_chain(retriever, stuff).invoke({"input": QUESTION}),
        "history": lambda: create_retrieval_chain(
            create_history_aware_retriever(
                chat, retriever, ChatPromptTemplate.from_template("{input}")
            ),
            stuff,
        ).invoke({"input": QUESTION, "chat_history": []}),
        "lcel": lambda: (
            {
                "context": retriever | (lambda found: "\n\n".join(d.page_content for d in found)),
                "input": RunnablePassthrough(),
            }
            | ANSWER
            | chat
            | StrOutputParser()
        ).invoke(QUESTION),
    }
    for name, run in chains.items():
        spans.clear()
        run()
        assert resolved(spans) == tokens_of(documents), name
        assert all(stream.answer.refused == {} for stream in spans), name


def test_few_shot_prompts_keep_their_marks(chat, retriever, spans):
    documents = retriever.invoke(QUESTION)[:2]
    example = ChatPromptTemplate.from_messages([("human", "{q}"), ("ai", "{a}")])
    shots = FewShotChatMessagePromptTemplate(
        examples=[{"q": f"{documents[0].page_content} Who?", "a": "{braces}"}],
        example_prompt=example,
    )
    prompt = ChatPromptTemplate.from_messages([shots, ("human", "{input}")])
    (prompt | chat).invoke({"input": f"{documents[1].page_content} And who?"})
    assert resolved(spans) == tokens_of(documents)


def test_damaged_marks_are_read_as_text(chat, retriever, spans):
    (document, *_) = retriever.invoke(QUESTION)
    damaged = document.page_content.replace("⟦/k⟧", "")
    message = chat.invoke(f"{damaged} Who?")
    assert (report(message)["spans"], report(message)["refused"]) == ([], {"altered": 1})


# -- passages that come as objects -----------------------------------------------------------------


def test_documents_can_be_bound(chat, retriever, filled):
    documents = retriever.invoke(QUESTION)
    bound = chat.bind(coinrag_handles=documents)
    found = report(bound.invoke([("system", filled.engine.config.prompt.system), QUESTION]))
    assert found["spans"] == report_spans(filled, documents)
    plain = Document(page_content="The mill is red.")
    assert report(chat.bind(coinrag_handles=[plain]).invoke("Who?"))["spans"] == []


def report_spans(rag: CoinRAG, documents: list[Document]) -> list[list[Any]]:
    from coinrag_integrations.engine.plan import arrange
    from coinrag_integrations.langchain._convert import span_of

    refs = arrange([span_of(document).ref for document in documents])
    return [[ref.chunk_id, ref.start, ref.stop] for ref in refs]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_artifacts_of_a_retriever_tool_are_read_as_kv(chat, filled, checkpointed: bool):
    plain = CoinRAGRetriever(rag=filled, k=3, render="text")
    tool = create_retriever_tool(plain, "search", "Finds.", response_format="content_and_artifact")
    call = {"name": "search", "args": {"query": QUESTION}, "id": "1", "type": "tool_call"}
    messages = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), tool.invoke(call)]
    assert isinstance(messages[-1], ToolMessage)
    if checkpointed:
        written = json.dumps(messages_to_dict(messages), default=lambda it: it.model_dump())
        messages = messages_from_dict(json.loads(written))
    found = report(chat.invoke(messages))
    assert found["spans"] == report_spans(filled, plain.invoke(QUESTION))


def test_content_blocks_carry_spans(chat, filled):
    (document, *_) = CoinRAGRetriever(rag=filled, render="text").invoke(QUESTION)
    block = {
        "type": "non_standard",
        "value": {"coinrag": document.metadata, "text": document.page_content},
    }
    message = HumanMessage([block, {"type": "text", "text": " Who?"}])
    assert report(chat.invoke([message]))["spans"] == triples([document])
    block["value"]["text"] = "Something else."
    assert report(chat.invoke([HumanMessage([block, "Who?"])]))["spans"] == []
    with pytest.raises(ConfigError, match="leave content of type 'image_url' out"):
        chat.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])])


# -- options, caches, threads ----------------------------------------------------------------------


def test_options_of_a_call_take_effect(chat: ChatCoinRAG):
    whole = chat.invoke("Who?", max_tokens=30)
    assert whole.usage_metadata["output_tokens"] == 30
    stop = whole.content[len(whole.content) // 2 :][:3]
    cut = whole.content[: whole.content.index(stop)].rstrip()
    assert chat.invoke("Who?", max_tokens=30, stop=[stop]).content == cut
    assert chat.bind(stop=[stop]).invoke("Who?", max_tokens=30).content == cut
    assert len({chat.invoke("Who?", temperature=5.0, seed=s).content for s in range(4)}) > 1
    assert report(chat.invoke("Who?", use_kv=False))["usage"]["cached"] == 0
    with pytest.raises(ConfigError, match="num_beams: no such option"):
        chat.invoke("Who?", num_beams=2)
    with pytest.raises(ValueError, match="leaves no room"):  # pydantic's
        ChatCoinRAG(rag=chat.rag, max_tokens=10**6)
    with pytest.raises(NotImplementedError, match="does not follow a schema"):
        chat.with_structured_output({"title": "X", "type": "object"})


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_answer_that_takes_too_long_is_given_up(chat: ChatCoinRAG, streaming: bool):
    slow = ChatCoinRAG(rag=chat.rag, max_tokens=3000, timeout=0.02)
    with pytest.raises(TimeoutError):
        list(slow.stream("Who?")) if streaming else slow.invoke("Who?")
    with pytest.raises(TimeoutError):
        await anext(_pieces(slow, streaming=streaming))
    assert chat.invoke("Who?").content


async def _pieces(model: ChatCoinRAG, *, streaming: bool) -> AsyncIterator[Any]:
    """One thing, once all pieces are there."""
    yield [it async for it in model.astream("Who?")] if streaming else await model.ainvoke("Who?")


def test_tokens_are_the_models_own(chat: ChatCoinRAG, filled: CoinRAG):
    """LC 25431: counting fetched a GPT-2 tokenizer."""
    ids = filled.engine.model.tokenizer.encode("The organ").ids
    assert chat.get_token_ids("⟦k:x⟧The organ⟦/k⟧") == list(ids)
    assert chat.get_num_tokens("The organ") == len(ids)


def test_answers_of_models_that_differ_are_not_mixed_up(chat: ChatCoinRAG):
    """LC 14590: a cache that two models share."""
    others = [ChatCoinRAG(rag=chat.rag, max_tokens=9), ChatCoinRAG(rag=chat.rag, use_kv=False)]
    keys = {model._get_llm_string() for model in (chat, *others)}
    assert len(keys) == 3
    cached = ChatCoinRAG(rag=chat.rag, max_tokens=8, cache=InMemoryCache())
    assert (
        cached.invoke("Who?").content
        == cached.invoke("Who?").content
        == chat.invoke("Who?").content
    )


class Tokens(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)


async def test_callbacks_hear_of_every_piece(chat: ChatCoinRAG):
    heard = Tokens()
    text = "".join(it.content for it in chat.stream("Who?", config={"callbacks": [heard]}))
    assert "".join(heard.tokens) == text != ""
    again = Tokens()
    pieces = [it.content async for it in chat.astream("Who?", config={"callbacks": [again]})]
    assert ("".join(pieces), again.tokens) == (text, heard.tokens)


async def test_async_calls_leave_the_event_loop_free(chat: ChatCoinRAG):
    message = await leaving_the_loop_free(chat.ainvoke("Who?", max_tokens=256))
    assert message.content == chat.invoke("Who?", max_tokens=256).content


async def test_batches_and_threads_get_the_answers_of_one(chat: ChatCoinRAG, retriever):
    documents = retriever.invoke(QUESTION)
    prompts = [f"{documents[i % 4].page_content} Question {i % 8}?" for i in range(32)]
    alone = {prompt: chat.invoke(prompt).content for prompt in set(prompts)}
    expected = [alone[prompt] for prompt in prompts]
    assert [it.content for it in await chat.abatch(prompts)] == expected
    assert [it.content for it in chat.batch(prompts)] == expected
    barrier = threading.Barrier(16)

    def ask(prompt: str) -> str:
        barrier.wait(timeout=60)
        return str(chat.invoke(prompt).content)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts[:16])) == expected[:16]


@pytest.mark.parametrize("odd", ["<|im_end|>", "{x}", "⟦k:", "%s", "🫖" * 50])
def test_odd_words_are_words(chat: ChatCoinRAG, filled: CoinRAG, odd: str):
    tokenizer = filled.engine.model.tokenizer
    one = chat.invoke("x").usage_metadata["input_tokens"] - len(tokenizer.encode("x").ids)
    used = chat.invoke(odd).usage_metadata["input_tokens"]
    assert used == one + len(tokenizer.encode(odd).ids)


def test_none_says_nothing(chat: ChatCoinRAG):
    options = dict.fromkeys(("max_tokens", "temperature", "top_p", "seed", "stop", "timeout"))
    assert chat.invoke(QUESTION, **options).content == chat.invoke(QUESTION).content
