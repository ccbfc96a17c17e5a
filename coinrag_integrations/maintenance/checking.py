"""What is wrong with a store, and putting it right."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from coinrag_integrations.engine import Engine
from coinrag_integrations.engine.chunking import has_its_tokens
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.errors import ChunkNotFoundError, SpanIndexError, StoreError
from coinrag_integrations.files import sweep
from coinrag_integrations.ingest import WAIT_SECONDS
from coinrag_integrations.maintenance.opened import (
    OnProgress,
    OpenScope,
    open_store,
    rows_of,
)
from coinrag_integrations.maintenance.removing import remove_strays
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Chunk, ChunkId, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantReport:
    """The KV files of one fingerprint in one scope: entries (`ratio` 1), or slots of `ratio` tokens.

    `corrupt` and `missing` are chunks of documents that are there; `missing` KV is encoded again when it
    is asked for. Slots at a ratio that the store does not make any more are never missing. `orphans` are
    files of no chunk that is there: ids, or names that are no chunk's.
    """

    name: str
    ratio: int
    n_files: int
    n_bytes: int
    corrupt: tuple[ChunkId, ...]
    missing: tuple[ChunkId, ...]
    orphans: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeReport:
    """What was found in one scope.

    `begun` counts documents whose ingestion was interrupted, `garbage` chunks whose removal was.
    `unindexed` chunks have no row in the index, `unknown` rows no chunk. `unmade` are ratios whose slots
    the store should have, and has none of. `damage` is what is wrong with
    the catalog itself.
    """

    scope: Scope
    n_documents: int
    n_chunks: int
    begun: int
    garbage: int
    damage: tuple[str, ...]
    unindexed: tuple[ChunkId, ...]
    unknown: tuple[ChunkId, ...]
    unmade: tuple[int, ...]
    variants: tuple[VariantReport, ...]

    def problems(self, *, bounded: bool) -> list[str]:
        """What is not as it should be, in words. In a `bounded` store KV may be missing: evicted."""
        found = [f"the catalog is damaged: {line}" for line in self.damage]
        counts = {
            "documents were never finished": self.begun,
            "removed chunks are still on disk": self.garbage,
            "chunks are not in the index": len(self.unindexed),
            "rows of the index belong to no chunk": len(self.unknown),
        }
        for variant in self.variants:
            counts[f"KV files of {variant.name} are corrupt"] = len(variant.corrupt)
            counts[f"KV files of {variant.name} belong to no chunk"] = len(variant.orphans)
            if not bounded:
                counts[f"KV files of {variant.name} are missing"] = len(variant.missing)
        for ratio in self.unmade:
            counts[f"chunks have no slots of {ratio} tokens"] = self.n_chunks
        return found + [f"{count} {what}" for what, count in counts.items() if count]


def verify(
    folder: Path, *, full: bool = True, on_progress: OnProgress | None = None
) -> list[ScopeReport]:
    """Compare files, catalogs and index of every scope; `full` reads and checks every byte of KV.

    Changes nothing.

    Raises:
        StoreError, SpanIndexError: there is no store, or it cannot be read at all.
    """
    with open_store(folder) as it:
        ratios = {1, *it.settings.engine.c2kv}
        return [_verify(scope, ratios, full, on_progress) for scope in it.scopes()]


def repair(rag: CoinRAG, on_progress: OnProgress | None = None) -> int:
    """Put the scope of `rag` in order: encode and index again what is lost, remove what is too much.

    Returns how many chunks were encoded or indexed again.

    Raises:
        StoreError, SpanIndexError: another process is writing, or the disk or Chroma refuses.
    """
    engine, index = rag.engine, rag.index
    with engine.disk.writing(wait_seconds=WAIT_SECONDS), index.writing():
        sweep(engine.disk.root)
        rag.ingestor.settle()
        chunks = list(engine.catalog.chunks())
        lost: list[Chunk] = []
        for done, chunk in enumerate(chunks):
            if has_its_tokens(chunk, engine.scope) and not _is_whole(engine, chunk):
                lost.append(chunk)
            if on_progress:
                on_progress(done + 1, len(chunks))
        for chunk, forms in engine.encode(lost):
            engine.store_chunk(chunk, forms, anew=True)
        live = {chunk.chunk_id for chunk in chunks}
        try:
            index.probe()
            rows, nugget_rows = index.ids()
        except SpanIndexError:
            rag.ingestor.mend_index(anew=True)
            rows, nugget_rows = index.ids()
        unindexed = [
            chunk
            for chunk in chunks
            if chunk.chunk_id not in rows or (chunk.nuggets and chunk.chunk_id not in nugget_rows)
        ]
        rag.ingestor.put_rows(unindexed)
        index.delete(sorted((rows | nugget_rows) - live))
        for store in engine.forms.stores.values():
            for chunk_id in set(store) - live:
                engine.remove_chunk(chunk_id)
            remove_strays(store)
        return len({chunk.chunk_id for chunk in (*lost, *unindexed)})


def _is_whole(engine: Engine, chunk: Chunk) -> bool:
    """Whether all KV of a chunk is there in all forms, or was evicted and need not be."""
    for ratio, store in engine.forms.stores.items():
        try:
            store.verify(chunk.chunk_id)
        except ChunkNotFoundError:
            if engine.disk.limits:
                continue
        except StoreError:
            return False
        if not engine.forms.is_stored(chunk, ratio):
            return False
    return True


def _verify(
    scope: OpenScope, ratios: Collection[int], full: bool, on_progress: OnProgress | None
) -> ScopeReport:
    catalog = scope.catalog
    chunks: dict[ChunkId, bool] = {}
    damaged = 0
    for chunk in catalog.chunks():
        chunks[chunk.chunk_id] = bool(chunk.nuggets)
        damaged += not has_its_tokens(chunk, scope.scope)
    tokens = [f"the tokens of {damaged} chunks: add their documents again"] if damaged else []
    rows, nugget_rows = rows_of(scope)
    counts = catalog.counts()
    return ScopeReport(
        scope=scope.scope,
        n_documents=counts["documents"],
        n_chunks=counts["chunks"],
        begun=catalog.n_begun(),
        garbage=len(catalog.garbage()),
        damage=(*catalog.check_integrity(), *tokens),
        unindexed=tuple(
            i
            for i, nuggets in chunks.items()
            if i not in rows or (nuggets and i not in nugget_rows)
        ),
        unknown=tuple(sorted((rows | nugget_rows) - chunks.keys())),
        unmade=tuple(sorted({*ratios} - {1} - {it.codec.ratio for it in scope.stores.values()})),
        variants=tuple(
            _verify_variant(
                name,
                store,
                list(chunks),
                full,
                store.codec.ratio in ratios,
                on_progress,
            )
            for name, store in scope.stores.items()
        ),
    )


def _verify_variant(
    name: str,
    store: KVStore,
    chunks: Sequence[ChunkId],
    full: bool,
    is_made: bool,
    on_progress: OnProgress | None,
) -> VariantReport:
    files = set(store)
    corrupt = []
    for done, chunk_id in enumerate(sorted(files & set(chunks))):
        try:
            store.verify(chunk_id) if full else store.header(chunk_id)
        except ChunkNotFoundError:
            continue  # evicted meanwhile
        except StoreError:
            corrupt.append(chunk_id)
        if on_progress:
            on_progress(done + 1, len(files))
    wanted = chunks if is_made else ()
    missing = [i for i in wanted if i not in files and store.tier(i) == "disk"]
    return VariantReport(
        name=name,
        ratio=store.codec.ratio,
        n_files=len(files),
        n_bytes=store.n_bytes(),
        corrupt=tuple(corrupt),
        missing=tuple(missing),
        orphans=tuple(sorted(files - set(chunks))) + tuple(p.name for p in store.strays()),
    )
