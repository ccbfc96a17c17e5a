"""Documents into a store: chunk, find nuggets, encode, write, index. Resumable and idempotent.

For every document its texts go into the catalog first, as a version that is begun; then the KV files and
the index follow, and one step of the catalog puts the new version in the place of the old one. What no
version needs any more is removed last. So every file is known of, a hit always has its text, a document is
there in one version or the other and never in parts, and an interrupted run continues where it was: what
is encoded is not encoded again.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Protocol

import numpy as np

from coinrag_integrations.engine import Engine
from coinrag_integrations.engine.fingerprint import canonical_digest
from coinrag_integrations.engine.store import Catalog
from coinrag_integrations.errors import DocumentError, SpanIndexError, StoreError
from coinrag_integrations.files import sweep
from coinrag_integrations.nuggets import NuggetProposer, extract_nuggets
from coinrag_integrations.retrieval import SpanIndex, clean_metadata, pages
from coinrag_integrations.retrieval.embedders import Vectors
from coinrag_integrations.types import Chunk, ChunkId, Document

logger = logging.getLogger(__name__)

_WRITES_AHEAD = 4  # chunks encoded and not yet on disk: bounds memory
_ROW_BYTES = 16 << 10  # what an index row takes on disk at most, journals included
_PAGE = 1000
_INDEX_PAGE = 64  # chunks that are embedded together when an index is made anew
WAIT_SECONDS = 2.0  # for a reader that is just mending a file
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


class Encoding(Protocol):
    """Encodes chunks and stores them in all forms, wherever that is done."""

    groups_at_once: int

    def __call__(self, groups: Sequence[Sequence[Chunk]]) -> Iterator[int]:
        """Have groups of chunks stored, each encoded by itself; how many more are, as it goes on."""
        ...


class Here:
    """Encoding in this process: each chunk is written while the next one is computed."""

    groups_at_once = 1

    def __init__(self, engine: Engine) -> None:
        """Nothing is encoded yet."""
        self.engine = engine

    def __call__(self, groups: Sequence[Sequence[Chunk]]) -> Iterator[int]:
        """See `Encoding`."""
        with ThreadPoolExecutor(2, thread_name_prefix="coinrag-write") as pool:
            waiting: list[Future[None]] = []
            for group in groups:
                for chunk, forms in self.engine.encode(group):
                    if len(waiting) >= _WRITES_AHEAD:
                        waiting.pop(0).result()
                    waiting.append(pool.submit(self.engine.store_chunk, chunk, forms))
                    yield 1
            for future in waiting:
                future.result()


class Ingestor:
    """Writes documents into one engine's store and one index. One at a time per store."""

    def __init__(
        self,
        engine: Engine,
        index: SpanIndex,
        proposer: NuggetProposer,
        encoding: Encoding | None = None,
    ) -> None:
        """Nothing is opened or written yet. Chunks are encoded here, unless `encoding` says where."""
        self.engine, self.index, self.proposer = engine, index, proposer
        self.encoding = encoding or Here(engine)

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

        with self._writing():
            for groups in self._groups(documents, report, tell):
                self._write(groups, report, tell)
        tell()
        return report

    def delete(self, document_ids: Iterable[str]) -> int:
        """Remove documents with their chunks, nuggets and KV; how many there were.

        Raises:
            StoreError, SpanIndexError: the disk or Chroma refuses.
        """
        with self._writing():
            return sum([self._delete(document_id) for document_id in document_ids])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the only writer, and finish what an interrupted one began to remove."""
        with self.engine.disk.writing(wait_seconds=WAIT_SECONDS), self.index.writing():
            sweep(self.engine.disk.root)
            self.mend_index()
            self.settle()
            yield

    def mend_index(self, *, anew: bool = False) -> int:
        """Make good a change of the index that did not end, or make it `anew`: chunks indexed again.

        For the one writing process.

        Raises:
            StoreError, SpanIndexError: the disk or Chroma refuses.
        """
        interruption, catalog = self.index.interruption, self.engine.catalog
        if interruption is None and not anew:
            return 0
        # Should we die as well, Chroma's files may be torn by then.
        self.index.begin_mending()
        if anew or interruption is None or interruption.torn:
            self.index.reset()
            chunks = catalog.chunks()
        else:
            self.index.delete(interruption.chunk_ids)
            chunks = (catalog.chunk(i) for i in sorted(catalog.live(interruption.chunk_ids)))
        n_chunks = 0
        while page := list(islice(chunks, _INDEX_PAGE)):
            self.put_rows(page)
            n_chunks += len(page)
        self.index.end_mending()
        return n_chunks

    def mend(self) -> None:
        """Finish what an interrupted writer left, if there is anything and nobody else is writing."""
        if self.index.interruption is None and self._has_all_rows():
            return
        try:
            with self._writing():
                if not self._has_all_rows():
                    self._put_missing()
        except StoreError as error:  # whoever is writing has made the mark, or finds it
            logger.info("left to another process: %s", error)

    def _has_all_rows(self) -> bool:
        """Whether no rows were lost behind our back: they come before their chunks and go after them."""
        try:
            n_rows, n_chunks = self.index.counts()["chunks"], self.engine.catalog.counts()["chunks"]
        except SpanIndexError as error:  # if Chroma cannot be reached, mending says so
            logger.warning("the index cannot be used: %s", error)
            return False
        if n_rows < n_chunks:
            logger.warning("the index has %d of %d chunks", n_rows, n_chunks)
        return n_rows >= n_chunks

    def _put_missing(self) -> None:
        """Index the chunks that have no row; all of them anew if it cannot be said which."""
        try:
            there, _ = self.index.ids()
        except SpanIndexError:
            self.mend_index(anew=True)
            return
        missing = (it for it in self.engine.catalog.chunks() if it.chunk_id not in there)
        while page := list(islice(missing, _INDEX_PAGE)):
            self.put_rows(page)

    def put_rows(self, chunks: Sequence[Chunk]) -> None:
        """Index chunks of documents that are there, by the vectors that they came with if they did.

        For the one writing process.

        Raises:
            StoreError, SpanIndexError: the disk or Chroma refuses.
        """
        ids = [chunk.chunk_id for chunk in chunks]
        self.index.put(chunks, self.engine.catalog.vectors(ids))

    def _delete(self, document_id: str) -> bool:
        known = self.engine.catalog.delete_document(document_id)
        self.settle()
        return known

    def _groups(
        self, documents: Iterable[Document], report: IngestReport, tell: Callable[[], None]
    ) -> Iterator[list[list[_Item]]]:
        """Changed documents with their chunks: as many groups as are encoded at once.

        Never one document twice among them: a later version is compared with the one before.
        """
        groups: list[list[_Item]] = [[]]
        ids: set[str] = set()
        n_tokens = 0
        for document in documents:
            _check(document)
            if document.document_id in ids:
                yield [group for group in groups if group]
                groups, ids, n_tokens = [[]], set(), 0
            content = self._content(document)
            known = self.engine.catalog.content(document.document_id)
            # A change that was interrupted and then taken back may have replaced rows of the index.
            if known == content and not self.engine.catalog.is_begun(document.document_id):
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
            groups[-1].append(_Item(document=document, content=content, chunks=chunks))
            ids.add(document.document_id)
            n_tokens += sum(map(len, chunks))
            if n_tokens < _GROUP_TOKENS:
                continue
            if len(groups) == self.encoding.groups_at_once:
                yield groups
                groups, ids = [], set()
            groups.append([])
            n_tokens = 0
        yield [group for group in groups if group]

    def _write(
        self, groups: Sequence[Sequence[_Item]], report: IngestReport, tell: Callable[[], None]
    ) -> None:
        """Encode groups of documents at once; then put each of them in its place."""
        catalog, is_stored = self.engine.catalog, self.engine.is_stored
        for item in chain.from_iterable(groups):
            document = item.document
            catalog.begin_document(document.document_id, item.content, item.chunks, document.vector)
        every = [[chunk for item in group for chunk in item.chunks] for group in groups]
        for n in self.encoding([[c for c in chunks if not is_stored(c)] for chunks in every]):
            report.n_encoded += n
            tell()
        for group, chunks in zip(groups, every, strict=True):
            self._finish(group, chunks, report, tell)

    def _finish(
        self,
        group: Sequence[_Item],
        chunks: Sequence[Chunk],
        report: IngestReport,
        tell: Callable[[], None],
    ) -> None:
        """Index what is encoded, and put new versions in the places of the old ones."""
        catalog = self.engine.catalog
        n_rows = len(chunks) + sum(len(chunk.nuggets) for chunk in chunks)
        with self.engine.disk.room(self.engine.scope.tenant, n_rows * _ROW_BYTES):
            self.index.put(chunks, _vectors(group))
        for item in group:
            if item.chunks:
                catalog.finish_document(item.document.document_id, item.content)
            else:
                catalog.delete_document(item.document.document_id)
        self.settle()
        report.n_chunks += len(chunks)
        report.n_nuggets += sum(len(chunk.nuggets) for chunk in chunks)
        report.n_tokens += sum(map(len, chunks))
        report.n_covered_tokens += sum(len(s) for c in chunks for s in self.engine.covered(c))
        tell()

    def settle(self) -> int:
        """Remove chunks that no version of a document needs; how many. For the one writing process."""
        gone = self.engine.catalog.garbage()
        remove_chunks(gone, self.engine.catalog, self.index, self.engine.remove_chunk)
        return len(gone)

    def _content(self, document: Document) -> str:
        """Changes when anything that ends up in the store would."""
        value = {
            "text": hashlib.sha256(document.text.encode()).hexdigest(),
            "metadata": dict(document.metadata),
            "proposer": self.proposer.proposer_id,
            "coverage": self.engine.config.coverage,
            "chunk_tokens": self.engine.config.chunk_tokens,
        }
        if self.engine.config.c2kv:
            value["c2kv"] = sorted(
                it.fingerprint.extractor for it in self.engine.forms.stores.values()
            )
        if document.vector is not None:
            vector = np.asarray(document.vector, dtype=np.float32)
            value["vector"] = hashlib.sha256(vector.tobytes()).hexdigest()
        return canonical_digest(value)


def _vectors(group: Sequence[_Item]) -> dict[ChunkId, Vectors]:
    """The vectors that documents came with, for those of one chunk."""
    return {
        item.chunks[0].chunk_id: np.asarray(item.document.vector, dtype=np.float32)
        for item in group
        if item.document.vector is not None and len(item.chunks) == 1
    }


def remove_chunks(
    chunk_ids: Sequence[ChunkId],
    catalog: Catalog,
    index: SpanIndex | None,
    remove_kv: Callable[[ChunkId], None],
) -> None:
    """Remove chunks that nobody needs from index and files; then forget that they are to be removed."""
    for page in pages(chunk_ids, _PAGE):
        if index is not None:
            index.delete(page)
        for chunk_id in page:
            remove_kv(chunk_id)
        catalog.purge(page)


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
