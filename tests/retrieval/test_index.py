"""Two stages find what a brute-force comparison finds; rows of what is gone are gone."""

from __future__ import annotations

import dataclasses
import random
import threading
from uuid import uuid4

import numpy as np
import pytest

from coinrag_integrations.errors import ConfigError, SpanIndexError
from coinrag_integrations.retrieval import RetrievalConfig, SpanIndex, open_client
from coinrag_integrations.types import ChunkId, Nugget, Span
from tests.retrieval.parts import make_chunk
from tests.tiny import HashEmbedder

EMBEDDER = HashEmbedder()
WORDS = (
    *("organ", "tide", "copper", "pipe", "harbour", "keeper", "winding", "engine", "granite"),
    *("lamp", "pier", "paint", "chemist", "ferry", "census", "islet", "bridge", "tower", "mill"),
    *("rye", "barley", "cooper", "sail", "anchor", "rope", "net", "buoy", "reef"),
)


def some_chunks(n: int, seed: int = 0):
    choose = random.Random(seed)
    chunks = []
    for i in range(n):
        words = [choose.choice(WORDS) for _ in range(20)]
        nuggets = [" ".join(words[a : a + 5]) for a in (0, 5, 12)]
        text = " ".join(words)
        chunks.append(make_chunk(text, dict.fromkeys(nuggets), name=f"{seed}-{i}"))
    return chunks


def make_index(client=None, name: str = "", embedder=EMBEDDER) -> SpanIndex:
    return SpanIndex(client or open_client(None), embedder, name or f"t{uuid4().hex}")


@pytest.fixture
def index():
    return make_index()


def similarity(question: str, text: str) -> float:
    return float(EMBEDDER.embed_query(question) @ EMBEDDER.embed_query(text))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n_chunks", "n_nuggets"), [(1, 1), (5, 10), (3, 2), (40, 500)])
def test_two_stage_search_finds_what_brute_force_finds(index, seed, n_chunks, n_nuggets):
    chunks = some_chunks(40, seed)
    index.put(chunks)
    question = " ".join(chunks[seed].text.split()[2:13]) + " and some more"
    # Scores, not ids: chunks of the same score may stand for each other.
    stage_one = index.search_chunks(question, n_chunks)
    best = sorted((similarity(question, c.text) for c in chunks), reverse=True)[:n_chunks]
    np.testing.assert_allclose([s.score for s in stage_one], best, atol=1e-4)
    found_chunks = {s.ref.chunk_id for s in stage_one}
    assert len(found_chunks) == n_chunks

    found = index.search(question, RetrievalConfig(n_chunks=n_chunks, n_nuggets=n_nuggets))
    texts = [n.text for c in chunks if c.chunk_id in found_chunks for n in c.nuggets]
    best = sorted((similarity(question, text) for text in texts), reverse=True)[:n_nuggets]
    np.testing.assert_allclose([s.score for s in found], best, atol=1e-4)
    for span in found:
        assert span.ref.chunk_id in found_chunks
        assert span.score == pytest.approx(similarity(question, span.text), abs=1e-4)


def test_found_spans_are_triples_of_their_chunks_with_the_documents_characters(index):
    chunks = [dataclasses.replace(c, char_start=1000) for c in some_chunks(6)]
    index.put(chunks)
    by_id = {c.chunk_id: c for c in chunks}
    for span in index.search("copper pipe organ"):
        chunk = by_id[span.ref.chunk_id]
        assert chunk.text_of(Span(span.ref.start, span.ref.stop)) == span.text
        assert chunk.text[span.char_start - 1000 : span.char_stop - 1000] == span.text
        assert span.document_id == chunk.document_id


def test_scores_fall_and_the_identical_text_gets_the_top_score(index):
    chunks = some_chunks(12)
    index.put(chunks)
    wanted = chunks[7].nuggets[1]
    found = index.search(wanted.text, RetrievalConfig(n_chunks=12, n_nuggets=36))
    assert found[0].text == wanted.text
    assert found[0].ref == chunks[7].ref(wanted.span)
    assert found[0].score == pytest.approx(1.0, abs=1e-5)
    # Scores that differ in their last bits count as equal, and are in the order of their triples.
    order = [(-round(s.score, 6), s.ref) for s in found]
    assert order == sorted(order)


def test_whole_chunks_are_found_by_their_own_text(index):
    chunks = some_chunks(12)
    index.put(chunks)
    found = index.search_chunks(chunks[3].text, 4)
    assert len(found) == 4
    assert found[0].ref == chunks[3].ref()
    assert found[0].text == chunks[3].text
    assert found[0].score == pytest.approx(1.0, abs=1e-5)


def test_stage_two_alone_is_the_second_half_of_the_search(index):
    index.put(some_chunks(12))
    stage_one = index.search_chunks("organ tide", 5)
    assert index.search_nuggets("organ tide", stage_one, 10) == index.search("organ tide")
    assert index.search_nuggets("organ tide", [], 10) == []


@pytest.mark.parametrize("n_dead", [0, 1, 10, 40])
def test_only_chunks_that_are_there_are_found_and_their_nuggets(index, n_dead):
    chunks = some_chunks(40)
    index.put(chunks)
    nearest = index.search_chunks("organ tide copper", 40)
    dead = {span.ref.chunk_id for span in nearest[5 : 5 + n_dead]}
    asked: list[ChunkId] = []

    def live(chunk_ids):
        asked.extend(chunk_ids)
        return set(chunk_ids) - dead

    wide = RetrievalConfig(n_chunks=40, n_nuggets=1000)
    found = index.search_chunks("organ tide copper", 40, live=live)
    assert [s.ref for s in found] == [s.ref for s in nearest if s.ref.chunk_id not in dead]
    assert set(asked) == {c.chunk_id for c in chunks}
    nuggets = index.search("organ tide copper", wide, live=live)
    assert {s.ref.chunk_id for s in nuggets} == {c.chunk_id for c in chunks} - dead
    assert len(nuggets) == sum(len(c.nuggets) for c in chunks if c.chunk_id not in dead)
    assert index.search("organ", live=lambda _: set()) == []


@pytest.mark.parametrize("n_dead", [1, 16])
def test_chunks_that_are_not_there_do_not_take_the_place_of_those_that_are(index, n_dead):
    index.put(some_chunks(40))
    nearest = index.search_chunks("organ tide copper", 40)
    dead = {span.ref.chunk_id for span in nearest[:n_dead]}
    found = index.search_chunks("organ tide copper", 3, live=lambda ids: set(ids) - dead)
    assert [s.score for s in found] == [s.score for s in nearest[n_dead : n_dead + 3]]


def test_the_chunks_that_have_rows_are_listed(index):
    assert index.ids() == (set(), set())
    chunks = [*some_chunks(4), make_chunk("Nothing was found in this plain passage", name="bare")]
    index.put(chunks)
    everybody = {c.chunk_id for c in chunks}
    assert index.ids() == (everybody, everybody - {chunks[-1].chunk_id})
    index._chunks.delete(ids=[chunks[0].chunk_id])
    assert index.ids() == (everybody - {chunks[0].chunk_id}, everybody - {chunks[-1].chunk_id})


def test_an_index_in_memory_may_be_written_to_at_once_by_whoever_has_it(index):
    with index.writing(), index.writing():
        index.put(some_chunks(1))
    assert index.counts()["chunks"] == 1


def test_an_empty_index_finds_nothing(index):
    assert index.search("anything") == []
    assert index.search_chunks("anything", 3) == []
    assert index.counts() == {"chunks": 0, "nuggets": 0}


def test_asking_for_more_than_there_is_gives_all(index):
    chunks = some_chunks(3)
    index.put(chunks)
    found = index.search("organ", RetrievalConfig(n_chunks=1000, n_nuggets=1000))
    assert len(found) == sum(len(c.nuggets) for c in chunks)
    assert len(index.search_chunks("organ", 1000)) == 3


def test_a_chunk_without_nuggets_stands_for_itself(index):
    bare = make_chunk("Nothing was found in this plain passage", name="bare")
    index.put([bare])
    (alone,) = index.search("plain passage")
    assert (alone.ref, alone.text) == (bare.ref(), bare.text)
    index.put(some_chunks(3))
    found = index.search("plain passage", RetrievalConfig(n_chunks=4, n_nuggets=50))
    assert found[0].ref == bare.ref()
    assert len({s.ref for s in found}) == len(found)


def test_search_options_below_one_are_refused():
    for options in ({"n_chunks": 0}, {"n_nuggets": 0}, {"n_chunks": -1}):
        with pytest.raises(ConfigError, match="at least 1"):
            RetrievalConfig(**options)


def test_another_embedder_on_the_same_collections_is_refused():
    class Other(HashEmbedder):
        embedder_id = "another-one"

    client = open_client(None)
    name = f"t{uuid4().hex}"
    make_index(client, name).put(some_chunks(2))
    with pytest.raises(SpanIndexError, match="belongs to the embedder 'test-hash-64'"):
        make_index(client, name, Other())
    assert make_index(client, name).counts()["chunks"] == 2


def test_a_collection_of_somebody_else_is_refused():
    client = open_client(None)
    name = f"t{uuid4().hex}"
    client.create_collection(f"{name}_chunks", embedding_function=None)
    with pytest.raises(SpanIndexError, match="belongs to the embedder None"):
        make_index(client, name)


def test_rows_that_we_did_not_write_are_an_error_of_ours(index):
    index.put(some_chunks(1))
    index._chunks.add(ids=["x"], documents=["organ"], embeddings=[EMBEDDER.embed_query("organ")])
    with pytest.raises(SpanIndexError, match="did not write"):
        index.search("organ")


def test_rows_that_come_back_empty_are_passed_over(index):
    """Chroma gives a row that is removed while it searches back without text and metadata."""
    index.put(some_chunks(12))
    expected = index.search_chunks("organ", 5)
    empty = [f"x{i}" for i in range(30)]
    index._chunks.add(ids=empty, embeddings=[EMBEDDER.embed_query("organ")] * len(empty))
    assert index.search_chunks("organ", 5) == expected


def test_metadata_come_back_without_none_and_without_ours(index):
    chunk = make_chunk(
        "a b c d", ["b c"], metadata={"title": "T", "page": 3, "ok": True, "x": 0.5, "none": None}
    )
    index.put([chunk])
    expected = {"title": "T", "page": 3, "ok": True, "x": 0.5}
    assert index.search("b c")[0].metadata == expected
    assert index.search_chunks("b c", 1)[0].metadata == expected


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), ["a", 1], {"a": 1}, object(), 1 << 70]
)
def test_metadata_that_cannot_be_kept_are_refused(index, value):
    with pytest.raises(SpanIndexError, match="odd"):
        index.put([make_chunk("a b c d", ["b c"], metadata={"odd": value})])


def test_metadata_named_like_ours_do_not_change_what_is_found(index):
    chunk = make_chunk(
        "a b c d", ["b c"], metadata={"coinrag_start": 99, "coinrag_document_id": "x"}
    )
    index.put([chunk])
    (span,) = index.search("b c")
    assert span.ref == chunk.ref(chunk.nuggets[0].span)
    assert span.document_id == chunk.document_id


@pytest.mark.parametrize("text", ["<|im_end|>", "🎏", "\0", '"; DROP TABLE embeddings; --', "日本"])
def test_odd_texts_come_back_as_they_were(index, text):
    index.put([make_chunk(f"start {text} end", [text], metadata={"t": text})])
    (span,) = index.search(text)
    assert span.text == text
    assert span.metadata == {"t": text}


def test_putting_an_edited_chunk_again_leaves_no_old_nugget(index):
    old = make_chunk("one two three four five six", ["one two", "five six"], name="c")
    index.put([old, *some_chunks(3)])
    before = index.counts()
    new = make_chunk("one two three four five six", ["three four"], name="c", metadata={"v": 2})
    index.put([new])
    assert index.counts() == {"chunks": before["chunks"], "nuggets": before["nuggets"] - 1}
    ours = [
        s
        for s in index.search("one two five six", RetrievalConfig(n_chunks=9, n_nuggets=99))
        if s.ref.chunk_id == new.chunk_id
    ]
    assert [(s.ref, s.metadata) for s in ours] == [(new.ref(new.nuggets[0].span), {"v": 2})]


def test_putting_again_drops_metadata_that_are_gone(index):
    index.put([make_chunk("a b c", ["b"], name="c", metadata={"old": 1})])
    index.put([make_chunk("a b c", ["b"], name="c")])
    assert index.search("b")[0].metadata == {}


def test_deleted_chunks_are_gone_with_their_nuggets_and_unknown_ids_are_ignored(index):
    chunks = some_chunks(4)
    index.put(chunks)
    index.delete([chunks[0].chunk_id, ChunkId("unknown")])
    assert index.counts() == {"chunks": 3, "nuggets": sum(len(c.nuggets) for c in chunks[1:])}
    found = index.search(chunks[0].text, RetrievalConfig(n_chunks=9, n_nuggets=99))
    assert chunks[0].chunk_id not in {s.ref.chunk_id for s in found}
    index.delete([])
    assert index.counts()["chunks"] == 3


def test_a_chunk_twice_in_one_call_is_an_error_of_ours_or_one_chunk(index):
    chunk = make_chunk("a b c", ["b"])
    try:
        index.put([chunk, chunk])
    except SpanIndexError:
        return
    assert index.counts() == {"chunks": 1, "nuggets": 1}


def test_more_rows_than_chromas_batch_limit_are_written_and_deleted(tmp_path):
    index = make_index(open_client(tmp_path))
    limit = index._batch
    text = " ".join(f"w{i}" for i in range(limit + 300))
    offsets = tuple(m for m in make_chunk(text).offsets)
    nuggets = tuple(
        Nugget(
            text=text[a:b],
            span=Span(i, i + 1),
            char_start=a,
            char_stop=b,
            match="exact",
            similarity=1.0,
        )
        for i, (a, b) in enumerate(offsets)
    )
    large = dataclasses.replace(make_chunk(text), nuggets=nuggets)
    index.put([large])
    assert index.counts() == {"chunks": 1, "nuggets": limit + 300}
    found = index.search("w7", RetrievalConfig(n_nuggets=3))
    assert found[0].score == pytest.approx(1.0, abs=1e-4)
    index.delete([large.chunk_id])
    assert index.counts() == {"chunks": 0, "nuggets": 0}


def test_threads_may_search_while_another_writes(index):
    chunks = some_chunks(30)
    index.put(chunks[:10])
    failed: list[BaseException] = []
    done = threading.Event()

    def search() -> None:
        while not done.is_set():
            try:
                assert index.search("organ tide")
            except BaseException as error:
                failed.append(error)
                raise

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(10, 30, 5):
        index.put(chunks[i : i + 5])
    done.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert index.counts()["chunks"] == 30


def test_texts_are_embedded_by_our_embedder_and_no_other(monkeypatch, index):
    from chromadb.utils.embedding_functions import DefaultEmbeddingFunction

    called: list[object] = []
    monkeypatch.setattr(DefaultEmbeddingFunction, "__call__", lambda *a: called.append(a))
    fresh = make_index(open_client(None))
    fresh.put(some_chunks(3))
    fresh.search("organ")
    fresh.search_chunks("organ", 2)
    fresh.put(some_chunks(2))
    fresh.delete([some_chunks(1)[0].chunk_id])
    assert called == []
