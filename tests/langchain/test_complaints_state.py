"""What users of LangChain complained about elsewhere, as tests: threads, caches, states, reports.

The table of all complaints stands in test_complaints.py. LC is langchain-ai/langchain, HF
huggingface/transformers, TK huggingface/tokenizers.
"""

from __future__ import annotations

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import create_retriever_tool
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from coinrag_integrations.engine import Engine, EngineConfig, LoadedModel
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain import (
    ChatCoinRAG,
    CoinRAGGenerator,
    CoinRAGLLM,
    CoinRAGRetriever,
    NuggetTextSplitter,
    add_documents,
    create_coinrag_chain,
)
from coinrag_integrations.langchain._convert import span_of, text_of
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex, open_client
from tests.adapters import QUESTION, TEXTS
from tests.langchain.paths import ASK, runnable, words
from tests.tiny import HashEmbedder, tiny_model

# -- threads, copies, what is stored ---------------------------------------------------------------


def test_many_threads_that_retrieve_split_and_ask_get_the_answers_of_one(
    filled: CoinRAG, documents: list[Document]
):
    """TK 537, "Already borrowed": a tokenizer that two threads use at once."""
    retriever, splitter = CoinRAGRetriever(rag=filled, k=3), NuggetTextSplitter.from_rag(filled)
    chat, llm = ChatCoinRAG(rag=filled, max_tokens=4), CoinRAGLLM(rag=filled, max_tokens=4)
    chain = create_coinrag_chain(filled, k=3)

    def round_of(number: int) -> list[Any]:
        question = f"{QUESTION} {number}"
        found = retriever.invoke(question)
        marked = found[number % 3].page_content
        return [
            [document.id for document in found],
            chat.invoke(f"{marked} {question}").content,
            llm.invoke(f"{marked} was {number}"),
            chain.invoke(question)["answer"],
            chat.get_num_tokens(question),
            [piece.id for piece in splitter.split_documents(documents)],
        ]

    expected = [round_of(number) for number in range(4)]
    barrier = threading.Barrier(16)

    def work(start: int) -> bool:
        barrier.wait(timeout=60)
        numbers = [(start + i) % 4 for i in range(4)]
        return all(round_of(number) == expected[number] for number in numbers)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def test_a_new_store_may_be_opened_by_many_threads_at_once(model: LoadedModel, tmp_path: Path):
    """CH 1209: a race at the first creation; the errors were KeyError and AttributeError."""

    def work(folder: Path, number: int, barrier: threading.Barrier) -> CoinRAG:
        barrier.wait(timeout=60)
        rag = CoinRAG.open(folder, model=model, embedder=HashEmbedder())
        add_documents(rag, [Document(f"The mill number {number} is red.", id=str(number))])
        return rag

    for attempt in range(3):
        barrier = threading.Barrier(8)
        with ThreadPoolExecutor(8) as pool:
            begun = [pool.submit(work, tmp_path / str(attempt), i, barrier) for i in range(8)]
        opened = [future.result() for future in begun]
        for rag in opened:
            assert rag.engine.catalog.documents() == [str(i) for i in range(8)]
            assert rag.index.counts()["chunks"] == 8
            rag.close()


COPIED = ("chat", "llm", "generator", "retriever")


@pytest.mark.parametrize("kind", COPIED)
def test_copies_share_the_engine_and_pickles_say_what_is_missing(filled: CoinRAG, kind: str):
    """LC 5932, HF 23552: "cannot pickle '_thread.lock' object"."""
    retriever = CoinRAGRetriever(rag=filled), QUESTION
    it, value = retriever if kind == "retriever" else runnable(filled, kind)
    for copied in (copy.copy(it), it.model_copy(), copy.deepcopy(it)):
        assert copied.rag is filled
        again, first = copied.invoke(value), it.invoke(value)
        assert again == first if kind == "retriever" else words(again) == words(first)
    with pytest.raises(ConfigError, match="open the store"):
        pickle.dumps(it)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_what_is_stored_is_the_same_after_many_answers(
    tmp_path: Path, documents: list[Document], memory_bytes: int
):
    """HF 36151, 37078: a cache that generation writes into, on disk or in memory."""
    config = EngineConfig(chunk_tokens=32, load="read", memory_bytes=memory_bytes, kept_bytes=0)
    index = SpanIndex(open_client(None), HashEmbedder(), f"t{uuid4().hex}")
    with Engine(tiny_model(), tmp_path, config) as engine:
        rag = CoinRAG(engine, index)
        add_documents(rag, documents)
        chat, chain = ChatCoinRAG(rag=rag, max_tokens=3), create_coinrag_chain(rag, k=3)
        found = CoinRAGRetriever(rag=rag, k=4).invoke(QUESTION)
        refs = [span_of(document).ref for document in found]

        def state() -> tuple[bytes, list[bytes]]:
            stage = engine.store.stage(refs)
            assert engine.store.read(stage).errors == {}
            entries = stage.entries(slice(0, len(refs))).numpy().tobytes()
            return entries, [engine.store.path(chunk_id).read_bytes() for chunk_id in engine.store]

        before = state()
        answers: dict[str, set[str]] = {}
        for number in range(40):
            first, second = found[number % 4], found[(number + 1) % 4]
            prompt = f"{first.page_content} and {second.page_content} {number % 4}?"
            answers.setdefault(prompt, set()).add(chat.invoke(prompt).content)
            answers.setdefault("", set()).add(chain.invoke(QUESTION)["answer"])
            chat.invoke([("human", prompt), ("ai", "So."), ("human", f"And {number}?")])
        assert state() == before
        assert [len(said) for said in answers.values()] == [1] * 5


# -- caches of answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("made", [ChatCoinRAG, CoinRAGLLM])
def test_answers_of_other_weights_are_not_taken_from_a_cache(tmp_path: Path, made: Any):
    """LC 14590, 6396: one cache for two models."""
    said, cache = [], InMemoryCache()
    for name, seed, codec in (("a", 0, "none"), ("b", 1, "none"), ("c", 0, "int8")):
        index = SpanIndex(open_client(None), HashEmbedder(), f"t{uuid4().hex}")
        config = EngineConfig(chunk_tokens=32, codec=codec)
        with Engine(tiny_model(seed=seed), tmp_path / name, config) as engine:
            rag = CoinRAG(engine, index)
            said.append(words(made(rag=rag, max_tokens=8, cache=cache).invoke("Who?")))
            assert said[-1] == words(made(rag=rag, max_tokens=8).invoke("Who?"))
    assert said[0] != said[1]
    assert len(cache._cache) == 3


def test_edited_texts_are_asked_anew(filled: CoinRAG):
    """LC 14590: a document changed, and the answer to the old one comes out of the cache."""
    text = "The mill of Tarsk is red."
    retriever = CoinRAGRetriever(rag=filled, k=1, filter={"source": "mill"})
    model = ChatCoinRAG(rag=filled, max_tokens=8, cache=InMemoryCache())
    chain = {"context": retriever, "input": lambda _: QUESTION} | create_stuff_documents_chain(
        model, ASK
    )

    def add(added: str) -> Document:
        add_documents(filled, [Document(added, metadata={"source": "mill"})])
        return retriever.invoke(text)[0]

    old = add(text)
    first = chain.invoke(text)
    # The same words, of another text: what they stand behind is part of their KV.
    new = add(f"Look, all. {text}")
    assert text_of(old) == text_of(new) == text
    assert old.page_content != new.page_content
    fresh = ChatCoinRAG(rag=filled, max_tokens=8)
    for document, refused in ((new, {}), (old, {"unknown": 1})):
        said = fresh.invoke(f"{document.page_content} Who?").response_metadata["coinrag"]
        assert (said["refused"], bool(said["spans"])) == (refused, not refused)
    prompt = ASK.invoke({"context": new.page_content, "input": QUESTION})
    assert chain.invoke(text) == fresh.invoke(prompt).content != first


def test_passages_that_come_as_objects_are_in_the_key_of_a_cache(filled: CoinRAG):
    one, two = CoinRAGRetriever(rag=filled, k=2, render="text").invoke(QUESTION)
    model = ChatCoinRAG(rag=filled, max_tokens=8, cache=InMemoryCache())
    plain = ChatCoinRAG(rag=filled, max_tokens=8)
    call = {"name": "search", "args": {}, "id": "1", "type": "tool_call"}

    def messages(document: Document) -> list[Any]:
        found = ToolMessage("found", tool_call_id="1", artifact=[document])
        return [HumanMessage("Who?"), AIMessage("", tool_calls=[call]), found]

    for document in (one, two, one):
        bound = {"coinrag_handles": [document]}
        assert model.invoke("Who?", **bound).content == plain.invoke("Who?", **bound).content
        asked = messages(document)
        assert model.invoke(asked).content == plain.invoke(asked).content
    assert plain.invoke(messages(one)).content != plain.invoke(messages(two)).content


# -- what answers say ------------------------------------------------------------------------------


def test_sources_are_there_on_every_path(filled: CoinRAG):
    """LC 11071: who said it, and where."""
    retriever = CoinRAGRetriever(rag=filled, k=3)
    stuff = create_stuff_documents_chain(ChatCoinRAG(rag=filled, max_tokens=2), ASK)
    tool = create_retriever_tool(retriever, "s", "s", response_format="content_and_artifact")
    call = {"name": "s", "args": {"query": QUESTION}, "id": "1", "type": "tool_call"}
    for found in (
        create_coinrag_chain(filled, k=3).invoke(QUESTION)["context"],
        create_coinrag_chain(filled, retriever).invoke(QUESTION)["context"],
        create_retrieval_chain(retriever, stuff).invoke({"input": QUESTION})["context"],
        tool.invoke(call).artifact,
    ):
        assert len(found) == 3
        for document in found:
            source = document.metadata["source"]
            start, stop = (document.metadata[f"coinrag_char_{end}"] for end in ("start", "stop"))
            assert text_of(document) == TEXTS[source][start:stop]
            assert document.metadata["title"] == source.title()
            assert document.metadata["coinrag_document_id"] == source


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_documents_survive_a_checkpoint(filled: CoinRAG):
    """langgraph 7533, 7714: states that hold types of somebody else's."""
    found = CoinRAGRetriever(rag=filled, k=3).invoke(QUESTION)
    chat, serde = ChatCoinRAG(rag=filled, max_tokens=4), JsonPlusSerializer()
    generator = CoinRAGGenerator(rag=filled)
    output = create_coinrag_chain(filled, k=3).invoke(QUESTION)
    for again in (
        loads(dumps(found), allowed_objects="core"),
        serde.loads_typed(serde.dumps_typed(found)),
        [Document(**json.loads(json.dumps(d.model_dump()))) for d in found],
        pickle.loads(pickle.dumps(found)),
    ):
        assert again == found
        said = chat.invoke("\n".join(d.page_content for d in again)).response_metadata["coinrag"]
        assert (len(said["spans"]) > 0, said["refused"]) == (True, {})
        value = {"question": QUESTION, "documents": again}
        assert generator.invoke(value) == generator.invoke({**value, "documents": found})
    message = chat.invoke(found[0].page_content)
    assert serde.loads_typed(serde.dumps_typed(message)) == message
    assert json.loads(json.dumps(output["coinrag"])) == output["coinrag"]


@pytest.mark.parametrize("use_kv", [True, False])
async def test_every_answer_says_whether_the_cache_was_used(filled: CoinRAG, use_kv: bool):
    """People want chunk reuse and cannot tell whether it happened (LMCache 167, vllm 9368)."""
    (found,) = CoinRAGRetriever(rag=filled, k=1).invoke(QUESTION)
    prompt = f"{found.page_content} Who?"
    chat = ChatCoinRAG(rag=filled, max_tokens=2, use_kv=use_kv)
    llm = CoinRAGLLM(rag=filled, max_tokens=2, use_kv=use_kv)
    streamed = [*chat.stream(prompt)]
    messages = [
        chat.invoke(prompt),
        await chat.ainvoke(prompt),
        *chat.batch([prompt]),
        sum(streamed[1:], streamed[0]),
    ]
    texts = [
        *llm.generate([prompt, prompt]).generations,
        *(await llm.agenerate([prompt])).generations,
    ]
    reports = [
        *(message.response_metadata["coinrag"] for message in messages),
        *(text.generation_info["coinrag"] for (text,) in texts),
    ]
    for report in reports:
        assert report.keys() >= {"spans", "recomputed", "refused", "usage", "timings"}
        usage = report["usage"]
        assert bool(report["spans"]) is (usage["cached"] > 0) is use_kv
        assert (usage["online"] > 0, usage["generated"]) == (True, 2)
    for message in messages:
        assert message.usage_metadata["input_token_details"].keys() >= {"cache_read"}
    for chain, value in (runnable(filled, "chain"), runnable(filled, "chain", 2)):
        for output in (chain.invoke(value), await chain.ainvoke(value)):
            assert output["coinrag"]["usage"]["cached"] > 0
