"""Looking after a store: what is wrong is found, what is repaired is whole, what goes is gone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from coinrag_integrations import maintenance
from coinrag_integrations.demo.data import demo_documents
from coinrag_integrations.engine import EngineConfig
from coinrag_integrations.engine.store import Catalog, Limits
from coinrag_integrations.engine.store.variants import variants
from coinrag_integrations.errors import ConfigError, FingerprintMismatchError, StoreError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import embedders
from tests.tiny import HashEmbedder, save_tiny

CONFIG = EngineConfig(chunk_tokens=64)
DOCUMENTS = demo_documents()[:3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedder of the tests under a name that stores can remember."""
    monkeypatch.setattr("coinrag_integrations.settings.MiniLMEmbedder", HashEmbedder)
    assert embedders.MiniLMEmbedder is not HashEmbedder


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Path:
    with opened(tmp_path / "store", model) as rag:
        rag.add(DOCUMENTS)
    return tmp_path / "store"


def opened(folder: Path, model: Path, **options: object) -> CoinRAG:
    options = {"model": model, "embedder": "minilm", "config": CONFIG, **options}
    return CoinRAG.open(folder, **options)  # type: ignore[arg-type]


def problems(folder: Path, **options: bool) -> list[str]:
    reports = maintenance.verify(folder, **options)
    return [line for report in reports for line in report.problems(bounded=False)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("tenants/*/*/kv/*/??/*.safetensors"))


def test_a_new_store_is_in_order(store):
    (report,) = maintenance.verify(store)
    assert (report.n_documents, report.n_chunks) == (3, len(files(store)))
    assert problems(store) == []


def test_every_kind_of_damage_is_found_and_mended(store, model):
    first, second, third, *_ = files(store)
    answers = ask(store, model)
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.unlink()
    unknown = third.with_name(third.name[:2] + "0" * 30 + ".safetensors")
    misplaced = third.with_name("0" * 32 + ".safetensors")
    for stray in (unknown, misplaced):
        stray.write_bytes(third.read_bytes())
    with opened(store, model) as rag:
        chunk_id = rag.engine.catalog.chunk_ids(DOCUMENTS[0].document_id)[0]
        rag.index.delete([chunk_id])
        rag.engine.catalog.begin_document("never", "1", ())
    found = problems(store)
    name = first.parents[1].name
    assert f"1 KV files of {name} are corrupt" in found
    assert f"1 KV files of {name} are missing" in found
    assert f"2 KV files of {name} belong to no chunk" in found
    assert "1 chunks are not in the index" in found
    assert f"1 KV files of {name} are corrupt" not in problems(store, full=False)

    with opened(store, model) as rag:  # which brings the row back
        assert maintenance.repair(rag) == 2
    maintenance.collect_garbage(store)
    assert problems(store) == []
    assert not unknown.exists()
    assert not misplaced.exists()
    assert ask(store, model) == answers


def ask(store: Path, model: Path) -> list[tuple[str, object]]:
    with opened(store, model) as rag:
        replies = [rag.ask(document.text[:60]) for document in DOCUMENTS]
        return [(reply.text, reply.spans) for reply in replies]


def test_an_interrupted_ingestion_is_given_up_by_gc(store, model):
    with opened(store, model) as rag:
        chunks = rag.engine.chunk(demo_documents()[5])
        rag.engine.catalog.begin_document("never", "1", chunks)
        for chunk, kv in rag.engine.encode(chunks):
            rag.engine.store_chunk(chunk, kv)
        rag.index.put(chunks)
    assert "1 documents were never finished" in problems(store)
    maintenance.collect_garbage(store)
    assert problems(store) == []
    assert len(files(store)) == maintenance.verify(store)[0].n_chunks


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_converting_gives_the_bytes_that_building_with_the_codec_gives(
    store, model, codec, tmp_path
):
    sizes = maintenance.convert(store, codec)
    assert sizes["after"] < sizes["before"]
    with opened(
        tmp_path / "other", model, config=EngineConfig(chunk_tokens=64, codec=codec, batch_tokens=1)
    ) as rag:
        rag.add(DOCUMENTS)
        ours = {path.name for path in files(store)}
        assert ours == {path.name for path in files(tmp_path / "other")}
    assert problems(store) == []
    with CoinRAG.open(store) as rag:  # remembers the codec
        assert rag.engine.store.codec.name == codec
        assert rag.ask(DOCUMENTS[0].text[:60]).answer.recomputed == ()


def test_converting_goes_on_where_it_was(store, model):
    seen = []

    def stop(done: int, total: int) -> None:
        seen.append(total)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        maintenance.convert(store, "int8", on_progress=stop)
    with CoinRAG.open(store) as rag:  # what was there is still served
        assert rag.engine.store.codec.name == "none"
        assert rag.ask(DOCUMENTS[0].text[:60]).answer.recomputed == ()
    old = {path: path.stat().st_mtime_ns for path in files(store) if len(path.read_bytes())}
    maintenance.convert(store, "int8", keep=True)
    assert all(path.stat().st_mtime_ns == time for path, time in old.items())
    assert len(files(store)) == 2 * seen[0]


def test_fingerprints_stand_side_by_side_and_are_dropped_one_by_one(store, model):
    maintenance.convert(store, "int8", keep=True)
    kv = store / "tenants/default/main/kv"
    by_codec = {fingerprint.codec: name for name, fingerprint in variants(kv).items()}
    assert by_codec.keys() == {"none", "int8"}
    for config in (CONFIG, EngineConfig(chunk_tokens=64, codec="int8")):
        with opened(store, model, config=config) as rag:
            assert rag.ask(DOCUMENTS[0].text[:60]).answer.recomputed == ()
    with pytest.raises(
        FingerprintMismatchError, match=r"codec is (int8|none), this engine has int4"
    ):
        opened(store, model, config=EngineConfig(chunk_tokens=64, codec="int4"))
    with pytest.raises(StoreError, match="no fingerprint 'nothing'"):
        maintenance.collect_garbage(store, drop=["nothing"])
    maintenance.collect_garbage(store, drop=[by_codec["none"]])
    assert variants(kv).keys() == {by_codec["int8"]}
    with opened(store, model, config=EngineConfig(chunk_tokens=64, codec="int8")) as rag:
        rag.delete([DOCUMENTS[0].document_id])
        assert rag.ask(DOCUMENTS[1].text[:60]).answer.recomputed == ()


def test_a_document_is_deleted_from_every_fingerprint(store, model):
    maintenance.convert(store, "int8", keep=True)
    with Catalog(store / "tenants/default/main/catalog.sqlite") as catalog:
        gone = set(catalog.chunk_ids(DOCUMENTS[0].document_id))
    assert {path.stem for path in files(store)} > gone
    assert maintenance.delete_documents(store, [DOCUMENTS[0].document_id, "unknown"]) == 1
    assert not gone & {path.stem for path in files(store)}
    assert problems(store) == []


def test_codes_are_not_converted_again(store):
    maintenance.convert(store, "int8")
    for codec in ("int4", "none"):
        with pytest.raises(ConfigError, match="cannot become"):
            maintenance.convert(store, codec)


def test_lower_limits_evict_at_once_and_every_question_is_still_answered(store, model):
    answers = ask(store, model)
    n_files = len(files(store))
    with opened(store, model) as rag:
        used = rag.engine.disk.usage()
    kv = sum(path.stat().st_blocks * 512 for path in files(store))
    cap = used[""] - kv // 2
    limits, freed = maintenance.set_limits(store, max_bytes=cap)
    assert limits == Limits(max_bytes=cap)
    assert freed > 0
    assert len(files(store)) < n_files
    assert ask(store, model) == answers
    assert problems(store) != []
    assert maintenance.verify(store)[0].problems(bounded=True) == []


def test_a_store_of_two_tenants_is_looked_after_as_one(store, model):
    with opened(store, model, tenant="acme") as rag:
        rag.add(DOCUMENTS[:1])
    assert [str(report.scope) for report in maintenance.verify(store)] == [
        "acme.main",
        "default.main",
    ]
    assert maintenance.delete_documents(store, [DOCUMENTS[1].document_id], tenant="acme") == 0
    assert maintenance.delete_documents(store, [DOCUMENTS[0].document_id], tenant="acme") == 1
    assert maintenance.verify(store)[1].n_documents == 3


def test_kv_that_was_evicted_is_not_encoded_by_a_repair(store, model):
    maintenance.set_limits(store, max_bytes=1 << 30)
    gone, *others = files(store)
    gone.unlink()
    with opened(store, model) as rag:
        assert maintenance.repair(rag) == 0
    assert files(store) == others


def test_a_repair_leaves_remote_objects_alone_and_reads_them_where_they_are(tmp_path, model):
    far = tmp_path / "far"
    with opened(tmp_path / "store", model, remote=f"file://{far}") as rag:
        rag.add(DOCUMENTS)
    before = {path: path.stat().st_mtime_ns for path in far.rglob("*.safetensors")}
    evicted = files(tmp_path / "store")[0]
    evicted.unlink()
    with CoinRAG.open(tmp_path / "store") as rag:
        assert maintenance.repair(rag) == 0
    assert {path: path.stat().st_mtime_ns for path in far.rglob("*.safetensors")} == before


def test_damaged_tokens_are_found_and_never_encoded(store, model):
    path = store / "tenants/default/main/catalog.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        ((rowid, tokens),) = db.execute("SELECT rowid, token_ids FROM chunks LIMIT 1").fetchall()
        damaged = bytes([tokens[0] ^ 1]) + tokens[1:]
        db.execute("UPDATE chunks SET token_ids = ? WHERE rowid = ?", (damaged, rowid))
    assert any("the tokens of 1 chunks" in line for line in problems(store))
    for file in files(store):
        file.unlink()
    with opened(store, model) as rag:
        maintenance.repair(rag)
        rag.delete([DOCUMENTS[0].document_id])
        rag.add(DOCUMENTS)
    assert problems(store) == []


def test_a_document_is_deleted_from_a_fingerprint_that_is_being_dropped(store):
    maintenance.convert(store, "int8", keep=True)
    kv = store / "tenants/default/main/kv"
    half_dropped = min(kv.iterdir())
    (half_dropped / "fingerprint.json").unlink()
    with Catalog(store / "tenants/default/main/catalog.sqlite") as catalog:
        gone = set(catalog.chunk_ids(DOCUMENTS[0].document_id))
    assert maintenance.delete_documents(store, [DOCUMENTS[0].document_id]) == 1
    assert not gone & {path.stem for path in kv.rglob("*.safetensors")}


def test_deleted_texts_are_not_left_in_the_file(store):
    secret = DOCUMENTS[0].text[100:160].encode()
    path = store / "tenants/default/main/catalog.sqlite"
    assert secret in path.read_bytes()
    assert maintenance.delete_documents(store, [DOCUMENTS[0].document_id]) == 1
    with Catalog(path) as catalog:
        catalog._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert secret not in path.read_bytes()
