"""The KV of a store in another codec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.engine.store.codec import CodecName
from coinrag_integrations.engine.store.variants import drop_variant
from coinrag_integrations.errors import ConfigError, StoreError
from coinrag_integrations.ingest import WAIT_SECONDS
from coinrag_integrations.maintenance.opened import OnProgress, open_store
from coinrag_integrations.settings import StoreSettings
from coinrag_integrations.types import ChunkId, SpanRef


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
    with open_store(folder) as it, it.disk.writing(wait_seconds=WAIT_SECONDS):
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


def _convert(source: KVStore, target: KVStore, chunk_id: ChunkId) -> None:
    try:
        header = source.header(chunk_id)
        if chunk_id in target and target.header(chunk_id).ranges == header.ranges:
            return
    except StoreError:
        return  # of no use as it is: encoded again when it is asked for
    ratio = source.codec.ratio
    stage = source.stage([SpanRef(chunk_id, it.start, it.stop, ratio) for it in header.ranges])
    if source.read(stage).errors:
        return
    entries = stage.entries(slice(None))
    assert isinstance(entries, torch.Tensor)
    target.put_packed(chunk_id, target.pack_entries(entries, header.ranges, header.n_tokens))
