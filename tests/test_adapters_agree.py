from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from langchain_core.documents import Document as LangDocument
from llama_index.core.schema import Document as LlamaDocument
from llama_index.core.schema import MetadataMode

from coinrag_integrations import langchain, llamaindex
from coinrag_integrations._adapters import plain_ref
from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig, LoadedModel
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain import _convert as lang
from coinrag_integrations.llamaindex import _convert as llama
from coinrag_integrations.llamaindex.chat_engine import is_shown
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex, open_client
from coinrag_integrations.retrieval.config import Form
from tests.adapters import FIRST, QUESTION, TEXTS, WIDE
from tests.engine.c2kv.parts import trained
from tests.slots import FORMS
from tests.tiny import HashEmbedder

QUESTIONS = [QUESTION, FIRST, "When does the café open?", "Where is the wheel?"]


@pytest.fixture
def filled(rag: CoinRAG) -> CoinRAG:
    rag.generation = GenerationConfig(max_new_tokens=8)
    rag.retrieval = WIDE
    documents = [LlamaDocument(id_=n, text=t, metadata={"source": n}) for n, t in TEXTS.items()]
    llamaindex.add_documents(rag, documents)
    return rag


def lang_documents() -> list[LangDocument]:
    return [LangDocument(page_content=t, metadata={"source": n}) for n, t in TEXTS.items()]


@pytest.mark.parametrize("question", QUESTIONS)
def test_both_retrievers_return_the_same_spans(filled: CoinRAG, question: str):
    nodes = llamaindex.CoinRAGRetriever(filled, n_nuggets=6).retrieve(question)
    documents = langchain.CoinRAGRetriever(rag=filled, k=6).invoke(question)
    assert 0 < len(nodes) <= 6
    assert [llama.span_of(node) for node in nodes] == [lang.span_of(doc) for doc in documents]
    assert [node.node.node_id for node in nodes] == [doc.id for doc in documents]


def test_both_answer_alike(filled: CoinRAG):
    response = llamaindex.CoinRAGQueryEngine.from_args(filled).query(QUESTION)
    output = langchain.create_coinrag_chain(filled).invoke(QUESTION)
    assert str(response) == output["answer"] == filled.ask(QUESTION).text
    for key in ("spans", "recomputed", "usage", "finish_reason"):
        assert response.metadata["coinrag"][key] == output["coinrag"][key]


def test_what_one_adds_the_other_knows(filled: CoinRAG):
    report = langchain.add_documents(filled, lang_documents())
    assert (report.n_unchanged, report.n_encoded) == (len(TEXTS), 0)


def test_both_cut_documents_alike(filled: CoinRAG):
    parser = llamaindex.NuggetNodeParser.from_defaults(rag=filled)
    nodes = parser.get_nodes_from_documents(
        [LlamaDocument(id_=name, text=text) for name, text in TEXTS.items()]
    )
    pieces = langchain.NuggetTextSplitter.from_rag(filled).split_documents(lang_documents())
    assert [node.node_id for node in nodes] == [piece.id for piece in pieces]
    for node, piece in zip(nodes, pieces, strict=True):
        assert node.start_char_idx == piece.metadata["start_index"]
        assert llama.nuggets_of(node) == lang.nuggets_of(piece)


# -- forms of C2KV -----------------------------------------------------------------------------


@pytest.fixture
def slotted(tmp_path: Path, model: LoadedModel) -> Iterator[CoinRAG]:
    """A store with slots of 4 and 8 tokens."""
    config = EngineConfig(chunk_tokens=32, coverage="all", c2kv=(4, 8), load="read")
    with Engine(model, tmp_path / "slots", config, extractor=trained(model)) as engine:
        index = SpanIndex(open_client(None), HashEmbedder(), f"t{uuid4().hex}")
        rag = CoinRAG(engine, index, generation=GenerationConfig(max_new_tokens=8), retrieval=WIDE)
        langchain.add_documents(rag, lang_documents())
        yield rag


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", [None, 8])
def test_both_read_the_same_in_every_form(slotted: CoinRAG, form: Form, ratio: int | None):
    nodes = llamaindex.CoinRAGRetriever(slotted, form=form, ratio=ratio).retrieve(QUESTION)
    documents = langchain.CoinRAGRetriever(rag=slotted, form=form, ratio=ratio).invoke(QUESTION)
    config = replace(WIDE, form=form, ratio=ratio)
    spans = slotted.retrieve(QUESTION, config=config)
    assert [llama.span_of(node) for node in nodes] == spans
    assert [lang.span_of(document) for document in documents] == spans
    assert [node.node.node_id for node in nodes] == [document.id for document in documents]
    assert len({document.id for document in documents}) == len(spans)
    assert {span.ref.ratio for span in spans} <= {1, ratio or 4}

    engine = llamaindex.CoinRAGQueryEngine.from_args(slotted, form=form, ratio=ratio)
    output = langchain.create_coinrag_chain(slotted, form=form, ratio=ratio).invoke(QUESTION)
    response, reply = engine.query(QUESTION), slotted.ask(QUESTION, retrieval=config)
    assert str(response) == output["answer"] == reply.text
    for report in (response.metadata["coinrag"], output["coinrag"]):
        assert report["spans"] == [plain_ref(ref) for ref in reply.answer.spans]
        assert (report["recomputed"], report["refused"]) == ([], {})
        assert report["usage"]["cached"] == reply.answer.usage.cached


@pytest.mark.parametrize("n_raw", [0, 2, 99])
def test_both_keep_as_many_chunks_whole(slotted: CoinRAG, n_raw: int):
    options = {"form": "hybrid", "n_raw": n_raw}
    nodes = llamaindex.CoinRAGRetriever(slotted, **options).retrieve(QUESTION)
    documents = langchain.CoinRAGRetriever(rag=slotted, **options).invoke(QUESTION)
    spans = slotted.retrieve(QUESTION, config=replace(WIDE, **options))
    n_whole = min(n_raw, len(spans))
    assert [span.ref.ratio for span in spans] == [1] * n_whole + [4] * (len(spans) - n_whole)
    assert [llama.span_of(node) for node in nodes] == spans
    assert [lang.span_of(document) for document in documents] == spans

    index = llamaindex.CoinRAGIndex(slotted)
    response = index.as_query_engine(**options).query(QUESTION)
    chat = index.as_chat_engine("context", **options).chat(QUESTION)
    output = langchain.create_coinrag_chain(slotted, **options).invoke(QUESTION)
    for report in (response.metadata, chat.metadata, output):
        assert report["coinrag"]["spans"] == [plain_ref(span.ref) for span in spans]
    own = llamaindex.CoinRAGQueryEngine.from_args(slotted, **options).query(QUESTION)
    assert str(own) == str(response) == output["answer"]


@pytest.mark.parametrize("form", ["c2kv", "hybrid", "slots", "background"])
def test_slots_are_read_out_of_marked_prompts(slotted: CoinRAG, form: Form):
    spans = slotted.retrieve(QUESTION, config=replace(WIDE, form=form))
    nodes = llamaindex.CoinRAGRetriever(slotted, form=form).retrieve(QUESTION)
    documents = langchain.CoinRAGRetriever(rag=slotted, form=form).invoke(QUESTION)
    shown = [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes]
    for text, document in zip(shown, documents, strict=True):
        assert text.endswith(f"\n\n{document.page_content}")  # behind metadata that are shown
    assert any("⟦k4:" in text for text in shown)
    prompt = "\n".join([*shown, "Who?"])
    completed = llamaindex.CoinRAGLLM.from_defaults(slotted, max_tokens=4).complete(prompt)
    said = langchain.ChatCoinRAG(rag=slotted, max_tokens=4).invoke(prompt)
    for found in (completed.raw, said.response_metadata["coinrag"]):
        assert found["spans"] == [plain_ref(span.ref) for span in spans]
        assert (found["recomputed"], found["refused"]) == ([], {})


def test_slots_of_what_a_conversation_shows_whole_are_not_added(slotted: CoinRAG):
    """Of form hybrid, the best chunk of one turn is among the others of the next."""
    wide = replace(WIDE, n_chunks=len(TEXTS), form="hybrid")
    slotted.retrieval = wide
    chat = llamaindex.CoinRAGIndex(slotted).as_chat_engine("context")
    seen: dict[tuple[str, int, int], int] = {}
    for question in QUESTIONS:
        (best, *others) = slotted.retrieve(question)
        spans = [tuple(it) for it in chat.chat(question).metadata["coinrag"]["spans"]]
        assert len(set(spans)) == len(spans)
        assert tuple(plain_ref(best.ref)) in spans
        for span in others:
            known = seen.get((span.ref.chunk_id, span.ref.start, span.ref.stop))
            assert (tuple(plain_ref(span.ref)) in spans) == (known != 1)
        for span in (best, *others):
            key = (span.ref.chunk_id, span.ref.start, span.ref.stop)
            seen[key] = min(seen.get(key, 99), span.ref.ratio)
    assert sum(ratio == 1 for ratio in seen.values()) > 1


@pytest.mark.parametrize(
    ("wanted", "shown", "is_there"),
    [
        ("c:0:8", {"c:0:8"}, True),
        ("c:0:8:4", {"c:0:12"}, True),
        ("c:2:5", {"c:0:12"}, True),
        ("c:0:8:8", {"c:0:8:4"}, True),
        ("c:0:8", {"c:0:8:4"}, False),
        ("c:0:8:4", {"c:0:7"}, False),
        ("c:0:8:4", {"d:0:8"}, False),
        ("node-1", {"node-1"}, True),
        ("node-1", {"c:0:8", "x:y:z", "c:8:0", ""}, False),
    ],
)
def test_what_a_conversation_shows(wanted: str, shown: set[str], is_there: bool):
    assert is_shown(wanted, shown) == is_there


def test_slots_whose_words_were_altered_are_read_as_text(slotted: CoinRAG):
    (document, *others) = langchain.CoinRAGRetriever(rag=slotted, form="c2kv").invoke(QUESTION)
    changed = document.model_copy(update={"page_content": document.page_content + "!"})
    answers = langchain.CoinRAGGenerator(rag=slotted)
    assert answers.invoke({"question": QUESTION, "documents": [changed, *others]})
    assert isinstance(lang.context_of(changed), str)
    (node, *_) = llamaindex.CoinRAGRetriever(slotted, form="c2kv").retrieve(QUESTION)
    shown = node.node.get_content(metadata_mode=MetadataMode.LLM)
    prompt = shown.replace("⟦/k⟧", "!⟦/k⟧")
    completed = llamaindex.CoinRAGLLM.from_defaults(slotted, max_tokens=4).complete(prompt)
    assert completed.raw["refused"] == {"altered": 1}
    assert completed.raw["spans"] == []


@pytest.mark.parametrize("ratio", [0, -4, "four", None, [4], 2**40])
def test_a_ratio_that_is_none_makes_a_text(slotted: CoinRAG, ratio: object):
    """Metadata may have been through any database."""
    spans = slotted.retrieve(QUESTION)
    late = next(span for span in spans if span.ref.start)
    document = lang.document_of(late)
    document.metadata["coinrag_ratio"] = ratio
    assert lang.context_of(document) == late.text


def test_slots_that_are_not_made_any_more_are_read_as_text(slotted: CoinRAG):
    (document, *_) = langchain.CoinRAGRetriever(rag=slotted, form="c2kv").invoke(QUESTION)
    document.metadata["coinrag_ratio"] = 16
    stream = slotted.stream_spans(QUESTION, [lang.span_of(document)])
    assert "".join(stream)
    assert (stream.reply.spans, stream.reply.answer.refused) == ((), {"unknown": 1})
    assert stream.reply.answer.usage.online > len(document.page_content.split())


def test_spans_and_slots_of_the_same_tokens_are_not_one(slotted: CoinRAG):
    whole = langchain.CoinRAGRetriever(rag=slotted, form="chunks").invoke(QUESTION)
    slots = langchain.CoinRAGRetriever(rag=slotted, form="c2kv").invoke(QUESTION)
    assert {document.id for document in whole}.isdisjoint(document.id for document in slots)
    assert all("coinrag_ratio" not in document.metadata for document in whole)
    assert all(document.metadata["coinrag_ratio"] == 4 for document in slots)


def test_forms_go_to_the_retriever_or_to_who_makes_it(slotted: CoinRAG):
    of_index = llamaindex.CoinRAGIndex(slotted).as_query_engine(form="c2kv", ratio=8)
    chat = llamaindex.CoinRAGIndex(slotted).as_chat_engine("context", form="c2kv", ratio=8)
    for response in (of_index.query(QUESTION), chat.chat(QUESTION)):
        spans = response.metadata["coinrag"]["spans"]
        assert spans
        assert all(span[3:] == [8] for span in spans)
    ours, theirs = (
        llamaindex.CoinRAGRetriever(slotted),
        langchain.CoinRAGRetriever(rag=slotted),
    )
    with pytest.raises(ConfigError, match="form"):
        llamaindex.CoinRAGQueryEngine.from_args(slotted, retriever=ours, form="c2kv")
    with pytest.raises(ConfigError, match="form"):
        llamaindex.CoinRAGChatEngine.from_defaults(slotted, retriever=ours, ratio=4)
    with pytest.raises(ConfigError, match="form"):
        langchain.create_coinrag_chain(slotted, theirs, form="c2kv")
    for make in (
        lambda: llamaindex.CoinRAGQueryEngine.from_args(slotted, retriever=ours, n_raw=2),
        lambda: llamaindex.CoinRAGChatEngine.from_defaults(slotted, retriever=ours, n_raw=2),
        lambda: langchain.create_coinrag_chain(slotted, theirs, n_raw=2),
    ):
        with pytest.raises(ConfigError, match="n_raw"):
            make()
    with pytest.raises(ConfigError, match="ratio=0"):
        llamaindex.CoinRAGRetriever(slotted, form="c2kv", ratio=0)
    with pytest.raises(ConfigError, match="n_raw=-1 must be a whole number of at least 0"):
        llamaindex.CoinRAGRetriever(slotted, form="hybrid", n_raw=-1)
    with pytest.raises(ConfigError, match="n_raw=-1 must be a whole number of at least 0"):
        langchain.CoinRAGRetriever(rag=slotted, form="hybrid", n_raw=-1).invoke(QUESTION)
