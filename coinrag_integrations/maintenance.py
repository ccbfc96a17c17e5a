"""Looking after a store: check it, remove what nobody needs, change its codec. Loads no model.

`repair` alone needs an open `CoinRAG`: what is lost is encoded and indexed again from the stored texts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store import (
    Catalog,
    Disk,
    KVStore,
    Limits,
    Remote,
    scope_folder,
    scopes,
)
from coinrag_integrations.engine.store.codec import CodecName
from coinrag_integrations.engine.store.disk import KV
from coinrag_integrations.engine.store.variants import (
    delete_everywhere,
    drop_variant,
    sweep_variants,
    variants,
)
from coinrag_integrations.errors import ChunkNotFoundError, ConfigError, SpanIndexError, StoreError
from coinrag_integrations.files import sweep
from coinrag_integrations.ingest import WAIT_SECONDS
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import ChromaFolder, SpanIndex, open_client, pages
from coinrag_integrations.retrieval.index import open_for_upkeep
from coinrag_integrations.settings import INDEX_MARK, StoreSettings, open_remote
from coinrag_integrations.types import ChunkId, Scope, SpanRef

OnProgress = Callable[[int, int], None]  # (done, total)
_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantReport:
    """The KV files of one fingerprint in one scope.

    `corrupt` and `missing` are chunks of documents that are there; `missing` KV is encoded again when it
    is asked for. `orphans` are files of no chunk that is there: ids, or names that are no chunk's.
    """

    name: str
    n_files: int
    n_bytes: int
    corrupt: tuple[ChunkId, ...]
    missing: tuple[ChunkId, ...]
    orphans: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeReport:
    """What was found in one scope.

    `begun` counts documents whose ingestion was interrupted, `garbage` chunks whose removal was.
    `unindexed` chunks have no row in the index, `unknown` rows no chunk. `damage` is what SQLite says of
    the catalog.
    """

    scope: Scope
    n_documents: int
    n_chunks: int
    begun: int
    garbage: int
    damage: tuple[str, ...]
    unindexed: tuple[ChunkId, ...]
    unknown: tuple[ChunkId, ...]
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
        return found + [f"{count} {what}" for what, count in counts.items() if count]


def verify(
    folder: Path, *, full: bool = True, on_progress: OnProgress | None = None
) -> list[ScopeReport]:
    """Compare files, catalogs and index of every scope; `full` reads and checks every byte of KV.

    Changes nothing.

    Raises:
        StoreError, SpanIndexError: there is no store, or it cannot be read at all.
    """
    with _opened(folder) as it:
        return [_verify(scope, full, on_progress) for scope in it.scopes()]


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
        lost = []
        for done, chunk in enumerate(chunks):
            try:
                engine.store.verify(chunk.chunk_id)
                is_whole = engine.is_stored(chunk)
            except StoreError:
                engine.store.delete(chunk.chunk_id)
                is_whole = False
            lost += [] if is_whole else [chunk]
            if on_progress:
                on_progress(done + 1, len(chunks))
        for chunk, kv in engine.encode(lost):
            engine.store_chunk(chunk, kv)
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
        index.put(unindexed)
        index.delete(sorted((rows | nugget_rows) - live))
        for chunk_id in set(engine.store) - live:
            engine.remove_chunk(chunk_id)
        _remove_strays(engine.store)
        return len({chunk.chunk_id for chunk in (*lost, *unindexed)})


def collect_garbage(folder: Path, *, drop: Sequence[str] = ()) -> int:
    """Remove what no document needs, in every scope; then compact, and evict what is above the caps.

    Documents whose ingestion was interrupted are given up. `drop` names fingerprints whose KV is to go
    as well. Returns the bytes that became free.

    Raises:
        StoreError, SpanIndexError: another process is writing, or the disk or Chroma refuses.
    """
    with _opened(folder) as it, it.disk.writing(wait_seconds=WAIT_SECONDS):
        before = it.disk.usage()[""]
        sweep(folder)
        found = list(it.scopes())
        for scope in found:
            known = variants(scope.folder / KV)
            for name in drop:
                if name in known:
                    drop_variant(scope.folder / KV, name, it.remote, scope.scope)
        if unknown := [n for n in drop if not any(n in scope.stores for scope in found)]:
            names = sorted({name for scope in found for name in scope.stores})
            raise StoreError(
                f"no fingerprint {unknown[0]!r} in {folder}: there is {', '.join(names)}"
            )
        for scope in found:
            with _writing(scope):
                _collect(scope, it.remote)
        it.disk.enforce()
        return before - it.disk.usage()[""]


def convert(
    folder: Path, codec: CodecName, *, keep: bool = False, on_progress: OnProgress | None = None
) -> dict[str, int]:
    """Store the KV of every scope in another codec, and open the store with it from now on.

    Chunk by chunk, and again from where it was if it was interrupted. KV that was evicted is left to
    be encoded when it is asked for. `keep` leaves the KV as it was beside it. Returns the bytes of KV
    before and after.

    Raises:
        ConfigError: the store's KV is not stored as it was computed; codes cannot be converted.
        StoreError: another process is writing, or the disk refuses.
    """
    settings = StoreSettings.load(folder)
    if codec == "none" or settings.engine.codec not in ("none", codec):
        raise ConfigError(
            f"the store {folder} has codec {settings.engine.codec!r}, which cannot become {codec!r}: "
            "only KV stored with codec 'none' can be converted. Build it anew for another"
        )
    quantise = choose_kernels("auto", torch.device("cpu")).quantise
    n_bytes = {"before": 0, "after": 0}
    with _opened(folder) as it, it.disk.writing(wait_seconds=WAIT_SECONDS):
        plain = {
            (scope.scope, name): store
            for scope in it.scopes()
            for name, store in scope.stores.items()
            if store.fingerprint.codec == "none"
        }
        total, done = sum(len(list(store)) for store in plain.values()), 0
        for (scope, _), source in plain.items():
            fingerprint = replace(source.fingerprint, codec=codec)
            root = source.root.parent / fingerprint.digest[:16]
            with KVStore(
                root,
                source.layout,
                fingerprint,
                scope=scope,
                disk=it.disk,
                quantise=quantise,
                remote=it.remote,
            ) as target:
                n_bytes["before"] += source.n_bytes()
                for chunk_id in source:
                    _convert(source, target, chunk_id)
                    done += 1
                    if on_progress:
                        on_progress(done, total)
                n_bytes["after"] += target.n_bytes()
        replace(settings, engine=replace(settings.engine, codec=codec)).save(folder)
        if not keep:
            for (scope, name), source in plain.items():
                drop_variant(source.root.parent, name, it.remote, scope)
    return n_bytes


def delete_documents(
    folder: Path,
    document_ids: Sequence[str],
    *,
    tenant: str = "default",
    collection: str = "main",
) -> int:
    """Remove documents with everything made of them, without loading a model; how many there were.

    Raises:
        StoreError, SpanIndexError: another process is writing, or the disk or Chroma refuses.
    """
    wanted = Scope(tenant=tenant, collection=collection)
    with _opened(folder) as it, it.disk.writing(wait_seconds=WAIT_SECONDS):
        for scope in it.scopes():
            if scope.scope == wanted:
                with _writing(scope):
                    n_deleted = sum([scope.catalog.delete_document(i) for i in document_ids])
                    _remove(scope, it.remote, scope.catalog.garbage())
                    return n_deleted
    return 0


def set_limits(
    folder: Path,
    *,
    max_bytes: int | Literal["same"] | None = "same",
    tenant_bytes: Mapping[str, int | None] | None = None,
) -> tuple[Limits, int]:
    """Change a store's caps (None lifts one) and evict what is above them: the caps, and bytes freed.

    Raises:
        ConfigError: a cap below 1.
        StoreError: another process is writing, or the disk refuses.
    """
    settings = StoreSettings.load(folder)
    quotas = {**settings.limits.tenant_bytes, **(tenant_bytes or {})}
    limits = Limits(
        max_bytes=settings.limits.max_bytes if max_bytes == "same" else max_bytes,
        tenant_bytes={name: cap for name, cap in quotas.items() if cap is not None},
    )
    disk = Disk(folder, limits)
    with disk.writing(wait_seconds=WAIT_SECONDS):
        replace(settings, limits=limits).save(folder)
        return limits, disk.enforce()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """A scope's parts, opened for as long as the store is."""

    scope: Scope
    folder: Path
    catalog: Catalog
    index: SpanIndex | None
    stores: Mapping[str, KVStore]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    folder: Path
    settings: StoreSettings
    disk: Disk
    remote: Remote | None
    chroma: ChromaFolder | None
    closing: ExitStack

    def scopes(self) -> Iterator[_Scope]:
        """Every scope in the store."""
        client = self.chroma or open_client(self.settings.chroma)
        for scope in scopes(self.folder):
            folder = scope_folder(self.folder, scope)
            yield _Scope(
                scope=scope,
                folder=folder,
                catalog=self.closing.enter_context(Catalog(folder / "catalog.sqlite")),
                index=open_for_upkeep(
                    client, f"{self.settings.prefix}.{scope}", folder / INDEX_MARK
                ),
                stores={
                    name: self._store(folder, name, fingerprint, scope)
                    for name, fingerprint in variants(folder / KV).items()
                },
            )

    def _store(self, folder: Path, name: str, fingerprint: Fingerprint, scope: Scope) -> KVStore:
        try:
            layout = KVLayout.parse(fingerprint.layout, fingerprint.dtype)
        except ValueError as error:
            raise StoreError(f"{folder / KV / name} has no usable fingerprint: {error}") from error
        store = KVStore(
            folder / KV / name,
            layout,
            fingerprint,
            scope=scope,
            disk=self.disk,
            remote=self.remote,
        )
        return self.closing.enter_context(store)


@contextmanager
def _opened(folder: Path) -> Iterator[_Opened]:
    settings = StoreSettings.load(folder)
    with ExitStack() as closing:
        chroma = None if settings.chroma else ChromaFolder.open(folder / "chroma")
        if chroma is not None:
            closing.callback(chroma.close)
        yield _Opened(
            folder=folder,
            settings=settings,
            disk=Disk(folder, settings.limits),
            remote=open_remote(settings.remote),
            chroma=chroma,
            closing=closing,
        )


def _writing(scope: _Scope) -> AbstractContextManager[None]:
    if scope.index is not None and scope.index.interruption is not None:
        raise SpanIndexError(
            f"a process died while it changed the index of {scope.scope}: open the store, or run "
            "`coinrag verify --repair`, which makes it good"
        )
    return scope.index.writing() if scope.index is not None else nullcontext()


def _rows(scope: _Scope) -> tuple[set[ChunkId], set[ChunkId]]:
    """The chunks that the index has rows of; an interrupted index is not looked into."""
    if scope.index is None or scope.index.interruption is not None:
        return set(), set()
    return scope.index.ids()


def _verify(scope: _Scope, full: bool, on_progress: OnProgress | None) -> ScopeReport:
    catalog = scope.catalog
    chunks = {chunk.chunk_id: bool(chunk.nuggets) for chunk in catalog.chunks()}
    rows, nugget_rows = _rows(scope)
    counts = catalog.counts()
    return ScopeReport(
        scope=scope.scope,
        n_documents=counts["documents"],
        n_chunks=counts["chunks"],
        begun=catalog.n_begun(),
        garbage=len(catalog.garbage()),
        damage=tuple(catalog.check_integrity()),
        unindexed=tuple(
            i
            for i, nuggets in chunks.items()
            if i not in rows or (nuggets and i not in nugget_rows)
        ),
        unknown=tuple(sorted((rows | nugget_rows) - chunks.keys())),
        variants=tuple(
            _verify_variant(name, store, list(chunks), full, on_progress)
            for name, store in scope.stores.items()
        ),
    )


def _verify_variant(
    name: str,
    store: KVStore,
    chunks: Sequence[ChunkId],
    full: bool,
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
    missing = [i for i in chunks if i not in files and store.tier(i) == "disk"]
    return VariantReport(
        name=name,
        n_files=len(files),
        n_bytes=store.n_bytes(),
        corrupt=tuple(corrupt),
        missing=tuple(missing),
        orphans=tuple(sorted(files - set(chunks))) + tuple(p.name for p in store.strays()),
    )


def _collect(scope: _Scope, remote: Remote | None) -> None:
    """Remove, in one scope, what belongs to no document."""
    catalog, kv = scope.catalog, scope.folder / KV
    catalog.forget_begun()
    sweep_variants(kv)
    for store in scope.stores.values():
        _remove_strays(store)
    rows, nugget_rows = _rows(scope)
    files = {chunk_id for store in scope.stores.values() for chunk_id in store}
    there = files | rows | nugget_rows | set(catalog.garbage())
    _remove(scope, remote, sorted(there - catalog.live(there)))
    catalog.compact()


def _remove_strays(store: KVStore) -> None:
    for path in store.strays():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove(scope: _Scope, remote: Remote | None, gone: Sequence[ChunkId]) -> None:
    """Remove chunks from index and files, then from the list of what is to be removed."""
    for page in pages(gone, _PAGE):
        if scope.index is not None:
            scope.index.delete(page)
        for chunk_id in page:
            delete_everywhere(scope.folder / KV, chunk_id, remote, scope.scope)
        scope.catalog.purge(page)


def _convert(source: KVStore, target: KVStore, chunk_id: ChunkId) -> None:
    try:
        header = source.header(chunk_id)
        if chunk_id in target and target.header(chunk_id).ranges == header.ranges:
            return
    except StoreError:
        return  # of no use as it is: encoded again when it is asked for
    stage = source.stage([SpanRef(chunk_id, span.start, span.stop) for span in header.ranges])
    if source.read(stage).errors:
        return
    entries = stage.entries(slice(None))
    assert isinstance(entries, torch.Tensor)
    target.put_packed(chunk_id, target.pack_entries(entries, header.ranges, header.n_tokens))
