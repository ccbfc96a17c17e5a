"""5,500 rows of each framework, more than Chroma takes at once, moved in three attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llama_index.core.vector_stores.utils import metadata_dict_to_node

from coinrag_integrations.engine import EngineConfig
from coinrag_integrations.ingest import IngestReport
from coinrag_integrations.migration import migrate
from coinrag_integrations.rag import CoinRAG
from tests.migration.collections import client_of, digests, fill_langchain, fill_llamaindex
from tests.tiny import HashEmbedder, tiny_model

N_ROWS = 5_500
INTERRUPTIONS = (1_500, 3_500)
TEXTS = [
    f"Buoy {i} lies off Cape {i % 97}. It was painted in {1800 + i % 200}." for i in range(N_ROWS)
]
METADATA = [
    {"source": f"chart-{i % 61}.txt", "number": i, "open": i % 2 == 0} for i in range(N_ROWS)
]


def stop_at(n: int) -> Callable[[IngestReport], None]:
    def check(report: IngestReport) -> None:
        if report.n_documents >= n:
            raise KeyboardInterrupt

    return check


def open_store(folder: Path) -> CoinRAG:
    return CoinRAG.open(
        folder, model=tiny_model(), embedder=HashEmbedder(), config=EngineConfig(load="read")
    )


@pytest.mark.parametrize("fill", [fill_langchain, fill_llamaindex])
def test_a_large_collection_is_moved_although_interrupted_twice(
    tmp_path: Path, fill: Callable[..., None]
):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    fill(theirs, TEXTS, METADATA)
    before = digests(theirs)

    n_done = 0
    for n in INTERRUPTIONS:
        with open_store(ours) as rag:
            with pytest.raises(KeyboardInterrupt):
                migrate(rag, theirs, on_progress=stop_at(n))
            n_kept = len(rag.engine.catalog.documents())
            assert n_done < n_kept < N_ROWS  # it goes on from where it was
            n_done = n_kept
    with open_store(ours) as rag:
        report = migrate(rag, theirs)
        assert report.ingest.n_unchanged == n_done
        assert report.ingest.n_added == N_ROWS - n_done >= report.ingest.n_encoded
        assert (report.notes.skipped, dict(report.notes.left_out)) == ({}, {})
        again = migrate(rag, theirs)
        assert (again.ingest.n_unchanged, again.ingest.n_encoded) == (N_ROWS, 0)
        moved = {chunk.document_id: chunk for chunk in rag.engine.catalog.chunks()}
        rows = rag.index._chunks
        vectors = {
            metadata["coinrag_document_id"]: vector
            for start in range(0, N_ROWS, 5_000)
            for found in [rows.get(limit=5_000, offset=start, include=["metadatas", "embeddings"])]
            for metadata, vector in zip(found["metadatas"], found["embeddings"], strict=True)
        }
        assert rag.engine.catalog.counts() == {"documents": N_ROWS, "chunks": N_ROWS}

    assert digests(theirs) == before
    with client_of(theirs) as client:
        collection = client.get_collection("app", embedding_function=None)
        for start in range(0, N_ROWS, 5_000):
            page = collection.get(
                limit=5_000, offset=start, include=["documents", "metadatas", "embeddings"]
            )
            for id_, text, metadata, vector in zip(
                page["ids"], page["documents"], page["metadatas"], page["embeddings"], strict=True
            ):
                chunk = moved.pop(id_)
                assert chunk.text == text
                assert vectors[id_] @ vector == pytest.approx(1.0, abs=1e-5)
                if "_node_content" in metadata:
                    node = metadata_dict_to_node(metadata, text=text)
                    assert chunk.metadata == {**node.metadata, "ref_doc_id": node.ref_doc_id}
                else:
                    assert chunk.metadata == metadata
    assert not moved
