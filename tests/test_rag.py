"""Documents in, answers out: the object that joins the parts, and what a store remembers."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import fields, replace

import numpy as np
import pytest

from coinrag_integrations.demo.data import demo_documents, demo_questions
from coinrag_integrations.engine import EngineConfig, GenerationConfig, PromptTemplate
from coinrag_integrations.engine.store import Disk, Limits
from coinrag_integrations.errors import (
    BudgetError,
    ConfigError,
    FingerprintMismatchError,
    ModelError,
    SpanIndexError,
    StoreError,
)
from coinrag_integrations.nuggets import NuggetProposer
from coinrag_integrations.rag import MODES, CoinRAG
from coinrag_integrations.retrieval import (
    BGEM3Embedder,
    MiniLMEmbedder,
    RetrievalConfig,
    SpanIndex,
    open_client,
)
from coinrag_integrations.settings import StoreSettings, make_embedder
from coinrag_integrations.types import Document
from tests.tiny import TEXT, HashEmbedder, save_tiny, supported_model

SHORT = GenerationConfig(max_new_tokens=6)
DOCUMENTS = [
    Document(document_id="organ", text=TEXT, metadata={"title": "Organ"}),
    Document(document_id="mill", text="The mill of Tarsk ground 40 tons of rye in 1951. " * 3),
    Document(document_id="pier", text="Ines Caldero painted the pier green. " * 3),
]
QUESTION = "Who built the tidal organ from copper pipes?"


@pytest.fixture
def filled(rag):
    rag.add(DOCUMENTS)
    rag.generation = SHORT
    return rag


def open_tiny(folder, **options) -> CoinRAG:
    options = {"embedder": HashEmbedder(), "generation": SHORT, **options}
    return CoinRAG.open(folder, **options)


@pytest.mark.parametrize("mode", MODES)
def test_asking_and_streaming_give_the_same_reply(filled, mode):
    stream = filled.stream(QUESTION, mode)
    pieces = list(stream)
    asked, streamed = filled.ask(QUESTION, mode), stream.reply
    assert all(pieces)
    assert "".join(pieces) == asked.text == streamed.text
    assert asked.spans == streamed.spans
    assert asked.answer.usage == streamed.answer.usage
    assert asked.answer.timings.retrieve_ms > 0


def test_all_modes_look_at_the_same_chunks(filled):
    wide = RetrievalConfig(n_chunks=3, n_nuggets=100)
    chunks = {
        mode: {s.ref.chunk_id for s in filled.ask(QUESTION, mode, retrieval=wide).spans}
        for mode in MODES
    }
    assert chunks["coinrag"] == chunks["chunk"] == chunks["full"]
    assert len(chunks["full"]) == 3


def test_modes_differ_in_what_is_cached(filled):
    usage = {mode: filled.ask(QUESTION, mode).answer.usage for mode in MODES}
    assert usage["full"].cached == 0
    assert usage["full"].online > usage["chunk"].online == usage["coinrag"].online
    assert usage["chunk"].cached + usage["chunk"].online == usage["full"].online
    assert usage["coinrag"].cached <= usage["chunk"].cached


def test_the_best_spans_come_from_the_document_that_knows(filled):
    reply = filled.ask(QUESTION)
    assert reply.spans[0].document_id == "organ"
    assert reply.spans[0].metadata == {"title": "Organ"}
    scores = [round(s.score, 6) for s in reply.spans]
    assert scores == sorted(scores, reverse=True)


def test_spans_retrieved_before_can_be_answered_from(filled):
    spans = filled.retrieve(QUESTION)
    stream = filled.stream_spans(QUESTION, spans, retrieve_ms=12.5)
    for _ in stream:
        pass
    assert stream.reply.text == filled.ask(QUESTION).text
    assert stream.reply.answer.timings.retrieve_ms == 12.5
    assert stream.reply.spans == tuple(spans)


def test_retrieval_and_generation_can_be_set_for_one_question(filled):
    one = filled.ask(QUESTION, retrieval=RetrievalConfig(n_chunks=1, n_nuggets=1))
    assert len(one.spans) == 1
    long = filled.ask(QUESTION, generation=GenerationConfig(max_new_tokens=1))
    assert long.answer.usage.generated == 1


def test_closing_a_stream_ends_it(filled):
    stream = filled.stream(QUESTION)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert stream.reply.answer.usage.generated >= 1


def test_an_empty_store_answers_without_spans(rag):
    reply = rag.ask(QUESTION, generation=SHORT)
    assert reply.spans == ()
    assert reply.answer.usage.cached == 0


def test_mistakes_in_a_question_are_errors_before_anything_is_searched(filled):
    with pytest.raises(ConfigError, match="mode is 'fast': use one of coinrag, chunk, full"):
        filled.ask(QUESTION, "fast")
    with pytest.raises(ConfigError, match="empty"):
        filled.ask("  ")
    with pytest.raises(BudgetError):
        filled.ask("why " * 6000)


def test_a_deleted_document_is_not_found_any_more(filled):
    assert filled.delete(["organ", "unknown"]) == 1
    assert "organ" not in {s.document_id for s in filled.retrieve(QUESTION)}


def test_many_threads_may_ask(filled):
    expected = {mode: filled.ask(QUESTION, mode).text for mode in MODES}
    wrong: list[str] = []

    def work(mode) -> None:
        for _ in range(3):
            if filled.ask(QUESTION, mode).text != expected[mode]:
                wrong.append(mode)

    threads = [threading.Thread(target=work, args=(mode,)) for mode in MODES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_proposer_of_ones_own_decides_what_is_a_nugget(engine):
    class Years:
        proposer_id = "years"

        def propose(self, text: str) -> list[str]:
            return [word for word in text.replace(".", "").split() if word.isdigit()]

    proposer: NuggetProposer = Years()
    index = SpanIndex(open_client(None), HashEmbedder(), "years-test")
    rag = CoinRAG(engine, index, proposer=proposer, generation=SHORT)
    rag.add(DOCUMENTS)
    found = {n.text for c in engine.catalog.chunks() for n in c.nuggets}
    assert {"1923", "40"} <= found
    assert all(text.isdigit() for text in found)
    assert rag.proposer is proposer


def test_a_store_is_reopened_as_it_was_built(tmp_path):
    model = save_tiny(tmp_path / "model")
    config = EngineConfig(chunk_tokens=24, coverage="all", prompt=PromptTemplate(system="Short."))
    with open_tiny(tmp_path / "s", model=model, config=config, dtype="float32") as rag:
        rag.add(DOCUMENTS)
        expected = rag.ask(QUESTION)
    with open_tiny(tmp_path / "s") as rag:
        assert rag.engine.config == config
        assert rag.ask(QUESTION).text == expected.text
        assert rag.ask(QUESTION).spans == expected.spans
        assert rag.add(DOCUMENTS).n_unchanged == 3


def test_settings_survive_a_round_trip(tmp_path):
    settings = StoreSettings(
        model="somewhere/é",
        embedder="bge-m3:folder",
        chroma="http://127.0.0.1:8000",
        dtype="bfloat16",
        limits=Limits(max_bytes=10**12, tenant_bytes={"a": 10**9, "b": 1}),
        remote="s3://bucket/kv",
        extractor="some/folder",
        engine=EngineConfig(
            chunk_tokens=99,
            context="after_prompt",
            coverage="all",
            c2kv=(4, 16),
            codec="int4",
            prompt=PromptTemplate(system='"quoted"\n', answer="It is"),
        ),
    )
    settings.save(tmp_path)
    assert StoreSettings.load(tmp_path) == settings
    assert [p.name for p in tmp_path.iterdir()] == ["store.json"]


def test_a_store_remembers_what_its_bytes_depend_on_and_not_how_it_is_used(tmp_path):
    """Every option is either remembered, or its default again: another default is another test."""
    used = {
        "on_miss": "raise",
        "max_entries": 1000,
        "memory_bytes": 1 << 20,
        "kept_bytes": 1 << 20,
        "load": "read",
        "batch_tokens": 77,
        "kernels": "torch",
        "execution": "compiled",
    }
    kept = {
        "chunk_tokens": 99,
        "context": "after_prompt",
        "coverage": "all",
        "c2kv": (8, 4),
        "codec": "int8",
    }
    prompt = PromptTemplate(system="Short.")
    assert {f.name for f in fields(EngineConfig)} == {*used, *kept, "prompt"}
    given = EngineConfig(**used, **kept, prompt=prompt)
    StoreSettings(model="m", engine=given).save(tmp_path)
    assert StoreSettings.load(tmp_path).engine == EngineConfig(**kept, prompt=prompt)
    assert json.loads((tmp_path / "store.json").read_text())["format"] == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 2}',
        '{"format": 2, "limits": {}, "engine": 3}',
        '{"format": 2, "limits": {}, "engine": {}}',
        '{"format": 2, "limits": 3, "model": "m", "engine": {"prompt": {}}}',
        '{"format": 2, "model": "m", "engine": {"prompt": {}}}',
        '{"format": 2, "limits": {"max_bytes": 0}, "model": "m", "engine": {"prompt": {}}}',
        '{"format": 2, "limits": {"max_bytes": "x"}, "model": "m", "engine": {"prompt": {}}}',
        '{"format": 2, "limits": {}, "model": "m", "engine": {"prompt": {}, "no_such": 1}}',
        '{"format": 2, "limits": {}, "model": "m", "engine": {"prompt": {}, "context": "x"}}',
        '{"format": 2, "limits": {}, "model": "m", "no_such": 1, "engine": {"prompt": {}}}',
        '{"format": 2, "limits": {}, "model": "m", "engine": {"prompt": {"user": "no slots"}}}',
    ],
)
def test_settings_that_cannot_be_read_are_an_error_of_the_store(tmp_path, content):
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(StoreError, match=r"cannot read .*store\.json"):
        CoinRAG.open(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"engine": 3}',
        '{"model": "m", "embedder": "minilm", "engine": {"chunk_tokens": 512, "prompt": {}}}',
        '{"format": 1}',
        '{"format": 3}',
        '{"format": "2"}',
        '{"format": null}',
    ],
)
def test_a_store_of_another_version_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / "store.json").write_text(content)
    for options in ({}, {"model": supported_model("llama"), "embedder": HashEmbedder()}):
        with pytest.raises(StoreError, match="is of another version of this package: build it"):
            CoinRAG.open(tmp_path, **options)
    assert (tmp_path / "store.json").read_text() == content
    assert [p.name for p in tmp_path.iterdir()] == ["store.json"]


def test_without_a_store_and_a_model_there_is_nothing_to_open(tmp_path):
    with pytest.raises(StoreError, match="there is no store in"):
        CoinRAG.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_store_is_not_opened_with_another_context_or_model(tmp_path):
    model = supported_model("llama")
    open_tiny(tmp_path, model=model).close()
    with pytest.raises(FingerprintMismatchError, match="context is alone"):
        open_tiny(tmp_path, model=model, config=EngineConfig(context="after_prompt"))
    with pytest.raises(FingerprintMismatchError, match="weights is"):
        open_tiny(tmp_path, model=supported_model("qwen2"))
    open_tiny(tmp_path, model=model).close()


def test_a_refused_opening_does_not_change_what_the_store_remembers(tmp_path):
    open_tiny(tmp_path, model=supported_model("llama")).close()
    before = (tmp_path / "store.json").read_bytes()
    with pytest.raises(FingerprintMismatchError):
        open_tiny(tmp_path, model=supported_model("qwen2"))
    assert (tmp_path / "store.json").read_bytes() == before


def test_a_store_is_not_opened_with_another_embedder(tmp_path):
    class Other(HashEmbedder):
        embedder_id = "other"

    open_tiny(tmp_path, model=supported_model("llama")).close()
    with pytest.raises(SpanIndexError, match="belongs to the embedder"):
        open_tiny(tmp_path, model=supported_model("llama"), embedder=Other())


def test_rows_that_were_lost_behind_our_back_are_made_anew(tmp_path, caplog):
    """An index that says it is whole, and holds less than the catalog, is not believed."""
    model, folder = supported_model("llama"), tmp_path / "s"
    options = {"model": model, "embedder": HashEmbedder(), "generation": SHORT}
    with CoinRAG.open(folder, **options) as rag:
        rag.add(DOCUMENTS)
        before = [rag.retrieve(document.text) for document in DOCUMENTS]
        counts = rag.index.counts()
    for left in ("none", "some"):
        if left == "none":
            shutil.rmtree(folder / "chroma")
        else:
            with CoinRAG.open(folder, **options) as rag:
                (gone, *_) = rag.engine.catalog.chunk_ids("organ")
                rag.index.delete([gone])
        with CoinRAG.open(folder, **options) as rag:
            assert rag.index.counts() == counts
            assert [rag.retrieve(document.text) for document in DOCUMENTS] == before
        assert "the index has" in caplog.text
        caplog.clear()


def test_an_embedder_object_must_be_given_again_and_the_error_says_so(tmp_path):
    model = supported_model("llama")
    open_tiny(tmp_path, model=model).close()
    with pytest.raises(ConfigError, match=r"'test-hash-64' is not known.*pass the embedder"):
        CoinRAG.open(tmp_path, model=model)


def test_a_model_that_is_not_there_leaves_no_settings(tmp_path):
    with pytest.raises(ModelError):
        open_tiny(tmp_path / "s", model=tmp_path / "no-model")
    assert not (tmp_path / "s" / "store.json").exists()


def test_embedders_are_found_by_their_names(tmp_path):
    assert make_embedder("minilm").embedder_id == MiniLMEmbedder().embedder_id
    assert make_embedder("bge-m3").embedder_id == BGEM3Embedder().embedder_id
    local = make_embedder(f"bge-m3:{tmp_path}")
    assert local.embedder_id == BGEM3Embedder(tmp_path).embedder_id
    for unknown in ("", "openai", "minilm:x", "bge"):
        with pytest.raises(ConfigError, match="is not known: use 'minilm'"):
            make_embedder(unknown)


@pytest.mark.parametrize(
    "embedder",
    [MiniLMEmbedder(), BGEM3Embedder(), BGEM3Embedder("some/folder", max_length=512)],
    ids=lambda e: e.embedder_id,
)
def test_a_store_built_with_an_object_of_ours_is_reopened_by_its_name(tmp_path, embedder):
    """The store notes the object's id; opening without the object must give the same embedder."""
    model = supported_model("llama")
    CoinRAG.open(tmp_path, model=model, embedder=embedder).close()
    with CoinRAG.open(tmp_path, model=model) as rag:
        assert rag.index.embedder.embedder_id == embedder.embedder_id


def test_options_given_at_opening_go_before_those_of_the_store_and_are_remembered(tmp_path):
    model = supported_model("llama")
    open_tiny(tmp_path, model=model, config=EngineConfig(chunk_tokens=32)).close()
    with open_tiny(tmp_path, model=model, config=EngineConfig(chunk_tokens=64)) as rag:
        assert rag.engine.config.chunk_tokens == 64
    with open_tiny(tmp_path, model=model) as rag:
        assert rag.engine.config.chunk_tokens == 64


def test_a_stores_caps_are_remembered_until_others_are_given(tmp_path):
    model = supported_model("llama")
    limits = Limits(max_bytes=10**9, tenant_bytes={"a": 10**8})
    with open_tiny(tmp_path, model=model, limits=limits) as rag:
        assert rag.engine.disk.limits == limits
    with open_tiny(tmp_path, model=model) as rag:
        assert rag.engine.disk.limits == limits
    with open_tiny(tmp_path, model=model, limits=Limits()) as rag:
        assert not rag.engine.disk.limits
    with open_tiny(tmp_path, model=model) as rag:
        assert not rag.engine.disk.limits


def test_another_encoding_stands_beside_the_first_only_where_that_is_asked_for(tmp_path):
    model = supported_model("llama")
    coded = EngineConfig(codec="int8", load="read")
    with open_tiny(tmp_path, model=model) as rag:
        rag.add(DOCUMENTS)
        n_chunks = rag.engine.catalog.counts()["chunks"]
    with pytest.raises(FingerprintMismatchError, match="codec is none, this engine has int8"):
        open_tiny(tmp_path, model=model, config=coded)
    assert StoreSettings.load(tmp_path).engine.codec == "none"
    with open_tiny(tmp_path, model=model, config=coded, add_fingerprint=True) as rag:
        first, again = rag.ask(QUESTION), rag.ask(QUESTION)
        assert first.answer.recomputed != ()
        assert again.answer.recomputed == ()
        assert rag.engine.catalog.counts()["chunks"] == n_chunks
    with open_tiny(tmp_path, model=model) as rag:  # the store was opened in this codec last
        assert rag.engine.config.codec == "int8"
        assert rag.ask(QUESTION).text == first.text


def test_pinned_documents_are_remembered_and_those_that_are_deleted_forgotten(tmp_path):
    with open_tiny(tmp_path, model=supported_model("llama")) as rag:
        rag.add(DOCUMENTS)
        rag.pin(["organ", "mill"])
        rag.pin(["mill"], pinned=False)
    with open_tiny(tmp_path, model=supported_model("llama")) as rag:
        assert rag.engine.catalog.pins() == ["organ"]
        rag.delete(["organ"])
        assert rag.engine.catalog.pins() == []


def test_pinned_documents_are_still_there_when_others_were_evicted(tmp_path):
    with open_tiny(tmp_path, model=supported_model("llama")) as rag:
        rag.add(DOCUMENTS)
        rag.pin(["mill"])
        store, pinned = rag.engine.store, set(rag.engine.catalog.chunk_ids("mill"))
        others = set(store) - pinned
        n_bytes = sum(store.path(it).stat().st_blocks * 512 for it in others)
        cap = int((rag.engine.disk.usage()[""] - n_bytes // 2) / 0.95)
        disk = Disk(tmp_path, Limits(max_bytes=cap))
        with disk.writing():
            assert disk.enforce() >= n_bytes // 2
        assert set(store) & pinned == pinned != set()
        assert set(store) & others < others
        assert rag.ask(QUESTION, generation=SHORT).spans[0].document_id == "organ"


def test_the_demos_data_are_well_formed():
    documents = {d.document_id: d for d in demo_documents()}
    assert len(documents) == len(demo_documents())
    assert all(d.text.strip() and d.metadata["title"] for d in documents.values())
    questions = demo_questions()
    assert len({q.question for q in questions}) == len(questions) >= 20
    for question in questions:
        assert question.answers
        assert 1 <= question.hops <= len(set(question.supporting))
        texts = [documents[name].text for name in question.supporting]
        for answer in question.answers:
            assert answer == answer.strip() != ""
        assert any(answer in text for answer in question.answers for text in texts)


def test_the_demos_questions_lead_to_their_articles(tmp_path):
    """Word overlap alone puts a supporting article among the first few for nearly every question."""
    embedder, documents = HashEmbedder(), demo_documents()
    vectors = embedder.embed_documents([d.text for d in documents])
    found = 0
    for question in demo_questions():
        order = np.argsort(-(vectors @ embedder.embed_query(question.question)))
        nearest = {documents[i].document_id for i in order[:15]}
        found += bool(nearest & set(question.supporting))
    assert found >= 0.7 * len(demo_questions())


def test_a_reply_is_a_value(filled):
    reply = filled.ask(QUESTION)
    assert replace(reply, spans=()).answer == reply.answer
    assert reply.text == reply.answer.text
