"""Documents that come with their vector are found by it, whatever happens to the index."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import numpy as np
import pytest

from coinrag_integrations.engine.store import Catalog
from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.maintenance import repair
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document
from tests.tiny import TEXT, HashEmbedder

EMBEDDER = HashEmbedder()
QUESTION = "Who tends the lamp?"
# A text that shares no word with the question, and the vector of one that does.
PIER = Document(
    document_id="pier",
    text="Ines Caldero painted it green.",
    vector=EMBEDDER.embed_query(QUESTION) * 3.0,
)
LAMP = Document(document_id="lamp", text="Nobody tends the lamp of Sorn. Who would?")


@pytest.fixture
def filled(rag: CoinRAG) -> CoinRAG:
    rag.add([PIER, LAMP])
    return rag


def best(rag: CoinRAG) -> tuple[str, float]:
    first = rag.retrieve(QUESTION, "chunk")[0]
    return first.document_id, first.score


def test_a_document_is_found_by_the_vector_it_came_with(filled: CoinRAG):
    name, score = best(filled)
    assert name == "pier"
    assert score == pytest.approx(1.0, abs=1e-5)


def test_nuggets_are_embedded(filled: CoinRAG):
    (nugget, *_) = (it for it in filled.retrieve(QUESTION) if it.document_id == "pier")
    own = float(EMBEDDER.embed_query(nugget.text) @ EMBEDDER.embed_query(QUESTION))
    assert nugget.score == pytest.approx(own, abs=1e-5)


def test_an_index_made_anew_has_the_vector_too(filled: CoinRAG):
    filled.index.reset()
    filled.ingestor.mend_index(anew=True)
    assert best(filled)[0] == "pier"
    filled.index.delete([it.chunk_id for it in filled.engine.catalog.chunks()])
    assert repair(filled) == 2
    assert best(filled)[0] == "pier"
    filled.index.reset()
    filled.ingestor.mend()
    assert best(filled)[0] == "pier"


def test_documents_of_several_chunks_are_embedded(rag: CoinRAG):
    rag.add([replace(PIER, text=TEXT * 3), LAMP])
    assert best(rag)[0] == "lamp"
    assert rag.engine.catalog.vectors(rag.engine.catalog.chunk_ids("pier")) == {}


def test_another_vector_is_a_change_and_the_same_is_none(filled: CoinRAG):
    assert filled.add([PIER]).n_unchanged == 1
    assert filled.add([replace(PIER, vector=np.asarray(PIER.vector).tolist())]).n_unchanged == 1
    other = replace(PIER, vector=EMBEDDER.embed_query("green"))
    assert filled.add([other]).n_updated == 1
    assert best(filled)[0] == "lamp"
    assert filled.add([replace(PIER, vector=None)]).n_updated == 1
    assert filled.engine.catalog.vectors(filled.engine.catalog.chunk_ids("pier")) == {}


def test_a_vector_goes_with_its_document(filled: CoinRAG):
    filled.delete(["pier"])
    with sqlite3.connect(filled.engine.catalog.path) as db:
        assert db.execute("SELECT count(*) FROM vectors").fetchone() == (0,)


def test_a_vector_of_another_length_is_refused_and_nothing_is_there(rag: CoinRAG):
    rag.add([LAMP])
    with pytest.raises(SpanIndexError, match="dimension"):
        rag.add([replace(PIER, vector=[1.0, 0.0])])
    assert rag.engine.catalog.documents() == ["lamp"]
    assert rag.add([PIER]).n_added == 1
    assert best(rag)[0] == "pier"


def test_catalogs_from_before_vectors_are_opened(filled: CoinRAG, tmp_path):
    path = filled.engine.catalog.path
    filled.engine.catalog.close()
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE vectors")
    with Catalog(path) as catalog:
        assert catalog.documents() == ["lamp", "pier"]
        chunk_ids = catalog.chunk_ids("pier")
        assert catalog.vectors(chunk_ids) == {}
        chunk = catalog.chunk(chunk_ids[0])
        catalog.begin_document("pier", "1" * 64, [chunk], [1.0, 2.0])
        catalog.finish_document("pier", "1" * 64)
        assert catalog.vectors(chunk_ids)[chunk_ids[0]].tolist() == [1.0, 2.0]
