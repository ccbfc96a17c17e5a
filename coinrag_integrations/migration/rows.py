"""Rows of other people's collections as documents: LangChain's, LlamaIndex's, or plain ones."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from coinrag_integrations import _adapters
from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.retrieval import clean_metadata
from coinrag_integrations.retrieval.chroma import guard
from coinrag_integrations.retrieval.embedders import Vectors
from coinrag_integrations.types import Document

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

Framework = Literal["LlamaIndex", "LangChain"]
_PAGE = 1000
_CONTENT = "_node_content"
# What LlamaIndex writes beside the user's metadata. Of the three names of a document one is kept.
_LLAMAINDEX = (_CONTENT, "_node_type", "document_id", "doc_id", _adapters.REF_DOC_ID)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionInfo:
    """What a collection is. LangChain's look like those that were made by hand.

    `space` is Chroma's distance: "l2", "cosine" or "ip".
    """

    name: str
    framework: Framework
    n_rows: int
    n_dimensions: int
    space: str
    has_unit_vectors: bool


@dataclass(slots=True)
class Notes:
    """What of a collection cannot be moved: rows by id with the reason, metadata keys with how often."""

    skipped: dict[str, str] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row as Chroma gives it. `vector`: [d]."""

    id: str
    text: str | None
    metadata: Mapping[str, Any]
    vector: Vectors

    @property
    def node(self) -> dict[str, Any] | None:
        """What LlamaIndex wrote of a node; None if it was not LlamaIndex that wrote the row."""
        try:
            node = json.loads(self.metadata[_CONTENT])
        except (KeyError, TypeError, ValueError):
            return None
        return node if isinstance(node, dict) else None

    @property
    def embedded_text(self) -> str:
        """The text that the vector is of: LlamaIndex puts metadata in front."""
        text, node = self.text or "", self.node
        if node is None:
            return text
        fields = _adapters.node_fields(_adapters.node_metadata(node))
        hidden = fields["excluded_embed_metadata_keys"]
        lines = [
            fields["metadata_template"].format(key=key, value=str(value))
            for key, value in (node.get("metadata") or {}).items()
            if key not in hidden
        ]
        shown = fields["metadata_separator"].join(lines).strip()
        template: str = fields["text_template"]
        return template.format(content=text, metadata_str=shown).strip() if shown else text


def describe(collection: Collection) -> CollectionInfo:
    """What a collection is, by its first rows.

    Raises:
        SpanIndexError: it is empty, or Chroma fails.
    """
    with guard(f"count the rows of {collection.name!r}"):
        n_rows = collection.count()
    rows = _page(collection, 0, 100)
    if not rows:
        raise SpanIndexError(
            f"the collection {collection.name!r} is empty: there is nothing to move"
        )
    lengths = [float(np.linalg.norm(row.vector)) for row in rows]
    return CollectionInfo(
        name=collection.name,
        framework="LlamaIndex" if any(row.node is not None for row in rows) else "LangChain",
        n_rows=n_rows,
        n_dimensions=len(rows[0].vector),
        space=_space(collection),
        has_unit_vectors=all(abs(length - 1) < 1e-2 for length in lengths),
    )


def read_rows(collection: Collection) -> Iterator[Row]:
    """All rows, in the order in which they were added.

    Raises:
        SpanIndexError: Chroma fails.
    """
    start = 0
    while rows := _page(collection, start, _PAGE):
        yield from rows
        start += len(rows)


def read_documents(
    collection: Collection, notes: Notes, *, with_vectors: bool = True
) -> Iterator[Document]:
    """Each row as a document of its id, with its metadata and, if asked for, its vector.

    What cannot be moved goes to `notes`.

    Raises:
        SpanIndexError: Chroma fails.
    """
    for row in read_rows(collection):
        if not (row.text or "").strip():
            notes.skipped[row.id] = "it has no text"
        elif with_vectors and not np.isfinite(row.vector).all():
            notes.skipped[row.id] = "its vector is not finite"
        else:
            yield Document(
                document_id=row.id,
                text=row.text or "",
                metadata=_metadata(row, notes),
                vector=array("f", row.vector.tobytes()) if with_vectors else None,
            )


def _metadata(row: Row, notes: Notes) -> dict[str, Any]:
    """What the user said of a row, and what LlamaIndex needs to know of it."""
    node, found = row.node, dict(row.metadata)
    of_node: dict[str, Any] = {}
    if node is not None:
        said = node.get("metadata") or {}
        source = found.get(_adapters.REF_DOC_ID, "None")
        # It writes "" for None, which is not the same.
        found = {
            key: value
            for key, value in found.items()
            if key not in _LLAMAINDEX and not (value == "" and said.get(key, "") is None)
        }
        of_node = _adapters.node_metadata(node)
        if source != "None":
            of_node[_adapters.REF_DOC_ID] = source
    kept: dict[str, Any] = {}
    for key, value in found.items():
        try:
            if key.startswith(_adapters.PREFIX):
                raise SpanIndexError(f"metadata {key!r} is one of ours")
            kept |= clean_metadata({key: value})
        except SpanIndexError:
            notes.left_out[key] += 1
    return {**kept, **of_node}


def _page(collection: Collection, start: int, size: int) -> list[Row]:
    with guard(f"read rows of {collection.name!r}"):
        found = collection.get(
            limit=size, offset=start, include=["documents", "metadatas", "embeddings"]
        )
    vectors = np.asarray(found["embeddings"], dtype=np.float32)
    parts = zip(
        found["ids"], found["documents"] or [], found["metadatas"] or [], vectors, strict=True
    )
    return [
        Row(id=id_, text=text, metadata=metadata or {}, vector=vector)
        for id_, text, metadata, vector in parts
    ]


def _space(collection: Collection) -> str:
    configured: Any = collection.configuration_json
    for kind in ("hnsw", "spann"):
        if space := (configured.get(kind) or {}).get("space"):
            return str(space)
    return str((collection.metadata or {}).get("hnsw:space", "l2"))
