"""Collections are found wherever they are, and nothing of them changes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import chromadb
import pytest
from llama_index.core import VectorStoreIndex

from coinrag_integrations.errors import ConfigError, SpanIndexError
from coinrag_integrations.migration import describe, folder_bytes, open_collection, read_documents
from coinrag_integrations.migration.rows import Notes
from coinrag_integrations.retrieval import open_client
from tests.migration.collections import (
    HashEmbedding,
    client_of,
    digests,
    fill_langchain,
    fill_llamaindex,
    langchain_store,
    llamaindex_store,
    no_telemetry,
)

TEXTS = ["The organ is old.", "The pier is green."]


def texts_of(source: object, name: str | None = None) -> list[str]:
    with open_collection(source, name) as collection:
        return [document.text for document in read_documents(collection, Notes())]


def test_a_folder_is_read_and_not_touched(tmp_path: Path):
    fill_langchain(tmp_path / "db", TEXTS)
    before = digests(tmp_path / "db")
    assert texts_of(tmp_path / "db") == TEXTS
    assert texts_of(str(tmp_path / "db"), "app") == TEXTS
    assert digests(tmp_path / "db") == before


def test_chroma_itself_would_touch_it(tmp_path: Path):
    """Why folders are copied; if this fails some day, they need not be."""
    fill_langchain(tmp_path / "db", TEXTS * 600)
    before = digests(tmp_path / "db")
    with client_of(tmp_path / "db") as client:
        client.get_collection("app", embedding_function=None).get()
    assert digests(tmp_path / "db") != before


def test_the_copy_is_gone_afterwards(tmp_path: Path):
    fill_langchain(tmp_path / "db", TEXTS)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with open_collection(tmp_path / "db", scratch=scratch):
        (copy,) = scratch.iterdir()
        assert folder_bytes(copy) >= folder_bytes(tmp_path / "db")
    assert not list(scratch.iterdir())


def test_what_the_frameworks_hold_open_is_taken(tmp_path: Path):
    fill_langchain(tmp_path / "lc", TEXTS)
    fill_llamaindex(tmp_path / "li", TEXTS)
    with langchain_store(tmp_path / "lc") as store:
        assert texts_of(store) == texts_of(store._collection) == TEXTS
    with llamaindex_store(tmp_path / "li") as vector_store:
        assert texts_of(vector_store) == texts_of(vector_store.client) == TEXTS
        index = VectorStoreIndex.from_vector_store(vector_store, embed_model=HashEmbedding())
        assert texts_of(index) == TEXTS


def test_one_of_several_collections_has_to_be_named(tmp_path: Path):
    fill_langchain(tmp_path, TEXTS)
    with client_of(tmp_path) as client:
        client.create_collection("other", embedding_function=None)
    with pytest.raises(SpanIndexError, match=r"more than one\. Collections: app, other"):
        texts_of(tmp_path)
    with pytest.raises(SpanIndexError, match=r"no collection 'ap'\. Collections: app, other"):
        texts_of(tmp_path, "ap")
    assert texts_of(tmp_path, "app") == TEXTS
    with (
        open_collection(tmp_path, "other") as collection,
        pytest.raises(SpanIndexError, match="'other' is empty"),
    ):
        describe(collection)


def test_what_is_no_database_is_named(tmp_path: Path):
    (tmp_path / "chroma.sqlite3").write_bytes(b"no database" * 100)
    with pytest.raises(SpanIndexError, match="cannot open Chroma"):
        texts_of(tmp_path)
    with pytest.raises(SpanIndexError, match=re.escape(f"no Chroma database in {tmp_path / 'x'}")):
        texts_of(tmp_path / "x")
    for nothing in (7, ["db"], None, object()):
        with pytest.raises(ConfigError, match="holds no Chroma collection"):
            texts_of(nothing)
    with pytest.raises(SpanIndexError, match="is it running"):
        texts_of("http://127.0.0.1:9")


@pytest.mark.parametrize("n_changes", [0, 1, 2, 3])
def test_a_folder_that_is_written_to_meanwhile_is_copied_again_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_changes: int
):
    fill_langchain(tmp_path, TEXTS)
    copied: list[str] = []

    def copy_while_somebody_writes(source: Path, target: Path, *args: Any, **options: Any) -> None:
        copytree(source, target, *args, **options)
        if source != tmp_path:  # it calls itself for the folders inside
            return
        copied.append(target.name)
        if len(copied) <= n_changes:
            (source / "journal").write_text("x" * len(copied))

    copytree = shutil.copytree
    monkeypatch.setattr(shutil, "copytree", copy_while_somebody_writes)
    if n_changes < 3:
        assert texts_of(tmp_path) == TEXTS
        assert len(copied) == n_changes + 1
    else:
        with pytest.raises(SpanIndexError, match="being written to"):
            texts_of(tmp_path)


def test_a_scratch_folder_that_is_not_there_is_named(tmp_path: Path):
    fill_langchain(tmp_path / "db", TEXTS)
    with (
        pytest.raises(SpanIndexError, match="cannot make a folder in"),
        open_collection(tmp_path / "db", scratch=tmp_path / "missing"),
    ):
        pass


def test_collections_say_what_they_are(tmp_path: Path):
    fill_langchain(tmp_path / "lc", TEXTS)
    fill_llamaindex(tmp_path / "li", TEXTS)
    for folder, framework in (("lc", "LangChain"), ("li", "LlamaIndex")):
        with open_collection(tmp_path / folder) as collection:
            info = describe(collection)
        assert (info.name, info.framework, info.n_rows) == ("app", framework, 2)
        assert (info.n_dimensions, info.space, info.has_unit_vectors) == (64, "l2", True)
    client = chromadb.EphemeralClient(no_telemetry())
    for space in ("cosine", "ip", "l2"):
        for options in (
            {"configuration": {"hnsw": {"space": space}}},
            {"metadata": {"hnsw:space": space}},
        ):
            collection = client.create_collection("x-y-z", embedding_function=None, **options)
            collection.add(ids=["a"], documents=["x"], embeddings=[[3.0, 4.0]])
            info = describe(collection)
            assert (info.space, info.has_unit_vectors) == (space, False)
            client.delete_collection("x-y-z")


def test_a_collection_of_a_server_is_read(server: tuple[str, object]):
    address, _ = server
    client = open_client(address)
    collection = client.create_collection("served", embedding_function=None)
    collection.add(ids=["a", "b"], documents=TEXTS, embeddings=[[1.0, 0.0], [0.0, 1.0]])
    assert texts_of(address) == texts_of(address, "served") == TEXTS
    with pytest.raises(SpanIndexError, match=r"no collection 'other'\. Collections: served"):
        texts_of(address, "other")
