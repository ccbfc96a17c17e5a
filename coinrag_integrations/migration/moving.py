"""A collection into a store: every row a document of the same id, with the vector that it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.ingest import IngestReport, OnProgress
from coinrag_integrations.migration.opening import open_collection
from coinrag_integrations.migration.rows import (
    CollectionInfo,
    Notes,
    Row,
    describe,
    read_documents,
    read_rows,
)
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.retrieval.embedders import Vectors, unit_vectors
from coinrag_integrations.types import Document

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

_N_COMPARED = 16
_AGREEMENT = 0.9  # cosine; vectors of other models are near 0, rounding leaves more than 0.99
_MULTIPLE = 64  # of the tokens of a chunk
_SMALLEST, _LARGEST = 512, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """What was moved. `agreement`: cosine of old and new vectors, None if all were made anew.

    `n_pruned` counts documents of the store that the collection no longer has, and that were removed.
    """

    collection: CollectionInfo
    ingest: IngestReport
    notes: Notes
    agreement: float | None
    n_pruned: int = 0


def migrate(
    rag: CoinRAG,
    source: object,
    name: str | None = None,
    *,
    reembed: bool = False,
    prune: bool = False,
    scratch: Path | None = None,
    on_progress: OnProgress | None = None,
) -> MigrationReport:
    """Move a Chroma collection of LangChain's or LlamaIndex's into a store; it stays as it is.

    `source` and `name` are those of `open_collection`. Rows keep id, text, metadata and vector, nuggets
    and KV are added. So that nuggets and questions can be compared with the vectors, the store's embedder
    must be the one that made them; `reembed` embeds all texts anew instead. What is there already is
    skipped: after an interruption, call it again. `prune` removes documents of the store that the
    collection does not have.

        >>> rag = CoinRAG.open("store", model=…, embedder=LangChainEmbedder(embeddings))
        >>> migrate(rag, Chroma("app", embeddings, persist_directory="db"))

    Raises:
        ConfigError: the vectors are not those of the store's embedder.
        SpanIndexError: see `open_collection`.
        DocumentError, StoreError: see `Ingestor.add`.
    """
    with open_collection(source, name, scratch=scratch) as collection:
        info = describe(collection)
        agreement = None if reembed else check_embedder(collection, info, rag.index.embedder)
        notes, seen = Notes(), set[str]()

        def documents() -> Iterator[Document]:
            for document in read_documents(collection, notes, with_vectors=not reembed):
                seen.add(document.document_id)
                yield document

        ingest = rag.add(documents(), on_progress)
        gone = set(rag.engine.catalog.documents()) - seen if prune else set()
        return MigrationReport(
            collection=info,
            ingest=ingest,
            notes=notes,
            agreement=agreement,
            n_pruned=rag.delete(sorted(gone)),
        )


def check_embedder(collection: Collection, info: CollectionInfo, embedder: Embedder) -> float:
    """How well an embedder's vectors agree with those of a collection (median cosine).

    Raises:
        ConfigError: they are not the same embedder's.
        SpanIndexError: Chroma fails.
    """
    rows = [
        row for row in islice(read_rows(collection), 10 * _N_COMPARED) if (row.text or "").strip()
    ]
    if not (rows := rows[:: max(1, len(rows) // _N_COMPARED)]):
        return 1.0
    made = embedder.embed_documents([row.embedded_text for row in rows])
    if made.shape[1] != info.n_dimensions:
        what = (
            f"{info.n_dimensions} numbers a vector, {embedder.embedder_id!r} makes {made.shape[1]}"
        )
    else:
        agreement = _agreement(rows, made)
        if agreement >= _AGREEMENT:
            return agreement
        what = f"vectors that agree with those of {embedder.embedder_id!r} by {agreement:.2f} only"
    raise ConfigError(
        f"the collection {info.name!r} holds {what}: give the embedder that it was made with (in Python, "
        "LangChainEmbedder(…) or LlamaIndexEmbedder(…)), or embed all texts anew: --reembed, reembed=True"
    )


def fitting_chunk_tokens(collection: Collection, model: LoadedModel) -> int:
    """Tokens a chunk with which every row is one chunk; at most 2,048, or half the model's window.

    Raises:
        SpanIndexError: Chroma fails.
    """
    longest = max(
        (len(model.tokenizer.encode(row.text).ids) for row in read_rows(collection) if row.text),
        default=0,
    )
    rounded = -(-longest // _MULTIPLE) * _MULTIPLE
    return min(max(_SMALLEST, rounded), _LARGEST, max(_SMALLEST, model.window // 2))


def _agreement(rows: Sequence[Row], made: Vectors) -> float:
    """Median cosine."""
    cosines = (unit_vectors([row.vector for row in rows]) * made).sum(axis=1)
    return float(np.median(cosines))
