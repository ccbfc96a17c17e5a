"""A scope's texts and the KV of one fingerprint, opened together; creates what is not there."""

from __future__ import annotations

from typing import Any

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store.catalog import Catalog
from coinrag_integrations.engine.store.directory import KVStore
from coinrag_integrations.engine.store.disk import KV, Disk, scope_folder
from coinrag_integrations.engine.store.variants import choose_variant
from coinrag_integrations.errors import StoreError
from coinrag_integrations.types import Scope


def open_scope(
    disk: Disk,
    scope: Scope,
    layout: KVLayout,
    fingerprint: Fingerprint,
    *,
    add_fingerprint: bool = False,
    **options: Any,
) -> tuple[Catalog, KVStore]:
    """Open both, `options` being those of `KVStore`; with `add_fingerprint` also beside others.

    Raises:
        FingerprintMismatchError: there is KV of other fingerprints only, or texts of another tokenizer.
        StoreError: the folder cannot be used.
    """
    folder = scope_folder(disk.root, scope)
    root = choose_variant(folder / KV, fingerprint, add=add_fingerprint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot open the store {disk.root}: {error}") from error
    notes = {
        "tenant": scope.tenant,
        "collection": scope.collection,
        "tokenizer": fingerprint.tokenizer,
    }
    catalog = Catalog(folder / "catalog.sqlite", expected=notes)
    try:
        return catalog, KVStore(root, layout, fingerprint, scope=scope, disk=disk, **options)
    except StoreError:
        catalog.close()
        raise
