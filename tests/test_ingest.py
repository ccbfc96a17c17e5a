"""Ingestion is idempotent, resumable, and leaves nothing of what is gone."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig
from coinrag_integrations.errors import DocumentError, SpanIndexError
from coinrag_integrations.ingest import Ingestor
from coinrag_integrations.nuggets import RuleProposer
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig, SpanIndex, open_client
from coinrag_integrations.types import ChunkId, Document, Span
from tests.tiny import TEXT, HashEmbedder, supported_model

SHORT = GenerationConfig(max_new_tokens=4)
DOCUMENTS = [
    Document(document_id="organ", text=TEXT * 2, metadata={"title": "Organ"}),
    Document(document_id="mill", text="The mill of Tarsk ground 40 tons of rye. " * 6),
    Document(document_id="pier", text="Ines Caldero painted the pier green in 1951. " * 4),
]


class Store:
    """Everything an ingestion writes to, opened afresh."""

    def __init__(self, folder: Path, **options: object) -> None:
        # What was stored is read, also where this machine is so busy that encoding would be faster.
        defaults = {"chunk_tokens": 16, "batch_tokens": 64, "load": "read"}
        config = EngineConfig(**{**defaults, **options})
        self.engine = Engine(supported_model("llama"), folder, config)
        client, mark = open_client(folder / "chroma"), folder / "index.changing"
        self.index = SpanIndex(client, HashEmbedder(), "t", mark=mark)
        self.ingestor = Ingestor(self.engine, self.index, RuleProposer())
        self.ingestor.mend()

    def state(self) -> dict:
        """What is in the catalog, on disk and in the index."""
        chunks = list(self.engine.catalog.chunks())
        files = {i: load_file(self.engine.store.path(i)) for i in self.engine.store}
        rows = self.index._chunks.get()["ids"], self.index._nuggets.get()["ids"]
        return {
            "documents": self.engine.catalog.documents(),
            "chunks": chunks,
            "kv": {i: tensors["kv"].numpy().tobytes() for i, tensors in files.items()},
            "index": tuple(sorted(ids) for ids in rows),
        }


@pytest.fixture
def store(tmp_path):
    it = Store(tmp_path)
    with it.engine:
        yield it


def replaced(name: str, text: str) -> list[Document]:
    return [dataclasses.replace(d, text=text) if d.document_id == name else d for d in DOCUMENTS]


def consistent(store: Store) -> None:
    """Catalog, files and index hold the same chunks."""
    state = store.state()
    ids = sorted(c.chunk_id for c in state["chunks"])
    assert sorted(state["kv"]) == ids
    assert state["index"][0] == ids
    nuggets = {
        f"{c.chunk_id}:{n.span.start}:{n.span.stop}" for c in state["chunks"] for n in c.nuggets
    }
    assert set(state["index"][1]) == nuggets
    assert {c.document_id for c in state["chunks"]} == set(state["documents"])


def test_documents_end_up_in_catalog_store_and_index(store):
    report = store.ingestor.add(DOCUMENTS)
    assert (report.n_added, report.n_updated, report.n_unchanged) == (3, 0, 0)
    assert report.n_documents == 3
    chunks = [c for d in DOCUMENTS for c in store.engine.chunk(d)]
    assert report.n_chunks == report.n_encoded == len(chunks)
    assert report.n_tokens == sum(map(len, chunks))
    assert 0 < report.n_covered_tokens <= report.n_tokens
    assert report.n_nuggets == store.index.counts()["nuggets"] > 0
    assert store.engine.catalog.documents() == ["mill", "organ", "pier"]
    consistent(store)


def test_the_same_documents_again_cost_nothing_and_change_nothing(store):
    store.ingestor.add(DOCUMENTS)
    before = store.state()
    report = store.ingestor.add(DOCUMENTS)
    assert (report.n_added, report.n_unchanged, report.n_chunks) == (0, 3, 0)
    assert report.n_encoded == 0
    assert store.state() == before


def test_documents_in_another_order_and_one_by_one_give_the_same_store(store, tmp_path):
    store.ingestor.add(DOCUMENTS)
    other = Store(tmp_path / "other")
    with other.engine:
        for document in DOCUMENTS[::-1]:
            other.ingestor.add([document])
        ours, theirs = store.state(), other.state()
    assert ours["chunks"] == theirs["chunks"]
    assert ours["index"] == theirs["index"]
    for chunk_id, kv in ours["kv"].items():
        other_kv = torch.frombuffer(bytearray(theirs["kv"][chunk_id]), dtype=torch.float32)
        mine = torch.frombuffer(bytearray(kv), dtype=torch.float32)
        torch.testing.assert_close(mine, other_kv, rtol=1e-4, atol=1e-5)


def test_of_an_edited_document_nothing_old_is_left(store):
    store.ingestor.add(DOCUMENTS)
    old = store.engine.catalog.chunk_ids("mill")
    report = store.ingestor.add(replaced("mill", "A new mill stands in Osk since 2004. " * 5))
    assert (report.n_updated, report.n_unchanged, report.n_added) == (1, 2, 0)
    new = store.engine.catalog.chunk_ids("mill")
    assert new
    assert not set(old) & set(new)
    state = store.state()
    assert not set(old) & set(state["kv"])
    assert not set(old) & set(state["index"][0])
    assert not any(row.startswith(tuple(old)) for row in state["index"][1])
    assert not set(old) & {c.chunk_id for c in state["chunks"]}
    consistent(store)


def test_of_a_document_edited_at_its_end_only_the_end_is_encoded(store):
    store.ingestor.add(DOCUMENTS)
    n_before = len(store.engine.catalog.chunk_ids("organ"))
    report = store.ingestor.add(replaced("organ", TEXT * 2 + "It fell silent in 1990."))
    assert 0 < report.n_encoded < n_before
    consistent(store)


def test_edited_metadata_reach_index_and_catalog_without_encoding(store):
    store.ingestor.add(DOCUMENTS)
    renamed = [dataclasses.replace(d, metadata={"title": "New"}) for d in DOCUMENTS]
    report = store.ingestor.add(renamed)
    assert (report.n_updated, report.n_encoded) == (3, 0)
    assert all(c.metadata == {"title": "New"} for c in store.engine.catalog.chunks())
    assert store.index.search("mill rye")[0].metadata == {"title": "New"}


def test_deleting_removes_everything(store):
    store.ingestor.add(DOCUMENTS)
    assert store.ingestor.delete(["mill", "unknown"]) == 1
    assert store.engine.catalog.documents() == ["organ", "pier"]
    consistent(store)
    assert store.ingestor.delete(["organ", "pier", "organ"]) == 2
    state = store.state()
    assert (state["documents"], state["chunks"], state["kv"]) == ([], [], {})
    assert state["index"] == ([], [])
    left = {path.name for path in store.engine.store.root.rglob("*.*")}
    assert left <= {"fingerprint.json", ".writer.lock"}


def interrupt(store: Store, documents, after: int) -> int:
    """Stop the ingestion after so many calls of its progress; how many chunks were encoded."""
    seen = 0
    encoded = 0

    def stop(report) -> None:
        nonlocal seen, encoded
        seen, encoded = seen + 1, report.n_encoded
        if seen == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.ingestor.add(documents, stop)
    return encoded


class Died(BaseException):
    """What a process that dies does not survive."""


def die_at(patch: pytest.MonkeyPatch, owner: object, name: str, when: str, n: int = 1) -> None:
    """Die before or after the n-th call of a method."""
    real, calls = getattr(owner, name), itertools.count(1)

    def dying(*args: object, **options: object) -> object:
        is_the_one = next(calls) == n
        if is_the_one and when == "before":
            raise Died
        result = real(*args, **options)
        if is_the_one:
            raise Died
        return result

    patch.setattr(owner, name, dying)


def part_of(store: Store, name: str) -> object:
    return {"engine": store.engine, "catalog": store.engine.catalog, "index": store.index}[name]


ALL = RetrievalConfig(n_chunks=1000, n_nuggets=1000)
CHANGED = [
    dataclasses.replace(DOCUMENTS[0], text=TEXT * 2 + "It fell silent in 1990, after a storm."),
    dataclasses.replace(
        DOCUMENTS[1], text="A new mill stands in Osk since 2004 and grinds spelt. " * 4
    ),
    DOCUMENTS[2],
]
POINTS = [
    ("catalog", "begin_document", "after", 1),
    ("engine", "store_chunk", "before", 1),
    ("engine", "store_chunk", "after", 2),
    ("index", "put", "before", 1),
    ("index", "_delete", "after", 1),  # rows of shared chunks are gone, new ones not yet there
    ("index", "put", "after", 1),
    ("catalog", "finish_document", "before", 1),
    ("catalog", "finish_document", "after", 1),
    ("catalog", "finish_document", "after", 2),
    ("index", "delete", "before", 1),
    ("index", "delete", "after", 1),
    ("engine", "remove_chunk", "before", 1),
    ("engine", "remove_chunk", "after", 2),
    ("catalog", "purge", "before", 1),
]


@pytest.mark.parametrize("coverage", ["nuggets", "all"])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_an_interrupted_update_leaves_every_document_whole_in_one_version(
    tmp_path, monkeypatch, point, coverage
):
    part, method, when, n = point
    store = Store(tmp_path, coverage=coverage)
    with store.engine, monkeypatch.context() as patch:
        store.ingestor.add(DOCUMENTS)
        die_at(patch, part_of(store, part), method, when, n)
        with pytest.raises(Died):
            store.ingestor.add(CHANGED)
    store = Store(tmp_path, coverage=coverage)
    with store.engine:
        whole_in_one_version(store, {d.document_id: {d.text} for d in DOCUMENTS}, CHANGED)
        store.ingestor.add(CHANGED)
        assert [c.text for c in store.engine.catalog.chunks()] == [
            c.text
            for d in sorted(CHANGED, key=lambda d: d.document_id)
            for c in store.engine.chunk(d)
        ]
        assert store.engine.catalog.garbage() == []
        consistent(store)


def whole_in_one_version(store: Store, before: dict[str, set[str]], after: list[Document]) -> None:
    """What is there is all of one version, with its KV and rows, and nothing else is found."""
    catalog, rag = store.engine.catalog, CoinRAG(store.engine, store.index)
    wanted = {d.document_id: before[d.document_id] | {d.text} for d in after}
    assert catalog.documents() == sorted(wanted)
    live = {}
    for name, versions in wanted.items():
        chunks = [catalog.chunk(it) for it in catalog.chunk_ids(name)]
        assert "".join(c.text for c in chunks) in versions
        live |= {c.chunk_id: c for c in chunks}
    # Coverage may have become that of the new version; what is asked for is encoded then.
    assert {span.ref.chunk_id for span in rag.retrieve("mill organ", "chunk", ALL)} == live.keys()
    found = rag.retrieve("mill organ", config=ALL)
    assert {span.ref.chunk_id for span in found} == live.keys()
    for span in found:
        chunk = live[span.ref.chunk_id]
        assert chunk.text_of(Span(span.ref.start, span.ref.stop)).strip() == span.text.strip()
    one = RetrievalConfig(n_chunks=2, n_nuggets=4)
    assert rag.ask("mill organ", retrieval=one, generation=SHORT).answer.recomputed == ()


DELETING = [
    ("catalog", "delete_document", "before", 1),
    ("catalog", "delete_document", "after", 1),
    ("index", "delete", "before", 1),
    ("index", "delete", "after", 1),
    ("engine", "remove_chunk", "before", 1),
    ("engine", "remove_chunk", "after", 1),
    ("catalog", "purge", "before", 1),
    ("catalog", "purge", "after", 1),
]


@pytest.mark.parametrize("then", ["settle", "delete", "add"])
@pytest.mark.parametrize("point", DELETING, ids=str)
def test_an_interrupted_deletion_is_finished_by_whoever_writes_next(
    tmp_path, monkeypatch, point, then
):
    part, method, when, n = point
    store = Store(tmp_path)
    with store.engine, monkeypatch.context() as patch:
        store.ingestor.add(DOCUMENTS)
        die_at(patch, part_of(store, part), method, when, n)
        with pytest.raises(Died):
            store.ingestor.delete(["mill"])
    store = Store(tmp_path)
    with store.engine:
        rest = [d for d in DOCUMENTS if d.document_id != "mill"]
        is_there = (method, when) == ("delete_document", "before")
        expected = DOCUMENTS if is_there else rest
        whole_in_one_version(store, {d.document_id: set() for d in DOCUMENTS}, expected)
        if then == "settle":
            with store.engine.disk.writing(), store.index.writing():
                n_gone = store.ingestor.settle()
            assert (n_gone > 0) == (not is_there and (method, when) != ("purge", "after"))
        elif then == "delete":
            assert store.ingestor.delete(["unknown"]) == 0
        else:
            assert store.ingestor.add(rest).n_unchanged == 2
        assert store.engine.catalog.documents() == sorted(d.document_id for d in expected)
        assert store.engine.catalog.garbage() == []
        consistent(store)


def test_rows_of_chunks_that_are_not_there_are_not_retrieved(store, monkeypatch):
    rag = CoinRAG(store.engine, store.index)
    store.ingestor.add(DOCUMENTS)

    def found(mode: str) -> list[tuple[object, ...]]:
        spans = rag.retrieve("the mill of Tarsk", mode, ALL)
        return sorted((s.ref, s.text, str(s.metadata), round(s.score, 4)) for s in spans)

    before = {mode: found(mode) for mode in ("coinrag", "chunk")}
    new = Document(document_id="new", text="The mill of Tarsk is a museum. " * 3)
    with monkeypatch.context() as patch:
        die_at(patch, store.engine.catalog, "finish_document", "before")
        with pytest.raises(Died):
            store.ingestor.add([new])
    assert new.document_id in {s.document_id for s in store.index.search("the mill", ALL)}
    for mode, spans in before.items():
        assert found(mode) == spans
    store.ingestor.add([new])
    assert {"new", "mill"} <= {s.document_id for s in rag.retrieve("the mill of Tarsk", config=ALL)}


def test_rows_of_chunks_that_are_not_there_leave_room_for_those_that_are(store, monkeypatch):
    """However many they are: an interrupted book must not hide the page that is there."""
    rag = CoinRAG(store.engine, store.index)
    store.ingestor.add(DOCUMENTS)
    book = Document(document_id="book", text="Who painted the pier green? " * 200)
    with monkeypatch.context() as patch:
        die_at(patch, store.engine.catalog, "finish_document", "before")
        with pytest.raises(Died):
            store.ingestor.add([book])
    found = rag.retrieve("Who painted the pier green?", config=RetrievalConfig(n_chunks=2))
    assert {span.document_id for span in found} == {"pier"}


def snapshot(store: Store) -> dict[str, dict[object, object]]:
    """Every KV file, every row of the index and every text, each with all that is to be known of it."""
    found: dict[str, dict[object, object]] = {"files": {}, "chunks": {}}
    for it in store.engine.store:
        path = store.engine.store.path(it)
        status = path.stat()
        found["files"][it] = (status.st_ino, status.st_mtime_ns, path.read_bytes())
    for chunk in store.engine.catalog.chunks():
        found["chunks"][chunk.chunk_id] = chunk
    for name, collection in (("rows", store.index._chunks), ("nuggets", store.index._nuggets)):
        rows = collection.get(include=["documents", "metadatas", "embeddings"])
        columns = rows["documents"], rows["metadatas"], np.asarray(rows["embeddings"]).tolist()
        found[name] = dict(zip(rows["ids"], zip(*columns, strict=True), strict=True))
    return found


def test_deleting_among_a_thousand_touches_what_is_deleted_and_nothing_else(tmp_path):
    store = Store(tmp_path, coverage="all", chunk_tokens=8, batch_tokens=2048)
    documents = [Document(document_id=f"d{i}", text=f"No {i}.") for i in range(1000)]
    with store.engine:
        store.ingestor.add(documents)
        before = snapshot(store)
        assert len(before["files"]) == len(before["rows"]) == len(before["chunks"]) >= 1000
        for names in (["d500"], [f"d{i}" for i in range(0, 1000, 111)], ["d998", "unknown"]):
            gone = {it for name in names for it in store.engine.catalog.chunk_ids(name)}
            assert gone
            assert store.ingestor.delete(names) == len([n for n in names if n != "unknown"])
            after = snapshot(store)
            for part, items in before.items():
                kept = {k: v for k, v in items.items() if str(k).split(":")[0] not in gone}
                assert after[part] == kept, part
            before = after
        assert store.engine.catalog.garbage() == []


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_an_interrupted_ingestion_is_resumed_to_the_same_store(tmp_path, after):
    whole = Store(tmp_path / "whole")
    with whole.engine:
        total = whole.ingestor.add(DOCUMENTS).n_encoded
        expected = whole.state()
    with Store(tmp_path / "halves").engine as engine:
        engine.close()
    first = Store(tmp_path / "halves")
    with first.engine:
        encoded = interrupt(first, DOCUMENTS, after)
        assert encoded == after
        assert first.engine.catalog.documents() == []
    second = Store(tmp_path / "halves")
    with second.engine:
        report = second.ingestor.add(DOCUMENTS)
        found = second.state()
        consistent(second)
    assert report.n_encoded == total - encoded
    assert found["documents"] == expected["documents"]
    assert found["chunks"] == expected["chunks"]
    assert found["index"] == expected["index"]
    assert found["kv"].keys() == expected["kv"].keys()
    for chunk_id, kv in found["kv"].items():
        # Chunks beside other chunks in a batch: equal up to the order of fp32 sums.
        mine = torch.frombuffer(bytearray(kv), dtype=torch.float32)
        other = torch.frombuffer(bytearray(expected["kv"][chunk_id]), dtype=torch.float32)
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_resumed_store_has_the_very_bytes_where_batches_are_the_same(tmp_path):
    stores = []
    for name in ("whole", "halves"):
        store = Store(tmp_path / name, batch_tokens=1)
        with store.engine:
            if name == "halves":
                interrupt(store, DOCUMENTS, 4)
            store.ingestor.add(DOCUMENTS)
            stores.append(store.state())
    assert stores[0] == stores[1]


def test_an_interrupted_document_can_be_deleted_and_leaves_no_file(store):
    interrupt(store, DOCUMENTS, 3)
    store.ingestor.delete([d.document_id for d in DOCUMENTS])
    state = store.state()
    assert (state["chunks"], state["kv"], state["index"]) == ([], {}, ([], []))


def test_an_edit_that_was_interrupted_and_taken_back_leaves_nothing_of_it(store):
    store.ingestor.add(DOCUMENTS)
    before = store.state()
    interrupt(store, replaced("mill", "Something else was meant to be here. " * 6), 5)
    store.ingestor.add(DOCUMENTS)
    assert store.state() == before


def test_leftovers_of_a_killed_writer_are_swept(store):
    store.ingestor.add(DOCUMENTS)
    some = next(iter(store.engine.store))
    leftover = store.engine.store.path(some).with_name(f".{some}.abc.tmp")
    leftover.write_bytes(b"half")
    store.ingestor.add(DOCUMENTS)
    assert not leftover.exists()


def test_an_id_twice_in_one_run_keeps_the_last(store):
    first = Document(document_id="d", text="The first text about a red barn.")
    second = Document(document_id="d", text="The second text about a blue boat.")
    report = store.ingestor.add([first, second])
    assert (report.n_added, report.n_updated) == (1, 1)
    assert "".join(c.text for c in store.engine.catalog.chunks()) == second.text
    consistent(store)
    again = store.ingestor.add([second, second])
    assert (again.n_unchanged, again.n_encoded) == (2, 0)


def test_two_documents_of_the_same_text_are_two_documents(store):
    store.ingestor.add([Document(document_id=i, text=TEXT) for i in "ab"])
    counts = Counter(c.document_id for c in store.engine.catalog.chunks())
    assert counts["a"] == counts["b"] > 0
    store.ingestor.delete(["a"])
    assert {c.document_id for c in store.engine.catalog.chunks()} == {"b"}
    consistent(store)


def test_an_empty_document_is_reported_and_stores_nothing(store):
    report = store.ingestor.add([Document(document_id="void", text=""), DOCUMENTS[1]])
    assert report.empty == ["void"]
    assert report.n_added == 1
    assert store.engine.catalog.documents() == ["mill"]
    consistent(store)


def test_a_document_that_became_empty_is_gone(store):
    store.ingestor.add(DOCUMENTS)
    report = store.ingestor.add(replaced("mill", ""))
    assert report.empty == ["mill"]
    assert store.engine.catalog.documents() == ["organ", "pier"]
    consistent(store)


@pytest.mark.parametrize("text", ["🎏🎐🎑", "Marenqué", "日本", ".", "\n", "<|im_end|>", "\0"])
@pytest.mark.parametrize("coverage", ["nuggets", "all"])
def test_the_smallest_documents_can_be_answered_from(tmp_path, text, coverage):
    store = Store(tmp_path, coverage=coverage)
    with CoinRAG(store.engine, store.index) as rag:
        rag.add([Document(document_id="small", text=text)])
        spans = rag.retrieve("What is it?")
        assert "".join(span.text for span in spans) in text
        assert [span.document_id for span in spans] == ["small"] * len(spans)
        reply = rag.ask("What is it?")
        assert len(reply.answer.spans) >= 1
        assert reply.answer.recomputed == ()


def test_with_coverage_nuggets_only_the_tokens_of_nuggets_are_on_disk(store):
    report = store.ingestor.add(DOCUMENTS)
    stored = 0
    for chunk in store.engine.catalog.chunks():
        ranges = store.engine.store.header(chunk.chunk_id).ranges
        tokens = {t for span in ranges for t in range(span.start, span.stop)}
        expected = {t for n in chunk.nuggets for t in range(n.span.start, n.span.stop)}
        assert tokens == (expected or set(range(len(chunk))))
        kv = load_file(store.engine.store.path(chunk.chunk_id))["kv"]
        assert len(kv) == len(tokens)
        stored += len(tokens)
    assert stored == report.n_covered_tokens


def test_with_coverage_all_every_token_is_on_disk(tmp_path):
    store = Store(tmp_path, coverage="all")
    with store.engine:
        report = store.ingestor.add(DOCUMENTS)
        for chunk in store.engine.catalog.chunks():
            assert store.engine.store.header(chunk.chunk_id).ranges == (Span(0, len(chunk)),)
    assert report.n_covered_tokens == report.n_tokens


def test_a_wider_coverage_is_applied_when_the_documents_are_added_again(tmp_path):
    first = Store(tmp_path)
    with first.engine:
        first.ingestor.add(DOCUMENTS)
    second = Store(tmp_path, coverage="all")
    with second.engine:
        report = second.ingestor.add(DOCUMENTS)
        assert report.n_updated == 3
        assert report.n_covered_tokens == report.n_tokens
        assert all(second.engine.is_stored(c) for c in second.engine.catalog.chunks())
        consistent(second)


def test_other_chunk_sizes_replace_the_old_chunks(tmp_path):
    first = Store(tmp_path)
    with first.engine:
        first.ingestor.add(DOCUMENTS)
    second = Store(tmp_path, chunk_tokens=24)
    with second.engine:
        assert second.ingestor.add(DOCUMENTS).n_updated == 3
        assert max(len(c) for c in second.engine.catalog.chunks()) > 16
        consistent(second)


def test_a_damaged_file_is_encoded_again_when_its_document_changes(store):
    store.ingestor.add(DOCUMENTS)
    damaged = store.engine.catalog.chunk_ids("organ")[0]
    store.engine.store.path(damaged).write_bytes(b"")
    renamed = [dataclasses.replace(d, metadata={"title": "New"}) for d in DOCUMENTS]
    assert store.ingestor.add(renamed).n_encoded == 1
    assert store.engine.store.header(damaged).n_tokens > 0


def test_a_text_with_an_unpaired_surrogate_is_refused_with_its_place(store):
    broken = Document(document_id="broken", text="fine so far \ud83c and on")
    with pytest.raises(DocumentError, match="'broken' has an unpaired surrogate at character 12"):
        store.ingestor.add([DOCUMENTS[1], broken])
    assert store.ingestor.add([DOCUMENTS[1]]).n_documents == 1
    consistent(store)


@pytest.mark.parametrize(
    "document",
    [
        Document(document_id="", text="text"),
        Document(document_id="bad\ud83c", text="text"),
        Document(document_id="d", text="text", metadata={"title": "bad\ud83c"}),
        Document(document_id="d", text="text", metadata={"bad\ud83c": "title"}),
    ],
    ids=["empty-id", "surrogate-id", "surrogate-value", "surrogate-key"],
)
def test_ids_and_metadata_that_are_no_text_are_refused_before_anything_is_written(store, document):
    with pytest.raises(DocumentError):
        store.ingestor.add([document])
    state = store.state()
    assert (state["documents"], state["chunks"], state["kv"]) == ([], [], {})


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), ["a", 1], {"a": 1}, 1 << 70], ids=repr
)
def test_metadata_that_chroma_cannot_hold_are_refused_by_an_error_of_ours(store, value):
    document = Document(document_id="d", text=TEXT, metadata={"odd": value})
    with pytest.raises((DocumentError, SpanIndexError), match="odd"):
        store.ingestor.add([document])
    assert store.engine.catalog.documents() == []


def test_none_in_metadata_is_left_out(store):
    store.ingestor.add([Document(document_id="d", text=TEXT, metadata={"a": None, "b": 1})])
    assert store.index.search("tidal organ")[0].metadata == {"b": 1}


def test_progress_is_told_after_every_chunk_and_grows(store):
    told: list[tuple[int, int]] = []
    report = store.ingestor.add(DOCUMENTS, lambda r: told.append((r.n_encoded, r.n_chunks)))
    assert told == sorted(told)
    assert [n for n, _ in told if n][: report.n_encoded] == list(range(1, report.n_encoded + 1))
    assert told[-1] == (report.n_encoded, report.n_chunks)
    assert report.seconds > 0


def test_large_documents_are_written_group_by_group(store, monkeypatch):
    monkeypatch.setattr("coinrag_integrations.ingest._GROUP_TOKENS", 40)
    finished: list[int] = []
    store.ingestor.add(DOCUMENTS, lambda _: finished.append(len(store.engine.catalog.documents())))
    assert {0, 1, 2, 3} <= set(finished)
    consistent(store)


def test_chunks_of_a_retrieved_span_are_in_the_catalog_and_on_disk(store):
    store.ingestor.add(DOCUMENTS)
    for span in store.index.search("tidal organ pipes"):
        chunk = store.engine.catalog.chunk(ChunkId(span.ref.chunk_id))
        assert chunk.text_of(Span(span.ref.start, span.ref.stop)).strip()
        document = next(d for d in DOCUMENTS if d.document_id == span.document_id)
        assert document.text[span.char_start : span.char_stop] == span.text
        assert span.ref.chunk_id in store.engine.store
