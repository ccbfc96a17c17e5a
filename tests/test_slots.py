"""C2KV's slots from a document to an answer: built, read in every form, remembered, removed, mended."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coinrag_integrations import maintenance
from coinrag_integrations.demo.data import demo_documents
from coinrag_integrations.engine.store import Disk
from coinrag_integrations.engine.store.variants import variants
from coinrag_integrations.errors import ConfigError, ModelError
from coinrag_integrations.rag import MODES, SLOT_MODES, CoinRAG
from coinrag_integrations.types import ScoredSpan
from tests.slots import CONFIG, DOCUMENTS, FORMS, PLAIN, QUESTION, WIDE, opened, save_both
from tests.tiny import HashEmbedder


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_both(tmp_path_factory.mktemp("both"))


@pytest.fixture(autouse=True)
def _hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedder of the tests under a name that stores can remember."""
    monkeypatch.setattr("coinrag_integrations.settings.MiniLMEmbedder", HashEmbedder)


@pytest.fixture
def store(tmp_path: Path, both: tuple[Path, Path]) -> Path:
    """A store of three documents with slots of 4 tokens."""
    model, extractor = both
    with opened(tmp_path / "store", model=model, config=CONFIG, extractor=extractor) as rag:
        assert rag.add(DOCUMENTS).n_added == len(DOCUMENTS)
    return tmp_path / "store"


def files(folder: Path, *, ratio: int) -> dict[str, Path]:
    """The KV files of one ratio, by name."""
    return {
        path.name: path
        for kv in folder.glob("tenants/*/*/kv")
        for name, fingerprint in variants(kv).items()
        if fingerprint.ratio == ratio
        for path in kv.glob(f"{name}/??/*.safetensors")
    }


def ask(rag: CoinRAG, form: str, **options: object) -> tuple[str, tuple[ScoredSpan, ...]]:
    """An answer for which nothing had to be encoded, and what it rests on."""
    reply = rag.ask(QUESTION, retrieval=replace(WIDE, form=form, **options))
    assert reply.answer.recomputed == ()
    return reply.text, reply.spans


def problems(folder: Path, *, bounded: bool = False) -> list[str]:
    reports = maintenance.verify(folder)
    return [line for report in reports for line in report.problems(bounded=bounded)]


# -- asking ------------------------------------------------------------------------------------


def test_every_form_reads_what_it_says(store):
    with opened(store, config=CONFIG) as rag:
        refs = {form: [it.ref for it in ask(rag, form)[1]] for form in FORMS}
        ratios = {form: [ref.ratio for ref in found] for form, found in refs.items()}
        assert set(ratios["spans"]) == set(ratios["chunks"]) == {1}
        assert set(ratios["c2kv"]) == set(ratios["slots"]) == {4}
        assert ratios["hybrid"] == [1, 4, 4, 4]
        assert set(ratios["background"]) == {1, 4}
        assert [replace(ref, ratio=4) for ref in refs["chunks"]] == refs["c2kv"]
        assert [ref for ref in refs["background"] if ref.ratio == 1] == sorted(
            refs["spans"],
            key=lambda ref: ([it.chunk_id for it in refs["spans"]].index(ref.chunk_id), ref),
        )
        usage = {
            form: rag.ask(QUESTION, retrieval=replace(WIDE, form=form)).answer.usage
            for form in FORMS
        }
        n_head = len(rag.engine.prompt.head)
        for form in FORMS:
            entries = sum(ref.n_entries for ref in rag.engine.plan(refs[form]).refs)
            assert usage[form].cached == n_head + entries
        assert usage["c2kv"].cached < usage["hybrid"].cached < usage["chunks"].cached


def test_modes_are_forms_by_another_name(store):
    with opened(store, config=CONFIG) as rag:
        for mode, form in {
            "coinrag": "spans",
            "chunk": "chunks",
            "c2kv": "c2kv",
            "hybrid": "hybrid",
        }.items():
            reply = rag.ask(QUESTION, mode, retrieval=WIDE)
            assert (reply.text, reply.spans) == ask(rag, form)
        whole = rag.ask(QUESTION, "full", retrieval=WIDE)
        assert whole.answer.usage.cached == 0
        with pytest.raises(ConfigError, match=", ".join((*MODES, *SLOT_MODES))):
            rag.ask(QUESTION, "slots")
        raw = replace(WIDE, n_raw=2)
        ratios = [it.ref.ratio for it in rag.ask(QUESTION, "hybrid", retrieval=raw).spans]
        assert ratios == [1, 1, 4, 4]


def test_a_store_remembers_its_slots(store, both):
    with opened(store, config=CONFIG) as rag:
        before = ask(rag, "c2kv")
    noted = json.loads((store / "store.json").read_text())
    assert (noted["engine"]["c2kv"], noted["extractor"]) == ([4], str(both[1]))
    with opened(store) as rag:
        assert rag.engine.config.c2kv == (4,)
        assert ask(rag, "c2kv") == before
        report = rag.add(DOCUMENTS)
        assert (report.n_unchanged, report.n_encoded) == (len(DOCUMENTS), 0)


def test_the_smallest_of_several_ratios_is_not_taken_for_another(tmp_path, both):
    model, extractor = both
    several = replace(CONFIG, c2kv=(8, 4))
    with opened(tmp_path / "s", model=model, config=several, extractor=extractor) as rag:
        rag.add(DOCUMENTS)
        assert {it.ref.ratio for it in ask(rag, "c2kv")[1]} == {8}  # the store's first
        assert {it.ref.ratio for it in ask(rag, "c2kv", ratio=4)[1]} == {4}
        with pytest.raises(ConfigError, match=r"there: 8, 4.*--c2kv 16"):
            ask(rag, "slots", ratio=16)


@pytest.mark.parametrize("form", ["spans", "slots", "background"])
def test_what_goes_between_searching_and_reading_is_left_out(store, form, monkeypatch):
    with opened(store, config=CONFIG) as rag:
        best = rag.retrieve(QUESTION, config=WIDE)[0].document_id
        search = rag.index.search

        def search_then_lose(*arguments: object, **options: object) -> list[ScoredSpan]:
            found = search(*arguments, **options)
            rag.delete([best])
            return found

        monkeypatch.setattr(rag.index, "search", search_then_lose)
        reply = rag.ask(QUESTION, retrieval=replace(WIDE, form=form))
        assert reply.text
        assert best not in {span.document_id for span in reply.spans}


# -- who makes slots ---------------------------------------------------------------------------


def test_slots_without_an_extractor_are_refused_before_anything_is_written(tmp_path, both):
    with pytest.raises(ConfigError, match="--extractor FOLDER"):
        opened(tmp_path / "s", model=both[0], config=CONFIG)
    assert not (tmp_path / "s").exists()


def test_an_extractor_of_another_model_is_refused(tmp_path, both):
    _, other = save_both(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="trained for other weights"):
        opened(tmp_path / "s", model=both[0], config=CONFIG, extractor=other)
    with pytest.raises(ModelError, match="no C2KV extractor in"):
        opened(tmp_path / "s", model=both[0], config=CONFIG, extractor=tmp_path)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("form", ["c2kv", "hybrid", "slots", "background"])
def test_a_store_without_slots_says_how_to_get_them(rag, form):
    rag.add(DOCUMENTS[:1])
    with pytest.raises(ConfigError, match=r"--c2kv 4, or open it with EngineConfig\(c2kv=\(4,\)"):
        rag.ask(QUESTION, retrieval=replace(WIDE, form=form))
    if form in SLOT_MODES:
        with pytest.raises(ConfigError, match="--c2kv 4"):
            rag.stream(QUESTION, form)


# -- adding and taking away --------------------------------------------------------------------


def test_slots_are_added_to_a_store_that_had_none(tmp_path, both):
    model, extractor = both
    folder = tmp_path / "s"
    with opened(folder, model=model, config=PLAIN) as rag:
        n_chunks = rag.add(DOCUMENTS).n_chunks
        before = ask(rag, "spans")
    entries = {name: path.stat().st_mtime_ns for name, path in files(folder, ratio=1).items()}
    with opened(folder, config=CONFIG, extractor=extractor) as rag:
        report = rag.add(DOCUMENTS)
        assert (report.n_updated, report.n_encoded) == (len(DOCUMENTS), n_chunks)
        assert ask(rag, "spans") == before
        ask(rag, "c2kv")
        report = rag.add(DOCUMENTS)
        assert (report.n_unchanged, report.n_encoded) == (len(DOCUMENTS), 0)
    assert files(folder, ratio=4).keys() == entries.keys()
    now = {name: path.stat().st_mtime_ns for name, path in files(folder, ratio=1).items()}
    assert now == entries  # what was there was left alone
    with opened(folder, config=PLAIN) as rag:
        assert rag.add(DOCUMENTS).n_encoded == 0
        assert rag.add(demo_documents()[3:4]).n_added == 1
        with pytest.raises(ConfigError, match="--c2kv 4"):
            ask(rag, "c2kv")
    assert problems(folder) == []  # its slots are not missed


def test_a_changed_extractor_makes_slots_of_its_own(store, both):
    with opened(store, config=CONFIG) as rag:
        old = rag.engine.forms.stores[4].root
        n_chunks = rag.engine.catalog.counts()["chunks"]
    with opened(store, config=CONFIG, extractor="untrained") as rag:
        assert rag.engine.forms.stores[4].root != old
        first = rag.ask(QUESTION, "c2kv", retrieval=WIDE)
        assert len(first.answer.recomputed) == 4
        assert ask(rag, "c2kv")[0] == first.text
        report = rag.add(DOCUMENTS)
        assert (report.n_updated, report.n_encoded) == (len(DOCUMENTS), n_chunks - 4)
    assert json.loads((store / "store.json").read_text())["extractor"] == "untrained"
    assert maintenance.collect_garbage(store, drop=[old.name]) > 0
    assert problems(store) == []
    with opened(store, config=CONFIG) as rag:
        ask(rag, "c2kv")


def test_slots_of_what_was_removed_go(store):
    assert files(store, ratio=4).keys() == files(store, ratio=1).keys()
    assert maintenance.delete_documents(store, [DOCUMENTS[0].document_id]) == 1
    with opened(store, config=CONFIG) as rag:
        assert rag.delete([DOCUMENTS[1].document_id]) == 1
        left = {f"{i}.safetensors" for i in rag.engine.catalog.chunk_ids(DOCUMENTS[2].document_id)}
    assert files(store, ratio=4).keys() == files(store, ratio=1).keys() == left
    stray = next(iter(files(store, ratio=4).values())).with_name(f"{'0' * 32}.safetensors")
    stray.write_bytes(b"not a chunk")
    assert len(problems(store)) == 1
    maintenance.collect_garbage(store)
    assert problems(store) == []


def test_entries_may_come_again_where_only_slots_are_left(store):
    (name,) = {path.parents[1].name for path in files(store, ratio=1).values()}
    maintenance.collect_garbage(store, drop=[name])
    assert files(store, ratio=1) == {}
    with opened(store, config=CONFIG) as rag:
        ask(rag, "c2kv")
        assert rag.ask(QUESTION, retrieval=WIDE).answer.recomputed


def test_slots_that_were_dropped_are_missed_and_made_again(store):
    (name,) = {path.parents[1].name for path in files(store, ratio=4).values()}
    n_chunks = len(files(store, ratio=1))
    maintenance.collect_garbage(store, drop=[name])
    assert problems(store) == [f"{n_chunks} chunks have no slots of 4 tokens"]
    with opened(store, config=CONFIG) as rag:
        assert maintenance.repair(rag) == n_chunks
    assert problems(store) == []
    assert files(store, ratio=4).keys() == files(store, ratio=1).keys()


# -- looking after -----------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_damaged_slots_are_found_and_mended(store, damage: Callable[[Path], None]):
    path = next(iter(files(store, ratio=4).values()))
    entries = files(store, ratio=1)[path.name].stat().st_mtime_ns
    content = path.read_bytes()
    damage(path)
    kind = "corrupt" if damage is flip else "missing"
    assert problems(store) == [f"1 KV files of {path.parents[1].name} are {kind}"]
    with opened(store, config=CONFIG) as rag:
        assert maintenance.repair(rag) == 1
    assert problems(store) == []
    assert len(path.read_bytes()) == len(content)
    assert files(store, ratio=1)[path.name].stat().st_mtime_ns >= entries


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_converting_takes_slots_along(store, codec):
    before = {name: path.stat().st_size for name, path in files(store, ratio=4).items()}
    sizes = maintenance.convert(store, codec)
    assert sizes["after"] < sizes["before"]
    after = {name: path.stat().st_size for name, path in files(store, ratio=4).items()}
    assert after.keys() == before.keys()
    assert sum(after.values()) < 0.75 * sum(before.values())
    assert problems(store) == []
    with opened(store, config=replace(CONFIG, codec=codec)) as rag:
        assert [it.codec.name for it in rag.engine.forms.stores.values()] == [codec, codec]
        for form in FORMS:
            ask(rag, form)
        assert rag.add(DOCUMENTS).n_encoded == 0


def test_slots_are_evicted_and_made_again(store):
    with opened(store, config=CONFIG) as rag:
        before = ask(rag, "c2kv")[0]
    for path in files(store, ratio=4).values():  # used longest ago
        os.utime(path, (0, path.stat().st_mtime))
    n_bytes = sum(path.stat().st_blocks * 512 for path in files(store, ratio=4).values())
    maintenance.set_limits(store, max_bytes=Disk(store).usage()[""] - n_bytes)
    assert files(store, ratio=4) == {}
    assert files(store, ratio=1)
    assert problems(store, bounded=True) == []
    maintenance.set_limits(store, max_bytes=None)
    with opened(store, config=CONFIG) as rag:
        reply = rag.ask(QUESTION, "c2kv", retrieval=WIDE)
        assert (reply.text, len(reply.answer.recomputed)) == (before, 4)
        assert ask(rag, "c2kv")[0] == before


def test_slots_go_to_remote_storage_and_come_back(tmp_path, both):
    model, extractor = both
    options = {"config": CONFIG, "remote": f"file://{tmp_path / 'far'}"}
    with opened(tmp_path / "s", model=model, extractor=extractor, **options) as rag:
        rag.add(DOCUMENTS)
        before = ask(rag, "hybrid")
    local = [*files(tmp_path / "s", ratio=1).values(), *files(tmp_path / "s", ratio=4).values()]
    assert len(list((tmp_path / "far").rglob("*.safetensors"))) == len(local)
    for path in local:
        path.unlink()
    with opened(tmp_path / "s", **options) as rag:
        assert ask(rag, "hybrid") == before
        assert rag.delete([it.document_id for it in DOCUMENTS]) == len(DOCUMENTS)
    assert list((tmp_path / "far").rglob("*.safetensors")) == []
