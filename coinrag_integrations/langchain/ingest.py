"""LangChain documents into a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from langchain_core.documents import Document as LangDocument

from coinrag_integrations import _adapters
from coinrag_integrations.errors import DocumentError
from coinrag_integrations.ingest import IngestReport, OnProgress
from coinrag_integrations.langchain._convert import read_document
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document


def add_documents(
    rag: CoinRAG, documents: Iterable[LangDocument], on_progress: OnProgress | None = None
) -> IngestReport:
    """Add documents to the store, or replace those whose id it holds and that changed.

    A document's id is its `id`; else `metadata["source"]`, with "#" and `metadata["page"]` if there
    is one; else a hash of its text. Metadata is kept as scalars and lists of one type: None is left
    out, other nested values become JSON.

    Raises:
        DocumentError: a text or a metadata value that cannot be stored, or two different texts of
            one source that would replace each other.
        StoreError, SpanIndexError: the disk or Chroma refuses; finished documents stay.
    """
    return rag.add(_read(documents), on_progress)


def _read(documents: Iterable[LangDocument]) -> Iterator[Document]:
    seen: dict[str, str] = {}
    for document in documents:
        read = read_document(document)
        # Ids that were chosen may come twice: the later document wins. Ids that we made may not.
        found = _adapters.digest(read.text)
        if not document.id and seen.setdefault(read.document_id, found) != found:
            raise DocumentError(
                f"two different documents would both be called {read.document_id!r}: give every "
                "document an id of its own (Document.id)"
            )
        yield read
