from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain import (
    CoinRAGGenerator,
    CoinRAGRetriever,
    NuggetTextSplitter,
    create_coinrag_chain,
)
from coinrag_integrations.langchain._convert import span_of
from coinrag_integrations.langchain.chain import open_stream
from coinrag_integrations.rag import CoinRAG
from tests.adapters import (
    QUESTION,
    SlowEmbedder,
    assert_stopped,
    cancel_after_first_piece,
    ticks_during,
    watch_streams,
)

OTHER = "Who painted the lighthouse of Sorn?"


def given(rag: CoinRAG, question: str = QUESTION) -> dict[str, Any]:
    return {"question": question, "documents": CoinRAGRetriever(rag=rag).invoke(question)}


def without_timings(output: dict[str, Any]) -> dict[str, Any]:
    report = {k: v for k, v in output["coinrag"].items() if k != "timings"}
    return {**output, "coinrag": report}


class TestGenerator:
    def test_the_answer_is_the_stores_own(self, filled: CoinRAG):
        answer = CoinRAGGenerator(rag=filled).invoke(given(filled))
        assert answer == filled.ask(QUESTION).text != ""

    def test_it_takes_the_names_of_retrieval_chains_too(self, filled: CoinRAG):
        generator, value = CoinRAGGenerator(rag=filled), given(filled)
        other = {"input": QUESTION, "context": value["documents"], "chat_history": []}
        assert generator.invoke(other) == generator.invoke(value)
        with pytest.raises(ConfigError, match="neither documents nor context"):
            generator.invoke({"question": QUESTION})

    async def test_streams_and_async_give_the_same_text(self, filled: CoinRAG):
        generator, value = CoinRAGGenerator(rag=filled), given(filled)
        whole = generator.invoke(value)
        pieces = list(generator.stream(value))
        assert len(pieces) > 1
        assert "".join(pieces) == whole
        assert await generator.ainvoke(value) == whole
        assert "".join([piece async for piece in generator.astream(value)]) == whole

    def test_a_batch_answers_like_single_questions(self, filled: CoinRAG):
        generator = CoinRAGGenerator(rag=filled)
        values = [given(filled), given(filled, OTHER)]
        assert generator.batch(values) == [generator.invoke(value) for value in values]

    def test_generation_options_are_used(self, filled: CoinRAG):
        short = CoinRAGGenerator(rag=filled, generation=GenerationConfig(max_new_tokens=2))
        whole = CoinRAGGenerator(rag=filled).invoke(given(filled))
        assert whole.startswith(short.invoke(given(filled)))
        assert len(short.invoke(given(filled))) < len(whole)

    def test_closing_a_stream_stops_the_generation(
        self, filled: CoinRAG, monkeypatch: pytest.MonkeyPatch
    ):
        streams = watch_streams(filled, monkeypatch)
        pieces = CoinRAGGenerator(rag=filled).stream(given(filled))
        next(pieces)
        pieces.close()
        assert_stopped(streams)

    async def test_closing_an_async_stream_stops_the_generation(
        self, filled: CoinRAG, monkeypatch: pytest.MonkeyPatch
    ):
        streams = watch_streams(filled, monkeypatch)
        pieces = CoinRAGGenerator(rag=filled).astream(given(filled))
        await anext(pieces)
        await pieces.aclose()
        assert_stopped(streams)

    async def test_cancelling_stops_the_generation(
        self, filled: CoinRAG, monkeypatch: pytest.MonkeyPatch
    ):
        value, streams = given(filled), watch_streams(filled, monkeypatch)
        await cancel_after_first_piece(CoinRAGGenerator(rag=filled).ainvoke(value), streams)

    def test_without_documents_the_model_is_not_asked(self, filled: CoinRAG):
        value = {"question": QUESTION, "documents": []}
        assert CoinRAGGenerator(rag=filled).invoke(value) == ""
        assert list(CoinRAGGenerator(rag=filled).stream(value)) == []

    def test_foreign_and_rewritten_documents_are_read_as_text(self, filled: CoinRAG):
        generator, value = CoinRAGGenerator(rag=filled), given(filled)
        first, second = value["documents"][:2]
        foreign = Document(id="theirs", page_content="Something else.")
        second.page_content = "The name is hidden."
        answer = generator.invoke({**value, "documents": [first, foreign, second]})
        stream = open_stream(filled, QUESTION, [first, foreign, second], None)
        assert stream.reply.answer.refused == {"altered": 1}
        context = [span_of(first), "Something else.", "The name is hidden."]
        assert answer == "".join(filled.stream_spans(QUESTION, context))

    def test_pieces_of_the_splitter_answer_too(self, filled: CoinRAG, documents: list[Document]):
        pieces = NuggetTextSplitter.from_rag(filled).split_documents(documents[:1])
        value = {"question": QUESTION, "documents": pieces}
        spans = [span_of(piece) for piece in pieces]
        for _ in (stream := filled.stream_spans(QUESTION, spans)):
            pass
        assert CoinRAGGenerator(rag=filled).invoke(value) == stream.reply.text

    def test_unknown_options_are_refused(self, filled: CoinRAG):
        with pytest.raises(TypeError, match="stop"):
            CoinRAGGenerator(rag=filled).invoke(given(filled), stop=["x"])

    async def test_it_streams_as_the_end_of_a_sequence(self, filled: CoinRAG):
        retriever = CoinRAGRetriever(rag=filled)
        sequence: Runnable[str, str] = {
            "question": RunnablePassthrough(),
            "documents": retriever,
        } | CoinRAGGenerator(rag=filled)
        pieces = list(sequence.stream(QUESTION))
        assert len(pieces) > 1
        assert "".join(pieces) == filled.ask(QUESTION).text
        assert [piece async for piece in sequence.astream(QUESTION)] == pieces


class TestChain:
    def test_the_output_holds_question_context_and_answer(self, filled: CoinRAG):
        output = create_coinrag_chain(filled).invoke(QUESTION)
        assert list(output) == ["question", "context", "answer", "coinrag"]
        assert output["question"] == QUESTION
        assert output["context"] == CoinRAGRetriever(rag=filled, render="text").invoke(QUESTION)
        assert output["answer"] == filled.ask(QUESTION).text

    def test_a_dict_keeps_its_keys(self, filled: CoinRAG):
        chain = create_coinrag_chain(filled)
        output = chain.invoke({"input": QUESTION, "user": "me"})
        assert list(output) == ["input", "user", "context", "answer", "coinrag"]
        assert output["answer"] == chain.invoke({"question": QUESTION})["answer"]
        with pytest.raises(ConfigError, match="neither question nor input"):
            chain.invoke({"query": QUESTION})

    def test_the_answer_comes_from_cached_kv(self, filled: CoinRAG):
        found = create_coinrag_chain(filled).invoke(QUESTION)["coinrag"]
        n_entries = sum(stop - start for _, start, stop in found["spans"])
        layout, prompt = filled.engine.model.layout, filled.engine.prompt
        assert found["usage"]["cached"] == n_entries + len(prompt.head) > len(prompt.head)
        assert found["timings"]["bytes_read"] == n_entries * layout.bytes_per_entry
        assert found["usage"]["online"] == len(prompt.tail(QUESTION)) < n_entries
        assert found["recomputed"] == []
        assert found["timings"]["retrieve_ms"] > 0
        assert found["timings"]["ttft_ms"] > 0

    async def test_streams_and_async_add_up_to_the_same(self, filled: CoinRAG):
        chain = create_coinrag_chain(filled)
        whole = without_timings(chain.invoke(QUESTION))
        steps = list(chain.stream(QUESTION))
        assert [next(iter(step)) for step in steps[:2]] == ["question", "context"]
        assert without_timings(added(steps)) == whole
        assert without_timings(await chain.ainvoke(QUESTION)) == whole
        assert without_timings(added([s async for s in chain.astream(QUESTION)])) == whole

    async def test_asking_leaves_the_event_loop_free(self, filled: CoinRAG):
        filled.index.embedder = SlowEmbedder(filled.index.embedder)
        _, ticks = await ticks_during(create_coinrag_chain(filled).ainvoke(QUESTION))
        assert ticks >= 10

    def test_a_batch_answers_like_single_questions(self, filled: CoinRAG):
        chain = create_coinrag_chain(filled)
        batch = [without_timings(output) for output in chain.batch([QUESTION, OTHER])]
        assert batch == [without_timings(chain.invoke(q)) for q in (QUESTION, OTHER)]

    async def test_an_empty_store_has_an_empty_answer(self, rag: CoinRAG):
        chain = create_coinrag_chain(rag)
        for output in (
            chain.invoke(QUESTION),
            await chain.ainvoke(QUESTION),
            added(chain.stream(QUESTION)),
        ):
            assert (output["answer"], output["context"]) == ("", [])
            assert set(output["coinrag"]["usage"].values()) == {0}

    def test_a_retriever_of_ones_own_is_used(self, filled: CoinRAG):
        first = CoinRAGRetriever(rag=filled) | RunnableLambda(lambda documents: documents[:1])
        assert len(create_coinrag_chain(filled, first).invoke(QUESTION)["context"]) == 1
        assert len(create_coinrag_chain(filled, k=2).invoke(QUESTION)["context"]) == 2
        with pytest.raises(ConfigError, match="retriever"):
            create_coinrag_chain(filled, first, k=2)

    async def test_closing_a_stream_stops_the_generation(
        self, filled: CoinRAG, monkeypatch: pytest.MonkeyPatch
    ):
        streams = watch_streams(filled, monkeypatch)
        for step in (steps := create_coinrag_chain(filled).stream(QUESTION)):
            if step.get("answer"):
                break
        steps.close()
        assert_stopped(streams)
        streams.clear()
        asteps = create_coinrag_chain(filled).astream(QUESTION)
        async for step in asteps:
            if step.get("answer"):
                break
        await asteps.aclose()
        assert_stopped(streams)

    def test_retrieval_is_a_child_of_the_chain_in_traces(self, filled: CoinRAG):
        recorder = Recorder()
        for ask in (create_coinrag_chain(filled).invoke, create_coinrag_chain(filled).stream):
            recorder.runs.clear()
            list(ask(QUESTION, {"callbacks": [recorder]}))
            (chain, none), (retriever, parent) = recorder.runs
            assert (chain[0], retriever[0]) == ("coinrag_chain", "CoinRAGRetriever")
            assert none is None
            assert parent == chain[1]

    def test_an_empty_question_is_refused(self, filled: CoinRAG):
        with pytest.raises(ConfigError, match="empty"):
            create_coinrag_chain(filled).invoke("  ")

    def test_braces_in_questions_and_texts_are_plain_text(self, filled: CoinRAG):
        question = "What is {here} and {{context}} %s?"
        answer = create_coinrag_chain(filled).invoke(question)["answer"]
        assert answer == filled.ask(question).text

    def test_its_schemas_can_be_shown(self, filled: CoinRAG):
        chain = create_coinrag_chain(filled)
        assert chain.get_input_jsonschema()["anyOf"][0] == {"type": "string"}
        assert "coinrag_chain" in chain.get_graph().draw_mermaid()


class Recorder(BaseCallbackHandler):
    """Keeps the runs that start: (name, id) and the parent's id."""

    def __init__(self) -> None:
        self.runs: list[tuple[tuple[str, Any], Any]] = []

    def on_chain_start(self, *_: Any, run_id: Any, parent_run_id: Any, **more: Any) -> None:
        self.runs.append(((more["name"], run_id), parent_run_id))

    on_retriever_start = on_chain_start


def added(steps: Any) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for step in steps:
        for key, value in step.items():
            total[key] = total[key] + value if key in total else value
    return total
