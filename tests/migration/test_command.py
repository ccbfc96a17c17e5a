"""`coinrag migrate`, killed, interrupted and run again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import MiniLMEmbedder
from tests.commands import Run
from tests.migration.collections import HashEmbeddings, digests, fill_langchain
from tests.tiny import save_tiny

N_ROWS = 600
TEXTS = [f"Buoy {i} lies off Cape {i % 97}. It was painted in {1800 + i}." for i in range(N_ROWS)]


class MiniLM(HashEmbeddings):
    """The application embeds with all-MiniLM-L6-v2."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return MiniLMEmbedder().embed_documents(texts).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app") / "db"
    fill_langchain(folder, TEXTS, [{"source": f"chart-{i % 7}"} for i in range(N_ROWS)], MiniLM())
    return folder


def n_documents(store: Path) -> int:
    path = store / "tenants/default/main/catalog.sqlite"
    if not path.exists():
        return 0
    try:
        with sqlite3.connect(path, timeout=30) as connection:
            return connection.execute("SELECT count(*) FROM documents").fetchone()[0]
    except sqlite3.OperationalError:  # it is just being made
        return 0


def stop_at(n: int, how: signal.Signals, db: Path, store: Path, tiny: Path) -> int:
    """Start the command and stop it once `n` documents are there; its exit code."""
    command = [sys.executable, "-m", "coinrag_integrations", "migrate", str(db)]
    process = subprocess.Popen(
        [*command, "--store", str(store), "--model", str(tiny)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while n_documents(store) < n:
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    return process.wait(120)


@pytest.mark.usefixtures("interruptible")
def test_a_killed_and_an_interrupted_move_go_on(run: Run, db: Path, tiny: Path, tmp_path: Path):
    store, before = tmp_path / "store", digests(db)
    assert stop_at(1, signal.SIGKILL, db, store, tiny) == -signal.SIGKILL
    killed = n_documents(store)
    assert stop_at(killed + 1, signal.SIGINT, db, store, tiny) == 130
    there = n_documents(store)
    assert 0 < killed < there < N_ROWS
    moved = run("migrate", db, "--store", store)
    assert (moved.code, moved.value["n_unchanged"]) == (0, there)
    assert (moved.value["n_added"], moved.value["documents"]) == (N_ROWS - there, N_ROWS)
    assert moved.value["agreement"] > 0.999
    assert moved.value["collection"]["framework"] == "LangChain"
    assert "ChatCoinRAG(rag=rag)" in moved.text
    assert run("verify", "--store", store).code == 0
    assert digests(db) == before
    with CoinRAG.open(store) as rag:
        (best, *_) = rag.retrieve("Which buoy lies off Cape 7 and was painted in 1807?", "chunk")
        assert best.document_id == "row-7"


def test_a_dry_run_says_what_it_costs_and_writes_nothing(
    run: Run, db: Path, tiny: Path, tmp_path: Path
):
    store, before = tmp_path / "store", digests(db)
    planned = run("migrate", db, "--store", store, "--model", tiny, "--dry-run", "--sample", 0)
    assert planned.code == 0
    assert not store.exists()
    assert digests(db) == before
    assert planned.value["n_documents"] == N_ROWS
    assert planned.value["agreement"] > 0.999
    assert "building" in planned.text
    moved = run("migrate", db, "--store", store, "--model", tiny)
    assert moved.value["bytes"] == pytest.approx(
        planned.value["kv_bytes"]["none"]["value"], rel=0.02
    )


def test_a_move_with_slots(run: Run, db: Path, tiny: Path, tmp_path: Path):
    """What `coinrag build` knows of slots, and the same words for what cannot be."""
    store = tmp_path / "store"
    command = ("migrate", db, "--store", store)
    for bad, words in (("0", "from 2 to 32"), ("abc", "as 4 or 4,8"), ("4", "--extractor FOLDER")):
        for dry in ((), ("--dry-run",)):
            refused = run(*command, "--model", tiny, "--c2kv", bad, *dry)
            assert (refused.code, refused.value["error"]["type"]) == (1, "ConfigError")
            assert words in refused.value["error"]["message"]
    slots = ("--model", tiny, "--c2kv", "4,8", "--extractor", "untrained")
    planned = run(*command, *slots, "--dry-run", "--sample", 0)
    assert planned.code == 0
    assert not store.exists()
    assert "slots of 8 tokens" in planned.text
    moved = run(*command, *slots)
    assert (moved.code, moved.value["n_added"]) == (0, N_ROWS)
    for ratio in ("4", "8"):
        n_bytes = planned.value["slot_bytes"][ratio]["none"]["value"]
        assert moved.value["slot_bytes"][ratio] == pytest.approx(n_bytes, rel=0.02)
        assert f"of them slots of {ratio} tokens" in moved.text
    assert len({path.parents[1] for path in store.rglob("*.safetensors")}) == 3
    again = run(*command)
    assert (again.value["n_unchanged"], again.value["n_encoded"]) == (N_ROWS, 0)
    question = "Which buoy lies off Cape 7 and was painted in 1807?"
    asked = run("ask", "--store", store, "--mode", "c2kv", "--ratio", 8, question)
    assert asked.code == 0
    assert {span["ratio"] for span in asked.value["spans"]} == {8}
    assert asked.value["recomputed"] == 0


def test_slots_come_to_what_was_moved_before(run: Run, db: Path, tiny: Path, tmp_path: Path):
    store = tmp_path / "store"
    first = run("migrate", db, "--store", store, "--model", tiny)
    assert (first.value["n_added"], first.value["slot_bytes"]) == (N_ROWS, {})
    moved = run("migrate", db, "--store", store, "--c2kv", 4, "--extractor", "untrained")
    assert (moved.code, moved.value["n_updated"]) == (0, N_ROWS)
    assert moved.value["slot_bytes"]["4"] == moved.value["bytes"] - first.value["bytes"]
    assert run("verify", "--store", store).code == 0


def test_vectors_of_others_are_refused_unless_all_are_made_anew(
    run: Run, tiny: Path, tmp_path: Path
):
    fill_langchain(tmp_path / "db", TEXTS[:20])
    command = ("migrate", tmp_path / "db", "--store", tmp_path / "store", "--model", tiny)
    for dry in ((), ("--dry-run",)):
        refused = run(*command, *dry)
        assert refused.code == 1
        assert "holds 64 numbers a vector" in refused.value["error"]["message"]
    assert run(*command, "--reembed").value["n_added"] == 20


def test_store_and_collection_do_not_lie_in_each_other(run: Run, db: Path, tmp_path: Path):
    for store in (db, db / "store", db.parent):
        refused = run("migrate", db, "--store", store)
        assert "must not lie in each other" in refused.value["error"]["message"]
    missing = run("migrate", tmp_path / "none", "--store", tmp_path / "store")
    assert "no Chroma database in" in missing.value["error"]["message"]
    assert not (tmp_path / "store").exists()
