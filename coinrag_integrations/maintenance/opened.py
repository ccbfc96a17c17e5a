"""A store opened for looking after it: every scope with all that belongs to it, and no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store import (
    Catalog,
    Disk,
    KVStore,
    Remote,
    scope_folder,
    scopes,
)
from coinrag_integrations.engine.store.disk import KV
from coinrag_integrations.engine.store.variants import variants
from coinrag_integrations.errors import SpanIndexError, StoreError
from coinrag_integrations.retrieval import ChromaFolder, SpanIndex, open_client
from coinrag_integrations.retrieval.upkeep import open_for_upkeep
from coinrag_integrations.settings import INDEX_MARK, StoreSettings, open_remote
from coinrag_integrations.types import ChunkId, Scope

OnProgress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenScope:
    """A scope's parts, opened for as long as the store is."""

    scope: Scope
    folder: Path
    catalog: Catalog
    index: SpanIndex | None
    stores: Mapping[str, KVStore]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStore:
    """A store's folder and what serves all of its scopes."""

    folder: Path
    settings: StoreSettings
    disk: Disk
    remote: Remote | None
    chroma: ChromaFolder | None
    closing: ExitStack

    def scopes(self) -> Iterator[OpenScope]:
        """Every scope in the store."""
        client = self.chroma or open_client(self.settings.chroma)
        for scope in scopes(self.folder):
            folder = scope_folder(self.folder, scope)
            yield OpenScope(
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
def open_store(folder: Path) -> Iterator[OpenStore]:
    """Open a store; everything is closed behind the block.

    Raises:
        StoreError, SpanIndexError: there is none, or it cannot be opened.
    """
    settings = StoreSettings.load(folder)
    with ExitStack() as closing:
        chroma = None if settings.chroma else ChromaFolder.open(folder / "chroma")
        if chroma is not None:
            closing.callback(chroma.close)
        yield OpenStore(
            folder=folder,
            settings=settings,
            disk=Disk(folder, settings.limits),
            remote=open_remote(settings.remote),
            chroma=chroma,
            closing=closing,
        )


def writing(scope: OpenScope) -> AbstractContextManager[None]:
    """Keep others from the index of a scope.

    Raises:
        SpanIndexError: another process has it open, or one died while it wrote.
    """
    if scope.index is not None and scope.index.interruption is not None:
        raise SpanIndexError(
            f"a process died while it changed the index of {scope.scope}: open the store, or run "
            "`coinrag verify --repair`, which makes it good"
        )
    return scope.index.writing() if scope.index is not None else nullcontext()


def rows_of(scope: OpenScope) -> tuple[set[ChunkId], set[ChunkId]]:
    """The chunks that the index has rows of; an interrupted index is not looked into."""
    if scope.index is None or scope.index.interruption is not None:
        return set(), set()
    return scope.index.ids()
