"""LlamaIndex documents and nodes into a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TransformComponent,
)
from llama_index.core.schema import Document as LlamaDocument

from coinrag_integrations import _adapters
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.ingest import Ingestor, IngestReport, OnProgress
from coinrag_integrations.llamaindex._bound import Bound
from coinrag_integrations.llamaindex._convert import nuggets_of
from coinrag_integrations.nuggets import KnownNuggets
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document, Nugget

_DOCUMENT = "coinrag_document_id"
_PLACE = ("coinrag_chunk_id", "coinrag_char_start")


def add_documents(
    rag: CoinRAG, documents: Iterable[LlamaDocument], on_progress: OnProgress | None = None
) -> IngestReport:
    """Add documents to the store, or replace those whose `doc_id` it holds and that changed.

    LlamaIndex gives a document without an id a random one, which is new every time: for documents
    that will be added again, set `doc_id`, or read them with `filename_as_id=True`. Metadata is
    kept as scalars and lists of one type: None is left out, other nested values become JSON.

    Raises:
        DocumentError: a text or a metadata value that cannot be stored.
        StoreError, SpanIndexError: the disk or Chroma refuses; finished documents stay.
    """
    return rag.add(map(_document, documents), on_progress)


def delete_ref_docs(rag: CoinRAG, ref_doc_ids: Iterable[str]) -> int:
    """Remove documents, and those that were nodes of them in a collection that was moved here.

    Returns how many there were.

    Raises:
        StoreError, SpanIndexError: the disk or Chroma refuses.
    """
    ids = list(ref_doc_ids)
    nodes = rag.index.documents({_adapters.REF_DOC_ID: {"$in": ids}})
    return rag.delete(dict.fromkeys([*ids, *sorted(nodes)]))


class CoinRAGIngestor(TransformComponent):
    """The step of an `IngestionPipeline` that encodes, stores and indexes; nodes pass through it.

    Takes whole documents, or the nodes of a `NuggetNodeParser` with the nuggets that it found. A document
    that was there before is replaced. A pipeline removes documents through its vector store: give it
    a `CoinRAGVectorStore`.

        >>> IngestionPipeline(
        ...     transformations=[NuggetNodeParser.from_defaults(rag=rag), CoinRAGIngestor(rag=rag)]
        ... ).run(documents=documents)
    """

    _bound: Bound = PrivateAttr()

    def __init__(self, *, rag: CoinRAG | None = None, **data: Any) -> None:
        """Without `rag` it can be kept, but not used."""
        super().__init__(**data)
        self._bound = Bound(rag)

    @classmethod
    def class_name(cls) -> str:
        """The name under which the step is serialised."""
        return "CoinRAGIngestor"

    def __call__(self, nodes: Sequence[BaseNode], **_: Any) -> Sequence[BaseNode]:
        """Store what the nodes stand for, and give them back.

        Raises:
            ConfigError: nodes of another parser, or not all of a document's.
            DocumentError, StoreError, SpanIndexError: as for `add_documents`.
        """
        rag = self._bound.need(self)
        whole = [node for node in nodes if isinstance(node, LlamaDocument)]
        if whole:
            add_documents(rag, whole)
        parts = [node for node in nodes if not isinstance(node, LlamaDocument)]
        if parts:
            if strange := [n for n in parts if not _adapters.is_span(n.metadata)]:
                raise ConfigError(
                    f"node {strange[0].node_id!r} comes from another parser, so its text is no chunk "
                    "of the store: use NuggetNodeParser, or give whole documents"
                )
            chunks = [node for node in parts if _adapters.NUGGETS in node.metadata]
            known = KnownNuggets({_text(n): [_range(it) for it in nuggets_of(n)] for n in chunks})
            Ingestor(rag.engine, rag.index, known).add(_joined(rag, chunks))
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Like a call, off the event loop."""
        return await asyncio.to_thread(self, nodes, **kwargs)


def _joined(rag: CoinRAG, chunks: Sequence[BaseNode]) -> list[Document]:
    """The documents whose chunks these are."""
    by_document: dict[str, list[BaseNode]] = {}
    for node in chunks:
        by_document.setdefault(str(node.metadata[_DOCUMENT]), []).append(node)
    documents = []
    for document_id, nodes in by_document.items():
        nodes.sort(key=lambda node: int(node.metadata["coinrag_char_start"]))
        document = Document(
            document_id=document_id,
            text="".join(map(_text, nodes)),
            metadata=_metadata(nodes[0], document_id),
        )
        made = [(chunk.chunk_id, chunk.char_start) for chunk in rag.engine.chunk(document)]
        given = [tuple(node.metadata[key] for key in _PLACE) for node in nodes]
        if made != given or not _is_last(nodes[-1]):
            raise ConfigError(
                f"the nodes of document {document_id!r} are not all of its chunks, or were changed: "
                "give them as NuggetNodeParser made them"
            )
        documents.append(document)
    return documents


def _is_last(node: BaseNode) -> bool:
    """Whether no chunk of the document is known to follow; other parsers' nodes may."""
    after = node.relationships.get(NodeRelationship.NEXT)
    if not isinstance(after, RelatedNodeInfo):
        return True
    return bool(after.metadata.get(_DOCUMENT) != node.metadata[_DOCUMENT])


def _document(document: LlamaDocument) -> Document:
    return Document(
        document_id=document.doc_id,
        text=_text(document),
        metadata=_metadata(document, document.doc_id),
    )


def _metadata(node: BaseNode, document_id: str) -> dict[str, Any]:
    """What the user says of a document, and what is shown of that to models."""
    flat = _adapters.flat_metadata(node.metadata, document_id)
    return {**flat, **_adapters.node_metadata(dict(node))}


def _text(node: BaseNode) -> str:
    return node.get_content(metadata_mode=MetadataMode.NONE)


def _range(nugget: Nugget) -> tuple[int, int]:
    return nugget.char_start, nugget.char_stop
