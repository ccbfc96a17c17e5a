"""What nobody needs any more, and what is above the caps."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from coinrag_integrations.engine.store import Disk, KVStore, Limits, Remote
from coinrag_integrations.engine.store.disk import KV
from coinrag_integrations.engine.store.variants import (
    delete_everywhere,
    drop_variant,
    sweep_variants,
    variants,
)
from coinrag_integrations.errors import StoreError
from coinrag_integrations.files import sweep
from coinrag_integrations.ingest import WAIT_SECONDS, remove_chunks
from coinrag_integrations.maintenance.opened import (
    OpenScope,
    open_store,
    rows_of,
    writing,
)
from coinrag_integrations.settings import StoreSettings
from coinrag_integrations.types import ChunkId, Scope


def collect_garbage(folder: Path, *, drop: Sequence[str] = ()) -> int:
    """Remove what no document needs, in every scope; then compact, and evict what is above the caps.

    Documents whose ingestion was interrupted are given up. `drop` names fingerprints whose KV is to go
    as well. Returns the bytes that became free.

    Raises:
        StoreError, SpanIndexError: another process is writing, or the disk or Chroma refuses.
    """
    with open_store(folder) as it, it.disk.writing(wait_seconds=WAIT_SECONDS):
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
            with writing(scope):
                _collect(scope, it.remote)
        it.disk.enforce()
        return before - it.disk.usage()[""]


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
    with open_store(folder) as it, it.disk.writing(wait_seconds=WAIT_SECONDS):
        for scope in it.scopes():
            if scope.scope == wanted:
                with writing(scope):
                    n_deleted = sum([scope.catalog.delete_document(i) for i in document_ids])
                    remove(scope, it.remote, scope.catalog.garbage())
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


def _collect(scope: OpenScope, remote: Remote | None) -> None:
    """Remove, in one scope, what belongs to no document."""
    catalog, kv = scope.catalog, scope.folder / KV
    catalog.forget_begun()
    sweep_variants(kv)
    for store in scope.stores.values():
        remove_strays(store)
    rows, nugget_rows = rows_of(scope)
    files = {chunk_id for store in scope.stores.values() for chunk_id in store}
    there = files | rows | nugget_rows | set(catalog.garbage())
    remove(scope, remote, sorted(there - catalog.live(there)))
    catalog.compact()


def remove_strays(store: KVStore) -> None:
    """Remove files that are no chunk's."""
    for path in store.strays():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(scope: OpenScope, remote: Remote | None, gone: Sequence[ChunkId]) -> None:
    """Remove chunks from index and files, then from the list of what is to be removed."""
    kv = scope.folder / KV
    remove_chunks(
        gone,
        scope.catalog,
        scope.index,
        lambda chunk_id: delete_everywhere(kv, chunk_id, remote, scope.scope),
    )
