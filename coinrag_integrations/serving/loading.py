"""Injections to the rows of a paged cache: the engine's own reading and placing. Loads no model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

from coinrag_integrations.engine.composer import Composer
from coinrag_integrations.engine.cost import CostModel
from coinrag_integrations.engine.handles import Handles, owner_of
from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.plan import PrefixPlan, Text, plan_prefix
from coinrag_integrations.engine.prompt_cache import PromptCache
from coinrag_integrations.engine.source import Source
from coinrag_integrations.engine.store import Catalog, Disk, KVStore, scope_folder
from coinrag_integrations.engine.store.disk import KV
from coinrag_integrations.engine.store.variants import choose_variant
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.upload import Uploader
from coinrag_integrations.serving.checking import Injection, Texts
from coinrag_integrations.serving.config import ServingConfig
from coinrag_integrations.serving.prepared import Prepared
from coinrag_integrations.settings import SETTINGS_FILE, StoreSettings, open_remote
from coinrag_integrations.types import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows `[start, start + n)` of a prefix, placed: kv [L, 2, H, n, D], and what they cost."""

    kv: torch.Tensor
    start: int
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Reads and places prefixes of one scope. Safe to use from many threads."""

    prepared: Prepared
    composer: Composer

    @classmethod
    def open(cls, config: ServingConfig, scope: Scope, device: torch.device) -> Self:
        """Open the KV of a scope.

        Raises:
            StoreError: nothing was prepared for it, or its KV cannot be opened.
            ConfigError: kernels that cannot run on `device`.
        """
        prepared = Prepared.open(config.store, scope, config.fingerprint)
        kernels = choose_kernels(config.kernels, device)
        folder = scope_folder(config.store, scope)
        settings = config.store / SETTINGS_FILE
        remote = StoreSettings.load(config.store).remote if settings.is_file() else None
        entries = KVStore(
            choose_variant(folder / KV, prepared.fingerprint),
            prepared.layout,
            prepared.fingerprint,
            scope=scope,
            disk=Disk(config.store),
            quantise=kernels.quantise,
            memory_bytes=config.memory_bytes,
            remote=open_remote(remote),
        )
        slots = {it: entries.beside(form) for it, form in prepared.forms.items() if it != 1}
        stores = {1: entries, **slots}
        composer = Composer(
            layout=prepared.layout,
            rope=prepared.rope,
            kernels=kernels,
            device=device,
            sources={it: Source(store=kv, cost=CostModel()) for it, kv in stores.items()},
            prompts=PromptCache(encode=prepared.head),
            uploader=Uploader.of(device),
        )
        return cls(prepared=prepared, composer=composer)

    @property
    def layout(self) -> KVLayout:
        """Layers, heads, head dimension and dtype of the rows."""
        return self.prepared.layout

    def load(self, injection: Injection, start: int = 0) -> Rows:
        """The rows of a prefix from `start` on. Nothing is read of segments that end before it.

        Raises:
            StoreError: a span or the head is missing, or cannot be trusted.
            SpanError: a span ends after its chunk's last token, or cuts a slot.
        """
        begin = time.perf_counter()
        plan = _behind(plan_prefix([Text(injection.head), *injection.refs]), start)
        composed = self.composer.compose([plan], Stopwatch(self.composer.device))
        return Rows(
            kv=composed.prefix.kv[:, :, 0, :, start : plan.n_entries],
            start=start,
            bytes_read=composed.loaded[0].bytes_read,
            seconds=time.perf_counter() - begin,
        )

    def close(self) -> None:
        """Close the files."""
        for source in self.composer.sources.values():
            source.store.close()
        self.prepared.heads.close()


def open_texts(config: ServingConfig, scope: Scope) -> tuple[Texts, Callable[[], None]]:
    """The texts of a scope for `checking.check`, and how to close them.

    Raises:
        StoreError: nothing was prepared for it, or its catalog cannot be read.
    """
    prepared = Prepared.open(config.store, scope, config.fingerprint)
    notes = {
        "tenant": scope.tenant,
        "collection": scope.collection,
        "tokenizer": prepared.fingerprint.tokenizer,
    }
    catalog = Catalog(scope_folder(config.store, scope) / "catalog.sqlite", expected=notes)
    forms = {ratio: it.digest for ratio, it in prepared.forms.items()}
    owners = {ratio: owner_of(scope, digest) for ratio, digest in forms.items()}
    handles = Handles(key=catalog.secret(), owners=owners, find=catalog.find)
    texts = Texts(
        scope=scope,
        forms=forms,
        handles=handles,
        has_head=prepared.has_head,
        tokenizer=prepared.fingerprint.tokenizer,
        chunk=catalog.chunk,
    )

    def close() -> None:
        catalog.close()
        prepared.heads.close()

    return texts, close


def _behind(plan: PrefixPlan, start: int) -> PrefixPlan:
    """The plan without what ends before row `start`; everything left stands where it stood."""
    rest = [it for it in plan.segments if it.row + it.ref.n_entries > start]
    if start < len(plan.head):
        return plan
    first = rest[0].row if rest else plan.n_entries
    return replace(plan, head=(), n_kept=first, segments=tuple(rest))
