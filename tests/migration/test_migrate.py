"""What is moved is found as before, by the vectors that it had, and the collection stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.migration import fitting_chunk_tokens, migrate, open_collection
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document
from tests.adapters import QUESTION, TEXTS
from tests.migration.collections import (
    HashEmbeddings,
    client_of,
    digests,
    fill_langchain,
    fill_llamaindex,
    langchain_store,
)
from tests.tiny import HashEmbedder

ROWS = list(TEXTS.values())


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """The application's Chroma folder, beside the store."""
    return tmp_path / "db"


class Shifted(HashEmbeddings):
    """Another model of the same size."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return np.roll(super().embed_documents(texts), 7, axis=1).tolist()


class Noisy(HashEmbeddings):
    """The same model, elsewhere: vectors that differ a little, and are longer."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors = 3 * np.asarray(super().embed_documents(texts))
        return (vectors + np.random.default_rng(0).normal(0, 0.01, vectors.shape)).tolist()


def test_rows_become_documents_and_a_second_time_nothing_happens(rag: CoinRAG, db: Path):
    fill_langchain(db, ROWS, [{"source": name} for name in TEXTS])
    report = migrate(rag, db)
    assert report.collection.framework == "LangChain"
    assert report.agreement == pytest.approx(1.0, abs=1e-5)
    assert (report.ingest.n_added, report.ingest.n_unchanged) == (4, 0)
    assert rag.engine.catalog.documents() == [f"row-{i}" for i in range(4)]
    again = migrate(rag, db)
    assert (again.ingest.n_unchanged, again.ingest.n_encoded, again.n_pruned) == (4, 0, 0)


def test_changes_are_taken_over_and_only_asked_for_removed(rag: CoinRAG, db: Path):
    fill_langchain(db, ROWS)
    migrate(rag, db)
    rag.add([Document(document_id="mine", text="The mill is red.")])
    with langchain_store(db) as store:
        store.delete(["row-0"])
        store.add_texts(["The mill ground rye."], ids=["row-9"])
        text = "The café is closed."
        vector = HashEmbeddings().embed_query(text)
        store._collection.update(ids=["row-1"], documents=[text], embeddings=[vector])
    report = migrate(rag, db)
    assert (report.ingest.n_added, report.ingest.n_updated, report.ingest.n_unchanged) == (1, 1, 2)
    assert rag.engine.catalog.documents() == ["mine", *(f"row-{i}" for i in (0, 1, 2, 3, 9))]
    pruned = migrate(rag, db, prune=True)
    assert pruned.n_pruned == 2
    assert rag.engine.catalog.documents() == [f"row-{i}" for i in (1, 2, 3, 9)]


@pytest.mark.parametrize("fill", [fill_langchain, fill_llamaindex])
def test_vectors_of_another_embedder_are_refused_and_nothing_is_written(
    rag: CoinRAG, db: Path, fill
):
    if fill is fill_langchain:
        fill_langchain(db, ROWS, embeddings=Shifted())
    else:  # a title that is embedded, and not known to be
        fill_llamaindex(db, ROWS, [{"words": "entirely other " * 20}] * 4)
        with client_of(db) as client:
            collection = client.get_collection("app", embedding_function=None)
            there = collection.get(include=["metadatas"])
            plain = [{k: v for k, v in m.items() if k[0] != "_"} for m in there["metadatas"]]
            collection.update(
                ids=there["ids"], metadatas=[{**m, "_node_content": None} for m in plain]
            )
    with pytest.raises(ConfigError, match=r"agree with those of 'test-hash-64' by -?0\.\d\d only"):
        migrate(rag, db)
    assert rag.engine.catalog.documents() == []
    report = migrate(rag, db, reembed=True)
    assert (report.agreement, report.ingest.n_added) == (None, 4)
    best = rag.retrieve(QUESTION, "chunk")[0]
    assert best.score == pytest.approx(
        float(HashEmbedder().embed_query(best.text) @ HashEmbedder().embed_query(QUESTION)),
        abs=1e-4,
    )


def test_vectors_that_differ_a_little_are_kept(rag: CoinRAG, db: Path):
    fill_langchain(db, ["The organ is old.", "The pier is green."], embeddings=Noisy())
    report = migrate(rag, db)
    assert 0.98 < report.agreement < 0.9999
    assert not report.collection.has_unit_vectors
    (stored,) = rag.engine.catalog.vectors(rag.engine.catalog.chunk_ids("row-0")).values()
    assert np.linalg.norm(stored) == pytest.approx(3, abs=0.2)


def test_vectors_of_another_length_are_refused(rag: CoinRAG, db: Path):
    with client_of(db) as client:
        collection = client.create_collection("app", embedding_function=None)
        collection.add(ids=["a"], documents=["x"], embeddings=[[1.0, 0.0]])
    with pytest.raises(ConfigError, match="holds 2 numbers a vector, 'test-hash-64' makes 64"):
        migrate(rag, db)


def test_rows_without_text_are_reported(rag: CoinRAG, db: Path):
    fill_langchain(db, ["The organ is old.", "  "])
    report = migrate(rag, db)
    assert report.notes.skipped == {"row-1": "it has no text"}
    assert rag.engine.catalog.documents() == ["row-0"]


def test_chunks_can_be_as_long_as_the_longest_row(rag: CoinRAG, db: Path):
    model = rag.engine.model
    for words, expected in ((3, 512), (200, None), (9000, 2048)):
        folder = db / str(words)
        fill_langchain(folder, ["short", "wheel " * words])
        with open_collection(folder) as collection:
            fitting = fitting_chunk_tokens(collection, replace(model, window=8192))
        longest = len(model.tokenizer.encode("wheel " * words).ids)
        if expected is None:
            assert longest <= fitting < longest + 64
        else:
            assert fitting == expected
        assert fitting % 64 == 0


def test_the_collection_of_a_running_application_stays_as_it_is(rag: CoinRAG, db: Path):
    fill_langchain(db, ROWS)
    with langchain_store(db) as store:
        question = store.similarity_search(QUESTION, k=2)
        before = digests(db)
        assert migrate(rag, store).ingest.n_added == 4
        assert digests(db) == before
        assert store.similarity_search(QUESTION, k=2) == question
