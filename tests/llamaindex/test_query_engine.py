from __future__ import annotations

from typing import Any

import pytest
from llama_index.core import Settings
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.callbacks import (
    CallbackManager,
    CBEventType,
    LlamaDebugHandler,
    TokenCountingHandler,
)
from llama_index.core.postprocessor import LongContextReorder, SimilarityPostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from coinrag_integrations.engine import strip_handles
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex import (
    CoinRAGQueryEngine,
    CoinRAGRetriever,
    CoinRAGSynthesizer,
    KVComposeEndEvent,
    NuggetNodeParser,
)
from coinrag_integrations.llamaindex._convert import span_of
from coinrag_integrations.rag import CoinRAG
from tests.adapters import (
    FIRST,
    QUESTION,
    SlowEmbedder,
    assert_stopped,
    cancel_after_first_piece,
    ticks_during,
    watch_streams,
)
from tests.llamaindex.recorder import Recorder

SYNTHESIS = [
    "SynthesizeStartEvent",
    "KVComposeStartEvent",
    "KVComposeEndEvent",
    "LLMCompletionStartEvent",
    "LLMCompletionEndEvent",
    "SynthesizeEndEvent",
]
QUERY_EVENTS = [
    "QueryStartEvent",
    "RetrievalStartEvent",
    "RetrievalEndEvent",
    "SynthesizeStartEvent",
    "SynthesizeEndEvent",
    "QueryEndEvent",
]


def test_the_answer_is_the_stores_own(filled: CoinRAG):
    response = CoinRAGQueryEngine.from_args(filled).query(QUESTION)
    assert str(response) == filled.ask(QUESTION).text != ""
    assert [n.node.text for n in response.source_nodes] == [
        s.text for s in filled.retrieve(QUESTION)
    ]


def test_the_answer_comes_from_cached_kv(filled: CoinRAG):
    found = CoinRAGQueryEngine.from_args(filled).query(QUESTION).metadata["coinrag"]
    n_entries = sum(stop - start for _, start, stop in found["spans"])
    layout, prompt = filled.engine.model.layout, filled.engine.prompt
    assert found["usage"]["cached"] == n_entries + len(prompt.head) > len(prompt.head)
    assert found["timings"]["bytes_read"] == n_entries * layout.bytes_per_entry
    assert found["usage"]["online"] == len(prompt.tail(QUESTION)) < n_entries
    assert found["usage"]["generated"] <= 8
    assert found["recomputed"] == []
    assert found["timings"]["retrieve_ms"] > 0
    assert found["timings"]["ttft_ms"] > 0


def test_metadata_of_the_nodes_is_there_as_in_other_query_engines(filled: CoinRAG):
    response = CoinRAGQueryEngine.from_args(filled).query(QUESTION)
    for found in response.source_nodes:
        assert response.metadata[found.node.node_id] == found.node.metadata


def test_a_streamed_answer_is_the_same_text(filled: CoinRAG):
    whole = CoinRAGQueryEngine.from_args(filled).query(QUESTION)
    streamed = CoinRAGQueryEngine.from_args(filled, streaming=True).query(QUESTION)
    assert isinstance(streamed, StreamingResponse)
    assert streamed.metadata["coinrag"]["usage"]["generated"] == 0
    pieces = list(streamed.response_gen)
    assert len(pieces) > 1
    assert "".join(pieces) == str(whole)
    for key in ("spans", "usage", "finish_reason"):
        assert streamed.metadata["coinrag"][key] == whole.metadata["coinrag"][key]
    assert str(CoinRAGQueryEngine.from_args(filled, streaming=True).query(QUESTION)) == str(whole)


def test_closing_a_stream_stops_the_generation(filled: CoinRAG, monkeypatch: pytest.MonkeyPatch):
    streams = watch_streams(filled, monkeypatch)
    response = CoinRAGQueryEngine.from_args(filled, streaming=True).query(QUESTION)
    next(response.response_gen)
    response.response_gen.close()
    assert_stopped(streams)
    assert 0 < response.metadata["coinrag"]["usage"]["generated"] < 8


async def test_async_answers_are_the_same(filled: CoinRAG):
    whole = CoinRAGQueryEngine.from_args(filled).query(QUESTION)
    response = await CoinRAGQueryEngine.from_args(filled).aquery(QUESTION)
    assert str(response) == str(whole)
    assert response.source_nodes == whole.source_nodes
    streamed = await CoinRAGQueryEngine.from_args(filled, streaming=True).aquery(QUESTION)
    assert isinstance(streamed, AsyncStreamingResponse)
    pieces = [piece async for piece in streamed.async_response_gen()]
    assert "".join(pieces) == str(whole)
    for key in ("spans", "usage", "finish_reason"):
        assert streamed.metadata["coinrag"][key] == whole.metadata["coinrag"][key]


async def test_asking_leaves_the_event_loop_free(filled: CoinRAG):
    filled.index.embedder = SlowEmbedder(filled.index.embedder)
    _, ticks = await ticks_during(CoinRAGQueryEngine.from_args(filled).aquery(QUESTION))
    assert ticks >= 10


async def test_cancelling_stops_the_generation(filled: CoinRAG, monkeypatch: pytest.MonkeyPatch):
    streams = watch_streams(filled, monkeypatch)
    engine = CoinRAGQueryEngine.from_args(filled)
    await cancel_after_first_piece(engine.aquery(QUESTION), streams)


async def test_closing_an_async_stream_stops_the_generation(
    filled: CoinRAG, monkeypatch: pytest.MonkeyPatch
):
    streams = watch_streams(filled, monkeypatch)
    response = await CoinRAGQueryEngine.from_args(filled, streaming=True).aquery(QUESTION)
    await anext(response.response_gen)
    await response.response_gen.aclose()
    assert_stopped(streams)
    assert 0 < response.metadata["coinrag"]["usage"]["generated"] < 8


async def test_every_step_is_announced(filled: CoinRAG, recorder: Recorder):
    engine = CoinRAGQueryEngine.from_args(filled)
    engine.query(QUESTION)
    assert [n for n in recorder.names if n in QUERY_EVENTS] == QUERY_EVENTS
    recorder.names.clear()
    await engine.aquery(QUESTION)
    assert [n for n in recorder.names if n in QUERY_EVENTS] == QUERY_EVENTS


def test_callbacks_hear_of_query_retrieval_and_synthesis(filled: CoinRAG):
    handler = LlamaDebugHandler(print_trace_on_end=False)
    manager = CallbackManager([handler])
    CoinRAGQueryEngine.from_args(filled, callback_manager=manager).query(QUESTION)
    kinds = (CBEventType.QUERY, CBEventType.RETRIEVE, CBEventType.SYNTHESIZE, CBEventType.LLM)
    for kind in kinds:
        assert len(handler.get_event_pairs(kind)) == 1, kind


def test_tokens_are_counted_as_the_model_counts(filled: CoinRAG):
    counter = TokenCountingHandler(tokenizer=str.split)
    manager = CallbackManager([counter])
    engine = CoinRAGQueryEngine.from_args(filled, callback_manager=manager)
    usage = engine.query(QUESTION).metadata["coinrag"]["usage"]
    assert counter.prompt_llm_token_count == usage["cached"] + usage["online"]
    assert counter.completion_llm_token_count == usage["generated"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_empty_store_is_not_asked(rag: CoinRAG, streaming: bool):
    engine = CoinRAGQueryEngine.from_args(rag, streaming=streaming)
    assert str(engine.query(QUESTION)) == "Empty Response"
    response = await engine.aquery(QUESTION)
    text = await response._async_str() if streaming else str(response)
    assert text == "Empty Response"
    assert set(response.metadata["coinrag"]["usage"].values()) == {0}


def test_postprocessors_choose_and_order(filled: CoinRAG):
    cutoff = SimilarityPostprocessor(similarity_cutoff=0.3)
    engine = CoinRAGQueryEngine.from_args(
        filled, node_postprocessors=[cutoff, LongContextReorder()]
    )
    response = engine.query(QUESTION)
    assert 0 < len(response.source_nodes) < len(filled.retrieve(QUESTION))
    assert all(node.score >= 0.3 for node in response.source_nodes)
    nothing = SimilarityPostprocessor(similarity_cutoff=2.0)
    engine = CoinRAGQueryEngine.from_args(filled, node_postprocessors=[nothing])
    assert str(engine.query(QUESTION)) == "Empty Response"


async def test_retrieve_and_synthesize_are_the_two_halves_of_query(
    filled: CoinRAG, recorder: Recorder
):
    engine, bundle = CoinRAGQueryEngine.from_args(filled), QueryBundle(QUESTION)
    expected = str(engine.query(QUESTION))
    recorder.names.clear()
    nodes = engine.retrieve(bundle)
    listed = NodeWithScore(node=TextNode(text="Only listed."))
    response = engine.synthesize(bundle, nodes, [listed])
    assert (str(response), response.source_nodes) == (expected, [*nodes, listed])
    assert recorder.names[-6:] == SYNTHESIS
    assert str(await engine.asynthesize(bundle, await engine.aretrieve(bundle))) == expected


def test_nodes_of_the_parser_answer_too(filled: CoinRAG, documents: list[Any]):
    nodes = NuggetNodeParser.from_defaults(rag=filled).get_nodes_from_documents(documents[:1])
    response = CoinRAGQueryEngine.from_args(filled).synthesize(
        QueryBundle(QUESTION), [NodeWithScore(node=node, score=1.0) for node in nodes]
    )
    spans = response.metadata["coinrag"]["spans"]
    assert [chunk_id for chunk_id, _, _ in spans] == [node.node_id for node in nodes]


def test_foreign_and_rewritten_nodes_are_read_as_text(filled: CoinRAG):
    engine, bundle = CoinRAGQueryEngine.from_args(filled), QueryBundle(QUESTION)
    first, second, *_ = engine.retrieve(bundle)
    foreign = NodeWithScore(node=TextNode(id_="theirs", text="Something else."), score=1.0)
    second.node.set_content("The name is hidden.")
    response = engine.synthesize(bundle, [first, foreign, second])
    used = response.metadata["coinrag"]
    assert (used["spans"], used["refused"]) == ([_triple(first)], {"altered": 1})
    shown = strip_handles(second.node.get_content(MetadataMode.LLM))
    assert "The name is hidden." in shown
    context = [span_of(first), "Something else.", shown]
    assert str(response) == "".join(filled.stream_spans(QUESTION, context))
    alone = engine.synthesize(bundle, [first]).metadata["coinrag"]["usage"]
    n_read = len(filled.engine.prompt.context(context[1:])[0].ids)
    assert used["usage"]["online"] == alone["online"] + n_read


def test_texts_with_marks_are_read_as_kv_and_refusals_are_counted(
    filled: CoinRAG, recorder: Recorder
):
    synthesizer = CoinRAGSynthesizer(filled)
    first, second, *_ = CoinRAGRetriever(filled).retrieve(QUESTION)
    texts = [node.node.get_content(MetadataMode.LLM) for node in (first, second)]
    assert synthesizer.get_response(QUESTION, [texts[0], texts[1].replace("⟦/k⟧", ".")])
    (event,) = [it for it in recorder.events if isinstance(it, KVComposeEndEvent)]
    assert (event.n_spans, event.n_refused) == (1, 1)


def _triple(node: NodeWithScore) -> list[Any]:
    return [node.node.metadata[f"coinrag_{key}"] for key in ("chunk_id", "start", "stop")]


def test_a_retriever_of_ones_own_is_used(filled: CoinRAG):
    retriever = CoinRAGRetriever(filled, n_nuggets=1)
    engine = CoinRAGQueryEngine.from_args(filled, retriever=retriever)
    assert engine.retriever is retriever
    assert len(engine.query(QUESTION).source_nodes) == 1
    with pytest.raises(ConfigError, match="n_nuggets"):
        CoinRAGQueryEngine.from_args(filled, retriever=retriever, n_nuggets=2)


def test_an_empty_question_is_refused(filled: CoinRAG):
    with pytest.raises(ConfigError, match="empty"):
        CoinRAGQueryEngine.from_args(filled).query("  ")


def test_braces_in_questions_and_texts_are_plain_text(filled: CoinRAG):
    question = "What is {here} and {{context_str}} %s?"
    answer = str(CoinRAGQueryEngine.from_args(filled).query(question))
    assert answer == filled.ask(question).text


def test_global_settings_are_left_alone(filled: CoinRAG):
    before = (Settings._llm, Settings._embed_model, Settings._tokenizer)
    CoinRAGQueryEngine.from_args(filled).query(FIRST)
    assert (Settings._llm, Settings._embed_model, Settings._tokenizer) == before
