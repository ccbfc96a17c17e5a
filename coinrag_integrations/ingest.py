"""Documents into a store: chunk, find nuggets, encode, write, index. Resumable and idempotent.

For every document the catalog is written first, then the KV files, then the index, and the note that
it is complete last. So every file is known of, a hit always has a file, and an interrupted run
continues where it was: what is encoded is not encoded again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from coinrag_integrations.engine import Engine
from coinrag_integrations.engine.fingerprint import canonical_digest
from coinrag_integrations.errors import DocumentError, SpanIndexError
from coinrag_integrations.nuggets import NuggetProposer, extract_nuggets
from coinrag_integrations.retrieval import SpanIndex, clean_metadata
from coinrag_integrations.types import Chunk, Document

_WRITES_AHEAD = 4  # chunks encoded and not yet on disk: bounds memory
_GROUP_TOKENS = 16_384  # tokens of the documents that are written and indexed together


@dataclass(slots=True)
class IngestReport:
    """What an ingestion did so far. `n_encoded` counts chunks that ran through the model."""

    n_added: int = 0
    n_updated: int = 0
    n_unchanged: int = 0
    n_chunks: int = 0
    n_encoded: int = 0
    n_nuggets: int = 0
    n_tokens: int = 0
    n_covered_tokens: int = 0
    seconds: float = 0.0
    empty: list[str] = field(default_factory=list)

    @property
    def n_documents(self) -> int:
        """Documents looked at."""
        return self.n_added + self.n_updated + self.n_unchanged + len(self.empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    document: Document
    content: str
    chunks: tuple[Chunk, ...]


OnProgress = Callable[[IngestReport], None]


class Ingestor:
    """Writes documents into one engine's store and one index. One at a time per store."""

    def __init__(self, engine: Engine, index: SpanIndex, proposer: NuggetProposer) -> None:
        """Nothing is opened or written yet."""
        self.engine, self.index, self.proposer = engine, index, proposer

    def add(
        self, documents: Iterable[Document], on_progress: OnProgress | None = None
    ) -> IngestReport:
        """Add documents, or replace those whose text or metadata changed; the rest is skipped.

        `on_progress` is called after every chunk and document with the report so far.

        Raises:
            DocumentError: a text that cannot be stored.
            StoreError, SpanIndexError: another process is writing, or the disk or Chroma refuses;
                finished documents stay.
        """
        report, started = IngestReport(), time.perf_counter()

        def tell() -> None:
            report.seconds = time.perf_counter() - started
            if on_progress is not None:
                on_progress(report)

        with self.engine.store.writing():
            self.engine.store.sweep()
            for group in self._groups(documents, report, tell):
                self._write(group, report, tell)
        tell()
        return report

    def delete(self, document_ids: Iterable[str]) -> int:
        """Remove documents with their chunks, nuggets and KV; how many there were.

        Raises:
            StoreError, SpanIndexError: the disk or Chroma refuses.
        """
        n_deleted = 0
        with self.engine.store.writing():
            for document_id in document_ids:
                known = self.engine.catalog.content(document_id) is not None
                self.engine.catalog.forget_document(document_id)
                n_deleted += self._drop(document_id, keep=()) or known
        return n_deleted

    def _groups(
        self, documents: Iterable[Document], report: IngestReport, tell: Callable[[], None]
    ) -> Iterator[list[_Item]]:
        """Changed documents with their chunks, a few at a time; never one document twice a group."""
        group: list[_Item] = []
        ids: set[str] = set()
        n_tokens = 0
        for document in documents:
            _check(document)
            if document.document_id in ids:
                yield group
                group, ids, n_tokens = [], set(), 0
            content = self._content(document)
            known = self.engine.catalog.content(document.document_id)
            if known == content:
                report.n_unchanged += 1
                tell()
                continue
            chunks = tuple(extract_nuggets(c, self.proposer) for c in self.engine.chunk(document))
            if not chunks:
                report.empty.append(document.document_id)
            elif known is None:
                report.n_added += 1
            else:
                report.n_updated += 1
            group.append(_Item(document=document, content=content, chunks=chunks))
            ids.add(document.document_id)
            n_tokens += sum(map(len, chunks))
            if n_tokens >= _GROUP_TOKENS:
                yield group
                group, ids, n_tokens = [], set(), 0
        if group:
            yield group

    def _write(
        self, group: Sequence[_Item], report: IngestReport, tell: Callable[[], None]
    ) -> None:
        chunks = [chunk for item in group for chunk in item.chunks]
        for item in group:
            self.engine.catalog.forget_document(item.document.document_id)
        self.engine.catalog.put_chunks(chunks)
        self._encode([c for c in chunks if not self.engine.is_stored(c)], report, tell)
        self.index.put(chunks)
        for item in group:
            self._drop(item.document.document_id, keep=[c.chunk_id for c in item.chunks])
            if item.chunks:
                self.engine.catalog.finish_document(
                    item.document.document_id, item.content, len(item.chunks)
                )
        report.n_chunks += len(chunks)
        report.n_nuggets += sum(len(chunk.nuggets) for chunk in chunks)
        report.n_tokens += sum(map(len, chunks))
        report.n_covered_tokens += sum(len(s) for c in chunks for s in self.engine.covered(c))
        tell()

    def _encode(
        self, chunks: Sequence[Chunk], report: IngestReport, tell: Callable[[], None]
    ) -> None:
        """Encode, and write each chunk while the next one is computed."""
        with ThreadPoolExecutor(2, thread_name_prefix="coinrag-write") as pool:
            waiting: list[Future[None]] = []
            for chunk, kv in self.engine.encode(chunks):
                if len(waiting) >= _WRITES_AHEAD:
                    waiting.pop(0).result()
                waiting.append(pool.submit(self.engine.store_chunk, chunk, kv))
                report.n_encoded += 1
                tell()
            for future in waiting:
                future.result()

    def _drop(self, document_id: str, keep: Sequence[str]) -> bool:
        """Remove a document's chunks but those to keep. The catalog last: it is the list of what to do."""
        catalog = self.engine.catalog
        gone = [i for i in catalog.chunk_ids(document_id) if i not in set(keep)]
        if gone:
            self.index.delete(gone)
            for chunk_id in gone:
                self.engine.store.delete(chunk_id)
            catalog.delete_chunks(gone)
        return bool(gone)

    def _content(self, document: Document) -> str:
        """Changes when anything that ends up in the store would."""
        return canonical_digest(
            {
                "text": hashlib.sha256(document.text.encode()).hexdigest(),
                "metadata": dict(document.metadata),
                "proposer": self.proposer.proposer_id,
                "coverage": self.engine.config.coverage,
                "chunk_tokens": self.engine.config.chunk_tokens,
            }
        )


def _check(document: Document) -> None:
    if not document.document_id:
        raise DocumentError("a document has an empty id: give every document its own id")
    try:
        clean_metadata(document.metadata)
    except SpanIndexError as error:
        raise DocumentError(f"document {document.document_id!r}: {error}") from error
    words = (f"{key}{value}" for key, value in document.metadata.items())
    for text in (document.document_id, document.text, *words):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DocumentError(
                f"document {document.document_id!r} has an unpaired surrogate at character "
                f"{error.start}, which is no text: repair it before adding it"
            ) from error
