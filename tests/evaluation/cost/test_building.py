"""A small store that is really built: what every part took, what is on disk, and going on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from coinrag_integrations.engine import EngineConfig, LoadedModel
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.cost import building
from coinrag_integrations.evaluation.cost.building import BUILD, STORE, build_store
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex
from tests.evaluation.cost.small import DOCUMENTS, ENGINE
from tests.tiny import HashEmbedder


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowEmbedder(HashEmbedder):
    """A second for every document text."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def embed_documents(self, texts):
        self.clock.now += len(texts)
        return super().embed_documents(texts)

    def embed_query(self, text):
        return super().embed_documents([text])[0]


class SlowProposer:
    """Ten seconds for every chunk, whose sentences it finds."""

    proposer_id = "slow"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def propose(self, text: str) -> list[str]:
        self.clock.now += 10
        return [text[:30], text[40:60]]


def build(model: LoadedModel, folder: Path, clock: Clock, config: EngineConfig = ENGINE):
    return build_store(
        DOCUMENTS,
        folder,
        model,
        SlowEmbedder(clock),
        config,
        proposer=SlowProposer(clock),
        clock=clock,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A hundred seconds for every KV file, in the thread that writes it."""
    clock, put = Clock(), KVStore.put

    def slow(*arguments):
        clock.now += 100
        put(*arguments)

    monkeypatch.setattr(KVStore, "put", slow)
    return clock


def test_a_document_of_the_same_text_is_there_once():
    assert [document.document_id for document in DOCUMENTS] == ["0/0", "1/1", "2/1"]


def test_every_part_gets_its_own_time(model, tmp_path, clock):
    built, reused = build(model, tmp_path, clock)
    assert not reused
    assert built.n_documents == 3
    assert built.n_nuggets
    assert built.seconds == {
        building.CUT: 0,
        building.NUGGETS: 10 * built.n_chunks,
        building.KV: 100 * built.n_chunks,
        building.EMBED_CHUNKS: built.n_chunks,
        building.EMBED_NUGGETS: built.n_nuggets,
        building.INDEX_CHUNKS: 0,
        building.INDEX_NUGGETS: 0,
        building.OTHER: 0,
    }
    assert built.total_seconds == clock.now, "parts add up"


def test_what_is_on_disk_is_counted(model, tmp_path, clock):
    built, _ = build(model, tmp_path / "nuggets", clock)
    everything = dataclasses.replace(ENGINE, coverage="all")
    whole, _ = build(model, tmp_path / "all", clock, everything)
    with CoinRAG.open(tmp_path / "nuggets" / STORE, model=model, embedder=HashEmbedder()) as rag:
        assert built.kv_span_bytes == rag.engine.store.n_bytes()
        assert built.kv_chunk_bytes is None
    assert whole.kv_chunk_bytes > whole.kv_span_bytes
    assert whole.kv_span_bytes == pytest.approx(built.kv_span_bytes, rel=0.02)
    assert whole.n_covered_tokens == built.n_covered_tokens < built.n_tokens
    assert 0 < built.chunk_index_bytes < built.index_bytes


def test_a_store_that_is_there_is_used_again(model, tmp_path, clock):
    built, _ = build(model, tmp_path, clock)
    before = clock.now
    assert build(model, tmp_path, clock) == (built, True)
    assert clock.now == before


def test_an_interrupted_build_goes_on(model, tmp_path, clock, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SpanIndex, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build(model, tmp_path, clock)
    assert json.loads((tmp_path / BUILD).read_text())["built"] is None
    built, reused = build(model, tmp_path, clock)
    assert not reused
    assert built.seconds[building.KV] == 100 * built.n_chunks, "nothing is encoded twice"
    assert built.seconds[building.NUGGETS] == 2 * 10 * built.n_chunks, "they were found twice"


def test_a_store_without_its_times_or_of_something_else_is_refused(model, tmp_path, clock):
    build(model, tmp_path, clock)
    with pytest.raises(ConfigError, match="other documents"):
        build(model, tmp_path, clock, dataclasses.replace(ENGINE, chunk_tokens=32))
    (tmp_path / BUILD).unlink()
    with pytest.raises(ConfigError, match="not how long it took"):
        build(model, tmp_path, clock)
    (tmp_path / BUILD).write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        build(model, tmp_path, clock)
