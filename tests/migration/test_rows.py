"""What becomes of rows: nothing is lost without a word."""

from __future__ import annotations

import math
from pathlib import Path
from uuid import uuid4

import chromadb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.core.vector_stores.utils import node_to_metadata_dict

from coinrag_integrations.migration import open_collection, read_documents
from coinrag_integrations.migration.rows import Notes, Row, read_rows
from coinrag_integrations.types import Document
from tests.migration.collections import HashEmbedding, fill_llamaindex, no_telemetry


def documents_of(rows: list[dict], **options: bool) -> tuple[list[Document], Notes]:
    """Through a real collection."""
    client = chromadb.EphemeralClient(no_telemetry())
    collection = client.create_collection(f"c{uuid4().hex}", embedding_function=None)
    for number, row in enumerate(rows):
        collection.add(
            ids=[row.get("id", str(number))],
            documents=None if row.get("text") is None else [row["text"]],
            metadatas=[row["metadata"]] if row.get("metadata") else None,
            embeddings=[row.get("vector", [1.0, 0.0])],
        )
    notes = Notes()
    return list(read_documents(collection, notes, **options)), notes


def test_rows_without_text_are_skipped_and_named():
    documents, notes = documents_of(
        [{"id": "a", "text": "x"}, {"id": "b"}, {"id": "c", "text": " \n"}]
    )
    assert [it.document_id for it in documents] == ["a"]
    assert notes.skipped == {"b": "it has no text", "c": "it has no text"}


def test_metadata_are_kept_and_what_cannot_be_is_counted():
    kept = {"n": 1, "x": 1.5, "on": False, "tags": ["a"], "ids": [1, 2]}
    other = {"coinrag_chunk_id": "ours"}
    rows = [
        {"text": "x", "metadata": kept | other},
        {"text": "y"},
        {"text": "z", "metadata": other},
    ]
    documents, notes = documents_of(rows)
    assert [it.metadata for it in documents] == [kept, {}, {}]
    assert notes.left_out == {"coinrag_chunk_id": 2}


def test_vectors_come_along_unless_they_are_not_wanted():
    rows = [{"text": "x", "vector": [3.0, 4.0]}]
    assert list(documents_of(rows)[0][0].vector) == [3.0, 4.0]
    assert documents_of(rows, with_vectors=False)[0][0].vector is None


def test_pages_lose_and_repeat_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coinrag_integrations.migration.rows._PAGE", 3)
    for n in (2, 3, 7):
        documents, _ = documents_of([{"text": f"text {i}"} for i in range(n)])
        assert [it.text for it in documents] == [f"text {i}" for i in range(n)]


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
values = st.none() | st.integers(-99, 99) | texts | st.booleans()
keys = st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=6)


@given(
    text=texts,
    metadata=st.dictionaries(keys, values, max_size=4),
    hidden=st.lists(keys, max_size=2),
    template=st.sampled_from(["{metadata_str}\n\n{content}", "<{content}> {metadata_str}"]),
    separator=st.sampled_from(["\n", "; "]),
)
def test_what_llamaindex_embeds_is_known(
    text: str, metadata: dict, hidden: list[str], template: str, separator: str
):
    node = TextNode(
        text=text,
        metadata=metadata,
        excluded_embed_metadata_keys=hidden,
        text_template=template,
        metadata_separator=separator,
    )
    stored = node_to_metadata_dict(node, remove_text=True, flat_metadata=True)
    row = Row(id="a", text=text, metadata=stored, vector=[])
    assert row.embedded_text == node.get_content(MetadataMode.EMBED)


def test_a_llamaindex_row_keeps_what_the_user_said_and_what_nodes_need(tmp_path: Path):
    metadata = {"file_name": "a.txt", "size": 7, "none": None, "empty": ""}
    fill_llamaindex(
        tmp_path, ["The organ is old."], [metadata], excluded_llm_metadata_keys=["size"]
    )
    notes = Notes()
    with open_collection(tmp_path) as collection:
        (document,) = read_documents(collection, notes)
    assert document.document_id == "node-0"
    assert document.metadata == {
        "file_name": "a.txt",
        "size": 7,
        "empty": "",
        "ref_doc_id": "doc-0",
        "_llamaindex": '{"excluded_llm_metadata_keys": ["size"]}',
    }
    assert (notes.skipped, notes.left_out) == ({}, {})


def test_the_vector_of_a_llamaindex_row_is_that_of_its_embedded_text(tmp_path: Path):
    fill_llamaindex(tmp_path, ["The organ is old."], [{"title": "Pipes of Marenqué"}])
    with open_collection(tmp_path) as collection:
        (row,) = read_rows(collection)
    made = HashEmbedding().get_text_embedding(row.embedded_text)
    assert math.isclose(sum(a * b for a, b in zip(made, row.vector, strict=True)), 1, abs_tol=1e-5)
    assert "title" in row.embedded_text


@pytest.mark.parametrize("content", ["", "[]", "{", "7", '{"metadata": null}'])
def test_a_damaged_node_is_read_as_a_plain_row(content: str):
    metadata = {"_node_content": content or "x", "title": "Organ"}
    (document,), _ = documents_of([{"text": "The organ is old.", "metadata": metadata}])
    assert document.text == "The organ is old."
    assert document.metadata["title"] == "Organ"
