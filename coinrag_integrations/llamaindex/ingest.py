"""LlamaIndex documents into a store."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.schema import Document as LlamaDocument
from llama_index.core.schema import MetadataMode

from coinrag_integrations import _adapters
from coinrag_integrations.ingest import IngestReport, OnProgress
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document


def add_documents(
    rag: CoinRAG, documents: Iterable[LlamaDocument], on_progress: OnProgress | None = None
) -> IngestReport:
    """Add documents to the store, or replace those whose `doc_id` it holds and that changed.

    LlamaIndex gives a document without an id a random one, which is new every time: for documents
    that will be added again, set `doc_id`, or read them with `filename_as_id=True`. Metadata is
    kept as flat scalars: None is left out, nested values become JSON.

    Raises:
        DocumentError: a text or a metadata value that cannot be stored.
        StoreError, SpanIndexError: the disk or Chroma refuses; finished documents stay.
    """
    return rag.add(
        (
            Document(
                document_id=document.doc_id,
                text=document.get_content(metadata_mode=MetadataMode.NONE),
                metadata=_adapters.flat_metadata(document.metadata, document.doc_id),
            )
            for document in documents
        ),
        on_progress,
    )
