"""LlamaIndex's own response modes, chat engines and agents over marked passages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import Settings, StorageContext
from llama_index.core.agent import ReActAgent
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
)
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import MockLLM
from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.retrievers import AutoMergingRetriever, QueryFusionRetriever
from llama_index.core.schema import Document, MetadataMode, QueryBundle
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import RetrieverTool, ToolMetadata

from coinrag_integrations.engine import AnswerStream, strip_handles
from coinrag_integrations.errors import BudgetError
from coinrag_integrations.llamaindex import (
    CoinRAGIndex,
    CoinRAGLLM,
    CoinRAGQueryEngine,
    CoinRAGRetriever,
    MarkedPromptHelper,
    NuggetNodeParser,
    StripHandles,
    add_documents,
    using_coinrag,
)
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig
from tests.adapters import leaving_the_loop_free
from tests.tiny import HashEmbedder

ASK = "Which lighthouse was painted white?"
LLM_MODES = [
    ResponseMode.COMPACT,
    ResponseMode.REFINE,
    ResponseMode.TREE_SUMMARIZE,
    ResponseMode.SIMPLE_SUMMARIZE,
    ResponseMode.ACCUMULATE,
    ResponseMode.COMPACT_ACCUMULATE,
]
# These need a call for every passage, or one for all of them together.
WINDOW, ANSWER = 1000, 8


@pytest.fixture
def twelve(rag: CoinRAG) -> CoinRAG:
    """Twelve documents of one nugget each, all of which every question finds."""
    rag.retrieval = RetrievalConfig(n_chunks=12, n_nuggets=12)
    add_documents(
        rag,
        [
            Document(
                id_=f"light{i}", text=f"Lighthouse {i} of Sorn was painted white in {1900 + i}."
            )
            for i in range(12)
        ],
    )
    assert len(rag.retrieve(ASK)) == 12
    return rag


class Calls:
    """What each call of the model was given."""

    def __init__(self) -> None:
        self.streams: list[AnswerStream] = []

    @property
    def resolved(self) -> list[str]:
        return [str(ref) for stream in self.streams for ref in stream.answer.spans]

    @property
    def refused(self) -> int:
        return sum(sum(stream.answer.refused.values()) for stream in self.streams)


@pytest.fixture
def calls(twelve: CoinRAG, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls, engine = Calls(), twelve.engine
    for name in ("chat", "complete"):
        original = getattr(engine, name)

        def watched(*args: Any, original: Any = original, **options: Any) -> AnswerStream:
            calls.streams.append(original(*args, **options))
            return calls.streams[-1]

        monkeypatch.setattr(engine, name, watched)
    return calls


@pytest.fixture
def llm(twelve: CoinRAG) -> CoinRAGLLM:
    return CoinRAGLLM.from_defaults(twelve, context_window=WINDOW, max_tokens=ANSWER)


def answer_in(twelve: CoinRAG, llm: CoinRAGLLM, mode: ResponseMode, **options: Any) -> Any:
    return CoinRAGIndex(twelve).as_query_engine(llm=llm, response_mode=mode, **options)


@pytest.mark.parametrize("mode", LLM_MODES)
def test_in_a_small_window_every_passage_is_read_as_kv(twelve, llm, calls: Calls, mode):
    """12 of 12 in a window of 1,000 tokens: packed, truncated or one by one, none is cut."""
    response = answer_in(twelve, llm, mode).query(ASK)
    assert len(response.source_nodes) == 12
    assert calls.refused == 0
    if mode is ResponseMode.SIMPLE_SUMMARIZE:  # what does not fit is left out whole, from the end
        nodes = CoinRAGRetriever(twelve).retrieve(ASK)
        best = [str(twelve.retrieve(ASK)[i].ref) for i in range(len(nodes))]
        assert calls.resolved == best[: len(calls.resolved)]
        assert len(calls.resolved) >= 9
    else:
        assert len(set(calls.resolved)) == 12


def test_the_stock_prompt_helper_cuts_passages(twelve, llm, calls: Calls):
    """The helper is needed: with LlamaIndex's own some of the twelve are cut, and read as text."""
    for helper in (PromptHelper, MarkedPromptHelper):
        calls.streams.clear()
        narrow = helper(context_window=WINDOW, num_output=ANSWER, chunk_size_limit=100)
        answer_in(twelve, llm, ResponseMode.COMPACT, prompt_helper=narrow).query(ASK)
        assert (len(set(calls.resolved)) == 12) == (helper is MarkedPromptHelper)
        assert (calls.refused == 0) == (helper is MarkedPromptHelper)


def test_modes_without_a_model(twelve, llm, calls: Calls):
    nothing = answer_in(twelve, llm, ResponseMode.NO_TEXT).query(ASK)
    context = answer_in(twelve, llm, ResponseMode.CONTEXT_ONLY).query(ASK)
    assert (nothing.response, len(nothing.source_nodes)) == ("", 12)
    for node in context.source_nodes:
        assert node.node.text in strip_handles(context.response)
    assert calls.streams == []


@pytest.mark.parametrize("mode", LLM_MODES)
async def test_streams_and_async_give_the_same(twelve, llm, mode):
    expected = str(answer_in(twelve, llm, mode).query(ASK))
    assert str(await answer_in(twelve, llm, mode).aquery(ASK)) == expected
    if mode in (ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE):
        return  # LlamaIndex does not stream these
    streamed = answer_in(twelve, llm, mode, streaming=True).query(ASK)
    assert "".join(streamed.response_gen) == expected


async def test_async_modes_leave_the_event_loop_free(twelve, llm):
    await leaving_the_loop_free(answer_in(twelve, llm, ResponseMode.REFINE).aquery(ASK))


def test_a_window_without_room_is_named(twelve):
    llm = CoinRAGLLM.from_defaults(twelve, context_window=150, max_tokens=ANSWER)
    with pytest.raises(BudgetError, match="a window of 150 tokens has no room"):
        answer_in(twelve, llm, ResponseMode.REFINE).query(ASK)


# -- other LLMs, and no cache ----------------------------------------------------------------------


def test_marked_prompts_without_handles_are_ordinary_prompts(twelve):
    """What a foreign LLM reads behind our stripper is what plain nodes would have given it."""
    marked = CoinRAGRetriever(twelve).retrieve(ASK)
    plain = CoinRAGRetriever(twelve, with_handles=False).retrieve(ASK)
    stripped = StripHandles().postprocess_nodes(marked)
    for nodes in (stripped, plain):
        synthesizer = get_response_synthesizer(llm=MockLLM(), response_mode="compact")
        assert "⟦" not in str(synthesizer.synthesize(ASK, nodes))
    shown = [n.node.get_content(MetadataMode.LLM) for n in marked]
    assert [strip_handles(text) for text in shown] == [
        n.node.get_content(MetadataMode.LLM) for n in plain
    ]
    assert all("⟦k:" in text for text in shown)


def test_the_index_gives_other_llms_plain_text(twelve):
    engine = CoinRAGIndex(twelve).as_query_engine(llm=MockLLM(), response_mode="compact")
    text = str(engine.query(ASK))
    assert "Lighthouse 3 of Sorn was painted white in 1903." in text
    assert "⟦" not in text


def test_with_the_cache_off_the_answer_is_ordinary_rag(twelve, llm, calls: Calls):
    off = llm.model_copy(update={"use_kv": False})
    answer_in(twelve, off, ResponseMode.COMPACT).query(ASK)
    assert calls.resolved == []
    assert all(stream.answer.usage.cached == 0 for stream in calls.streams)


def test_another_tenants_handles_are_words(model, tmp_path):
    """The same document in two tenants of one store: a handle of the one says nothing to the other."""
    options = {"model": model, "embedder": HashEmbedder()}
    document = Document(id_="d", text="The lighthouse of Sorn was painted white.")
    with CoinRAG.open(tmp_path, tenant="theirs", **options) as theirs:
        add_documents(theirs, [document])
        marked = CoinRAGRetriever(theirs).retrieve(ASK)[0].node.get_content(MetadataMode.LLM)
        assert CoinRAGLLM.from_defaults(theirs).complete(marked + "?").raw["refused"] == {}
    with CoinRAG.open(tmp_path, tenant="ours", **options) as ours:
        for _ in range(2):  # without the document, and with one of the same words
            raw = CoinRAGLLM.from_defaults(ours).complete(marked + "?").raw
            assert (raw["spans"], raw["refused"]) == ([], {"unknown": 1})
            add_documents(ours, [document])


# -- what may stand in between ---------------------------------------------------------------------


def test_handles_survive_fusion_and_reordering(twelve, llm, calls: Calls):
    fused = QueryFusionRetriever(
        [CoinRAGRetriever(twelve), CoinRAGRetriever(twelve, n_nuggets=3)],
        llm=llm,
        num_queries=1,
        similarity_top_k=12,
        use_async=False,
    )
    nodes = LongContextReorder().postprocess_nodes(fused.retrieve(ASK))
    calls.streams.clear()
    get_response_synthesizer(
        llm=llm, prompt_helper=MarkedPromptHelper.from_rag(twelve, llm)
    ).synthesize(ASK, nodes)
    assert (len(set(calls.resolved)), calls.refused) == (12, 0)


def test_nuggets_are_merged_into_their_chunk(rag: CoinRAG):
    text = "The mill is red. The mill has two wheels. The mill grinds rye for the whole town."
    document = Document(id_="mill", text=text)
    add_documents(rag, [document])
    parser = NuggetNodeParser.from_defaults(rag=rag, nugget_nodes=True)
    storage = StorageContext.from_defaults(docstore=SimpleDocumentStore())
    storage.docstore.add_documents(parser.get_nodes_from_documents([document]))
    merging = AutoMergingRetriever(CoinRAGRetriever(rag), storage, simple_ratio_thresh=0.5)
    nodes = merging.retrieve("What of the mill?")
    whole = {chunk.text for chunk in rag.engine.catalog.chunks()}
    assert nodes
    assert {node.node.get_content() for node in nodes} <= whole
    response = CoinRAGQueryEngine.from_args(rag, retriever=merging).query("What of the mill?")
    spans = response.metadata["coinrag"]["spans"]
    assert spans == [[it.node.node_id, 0, it.node.metadata["coinrag_stop"]] for it in nodes]


def test_citations_are_of_plain_text(twelve, llm):
    engine = CitationQueryEngine.from_args(
        None, llm=llm, retriever=CoinRAGRetriever(twelve, n_nuggets=3)
    )
    response = engine.query(ASK)
    assert response.source_nodes[0].node.get_text().startswith("Source 1:\n")
    assert "⟦" not in response.source_nodes[0].node.get_text()


# -- chat engines of LlamaIndex --------------------------------------------------------------------


@pytest.fixture
def settings(twelve: CoinRAG) -> Iterator[CoinRAGLLM]:
    with using_coinrag(twelve, context_window=2 * WINDOW, max_tokens=ANSWER) as llm:
        yield llm


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
async def test_chat_engines_over_three_turns(twelve, settings, calls: Calls, kind):
    engine = kind.from_defaults(retriever=CoinRAGRetriever(twelve, n_nuggets=6), llm=settings)
    engine.chat(ASK)
    stream = engine.stream_chat("And which one in 1903?")
    assert "".join(stream.response_gen).strip() == str(stream).strip()
    await engine.achat("And in 1904?")
    assert len(engine.chat_history) == 6
    assert len(set(calls.resolved)) >= 6
    assert calls.refused == 0
    assert all("⟦k:" not in (message.content or "") for message in engine.chat_history)


def test_a_chat_engine_over_a_query_engine(twelve, settings):
    engine = CondenseQuestionChatEngine.from_defaults(
        query_engine=CoinRAGIndex(twelve).as_query_engine(), llm=settings
    )
    for question in (ASK, "And in 1903?", "And in 1904?"):
        assert len(engine.chat(question).source_nodes) == 12


async def test_an_agent_reads_what_its_tool_found(twelve, settings, calls: Calls, monkeypatch):
    tool = RetrieverTool(
        retriever=CoinRAGRetriever(twelve, n_nuggets=4),
        metadata=ToolMetadata(name="lighthouses", description="Finds lighthouses."),
    )
    said = iter(
        [
            'Thought: I need a tool.\nAction: lighthouses\nAction Input: {"input": "white"}',
            "Thought: I can answer.\nAnswer: Lighthouse 3.",
        ]
    )
    original = CoinRAGLLM.astream_chat

    async def scripted(self: CoinRAGLLM, messages: Any, **options: Any) -> Any:
        """The tiny model reads the prompt; the words are put into its mouth."""
        *_, last = [it async for it in await original(self, messages, **options)]
        last.delta = last.message.content = next(said)

        async def saying() -> Any:
            yield last

        return saying()

    monkeypatch.setattr(CoinRAGLLM, "astream_chat", scripted)
    agent = ReActAgent(tools=[tool], llm=settings.model_copy(update={"context_window": 4096}))
    response = await agent.run(ASK)
    assert "Lighthouse 3" in str(response)
    assert len(set(calls.resolved)) == 4


# -- nothing global --------------------------------------------------------------------------------


def test_settings_are_as_before_behind_the_block(twelve):
    names = ("_llm", "_tokenizer", "_prompt_helper")
    before = [getattr(Settings, name) for name in names]
    with using_coinrag(twelve) as llm:
        assert Settings.llm is llm
        assert isinstance(Settings.prompt_helper, MarkedPromptHelper)
        assert len(Settings.tokenizer("The organ")) == len(
            twelve.engine.model.tokenizer.encode("The organ").ids
        )
    assert [getattr(Settings, name) for name in names] == before


def test_a_query_bundle_is_searched_by_its_words(twelve):
    bundle = QueryBundle(ASK, embedding=[0.0] * 3)
    assert len(CoinRAGRetriever(twelve).retrieve(bundle)) == 12
