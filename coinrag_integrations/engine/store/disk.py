"""The folder of a store: who may write to it, and how many bytes it may take. Knows no chunk's content.

    <root>/tenants/<tenant>/<collection>/catalog.sqlite
    <root>/tenants/<tenant>/<collection>/kv/<fingerprint>/ab/ab34….safetensors

The file system is the ledger: sizes are the blocks that files occupy, and a file's access time says when
it was last used (readers set it; a mount's own policy does not matter). So what is counted is what `du`
counts, and nothing can disagree with it after a crash.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from coinrag_integrations.engine.store.catalog import pinned_chunks
from coinrag_integrations.engine.store.lock import writing
from coinrag_integrations.errors import ConfigError, StoreError
from coinrag_integrations.types import Scope

KV = "kv"
TENANTS = "tenants"
_BLOCK = 4096
_SHARES = (
    20  # a scan hands out this part of the cap before the next; as much stays free for other files
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes that a store may take on disk; None: as many as there are.

    `max_bytes` bounds the whole folder (KV, texts, index), `tenant_bytes` the folders of single tenants.
    KV that was not used for longest gives way to new KV, unless it is pinned.
    """

    max_bytes: int | None = None
    tenant_bytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse caps of nothing."""
        for name, value in {"max_bytes": self.max_bytes, **self.tenant_bytes}.items():
            if value is not None and value < 1:
                raise ConfigError(f"the cap {name} is {value} bytes: it must be at least 1")

    def __bool__(self) -> bool:
        """Whether anything is bounded."""
        return self.max_bytes is not None or bool(self.tenant_bytes)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    tenant: str
    n_bytes: int
    used_ns: int


class Disk:
    """A store's folder. One process at a time writes; its threads wait for each other."""

    def __init__(self, root: Path, limits: Limits | None = None) -> None:
        """Nothing is opened or counted yet."""
        self.root, self.limits = root, limits or Limits()
        self._threads, self._counting = threading.RLock(), threading.Lock()
        self._allowance: dict[str, int] = {}
        self._unwritten: dict[str, int] = {}
        self._generation = ""

    @contextmanager
    def writing(self, *, wait_seconds: float = 0.0) -> Iterator[None]:
        """Be the only writer. Threads of this object wait, other processes for `wait_seconds`.

        Raises:
            StoreError: another process, or this very thread, is writing, or the disk refuses.
        """
        with self._threads, writing(self.root, wait_seconds=wait_seconds):
            self._begin()
            yield

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Be the only writer if nobody is one now; whether that is so."""
        with ExitStack() as held:
            if not self._threads.acquire(blocking=False):
                yield False
                return
            held.callback(self._threads.release)
            try:
                held.enter_context(writing(self.root))
                self._begin()
            except StoreError:
                yield False
                return
            yield True

    @contextmanager
    def room(self, tenant: str, n_bytes: int) -> Iterator[None]:
        """Make room for bytes of a tenant that the block writes, by evicting KV.

        For the one writing process; several of its threads may write at once.

        Raises:
            StoreError: the caps leave no room, even without all KV that is not pinned; nothing is
                evicted then.
        """
        if not self.limits:
            yield
            return
        # A file takes whole blocks, and perhaps a new directory.
        n_bytes = -(-n_bytes // _BLOCK) * _BLOCK + 2 * _BLOCK
        names = [name for name in self._caps() if name in ("", tenant)]
        with self._counting:
            if any(self._allowance.get(name, 0) < n_bytes for name in names):
                self._count_and_evict(tenant, n_bytes)
            for name in names:
                self._allowance[name] -= n_bytes
                self._unwritten[name] = self._unwritten.get(name, 0) + n_bytes
        try:
            yield
        finally:
            with self._counting:
                for name in names:
                    self._unwritten[name] -= n_bytes

    def usage(self) -> dict[str, int]:
        """Bytes on disk of each tenant, and under "" of the whole folder."""
        _, totals = self._scan()
        return totals

    def touch(self, file: int, status: os.stat_result) -> None:
        """Note that an open file was used, for eviction. Nothing happens without a cap."""
        now = time.time_ns()
        if self.limits and now - status.st_atime_ns > 1_000_000_000:
            try:
                os.utime(file, ns=(now, status.st_mtime_ns))
            except OSError:
                return  # a reader without the right to: what it reads counts as not used

    def enforce(self) -> int:
        """Evict what is above the caps now; the bytes freed. For the one writing process."""
        with self._counting:
            before = self.usage()[""]
            for tenant in self.limits.tenant_bytes:
                self._count_and_evict(tenant, 0)
            if self.limits.max_bytes is not None:
                self._count_and_evict("", 0)
            return before - self.usage()[""]

    def _begin(self) -> None:
        """Forget what was counted if another process has written since."""
        note = self.root / ".generation"
        try:
            if not self.limits:
                note.unlink(missing_ok=True)  # whoever counts has to count anew
            elif not self._generation or _read(note) != self._generation:
                self._allowance.clear()
                self._generation = uuid.uuid4().hex
                note.write_text(self._generation, encoding="ascii")
        except OSError as error:
            raise StoreError(f"cannot write {note}: {error}") from error

    def _caps(self) -> dict[str, int]:
        """Caps by tenant; "" is the whole folder."""
        whole = {} if self.limits.max_bytes is None else {"": self.limits.max_bytes}
        return {**self.limits.tenant_bytes, **whole}

    def _count_and_evict(self, tenant: str, n_bytes: int) -> None:
        files, totals = self._scan()
        for name, cap in self._caps().items():
            if name not in ("", tenant):
                continue
            share = max(cap // _SHARES, n_bytes)
            room = self._left(name, cap, totals)
            if room < n_bytes:
                candidates = [f for f in files if name in ("", f.tenant)]
                freed = self._evict(candidates, share - room, at_least=n_bytes - room, name=name)
                files = [f for f in files if f not in freed]
                for file in freed:
                    totals[file.tenant] -= file.n_bytes
                    totals[""] -= file.n_bytes
                room = self._left(name, cap, totals)
            self._allowance[name] = min(room, share)

    def _left(self, name: str, cap: int, totals: Mapping[str, int]) -> int:
        """Bytes that may still be written: some are promised already, some are kept for other files."""
        return cap - cap // _SHARES - totals.get(name, 0) - self._unwritten.get(name, 0)

    def _evict(self, files: list[_File], n_bytes: int, *, at_least: int, name: str) -> set[_File]:
        """Remove files, least recently used first, until `n_bytes` are free, or at least enough."""
        pinned = {
            chunk_id
            for folder in {file.path.parents[3] for file in files}
            for chunk_id in pinned_chunks(folder / "catalog.sqlite")
        }
        loose = sorted((f for f in files if f.path.stem not in pinned), key=lambda f: f.used_ns)
        missing = at_least - sum(file.n_bytes for file in loose)
        if missing > 0:
            whose = f"of tenant {name!r}" if name else f"of the store {self.root}"
            raise StoreError(
                f"the cap {whose}, {self._caps()[name]:,} bytes, leaves no room for {missing:,} "
                "more: all else that is there are texts, the index and pinned KV. Raise the cap, "
                "unpin or delete documents"
            )
        freed: set[_File] = set()
        n_freed = 0
        for file in loose:
            if n_freed >= n_bytes:
                break
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"cannot evict {file.path}: {error}") from error
            freed.add(file)
            n_freed += file.n_bytes
        return freed

    def _scan(self) -> tuple[list[_File], dict[str, int]]:
        """Every KV file, and the bytes of each tenant and of all (under "")."""
        files: list[_File] = []
        totals: dict[str, int] = {"": 0}
        for folder, _, names in os.walk(self.root):
            parts = Path(folder).relative_to(self.root).parts
            tenant = parts[1] if len(parts) > 1 and parts[0] == TENANTS else None
            is_kv = len(parts) == 6 and parts[0] == TENANTS and parts[3] == KV
            for name in (".", *names):
                path = Path(folder, name)
                try:
                    status = path.lstat()
                except FileNotFoundError:
                    continue  # evicted, replaced or merged meanwhile
                n_bytes = status.st_blocks * 512
                for owner in {"", tenant} - {None}:
                    totals[str(owner)] = totals.get(str(owner), 0) + n_bytes
                if is_kv and tenant and name.endswith(".safetensors"):
                    files.append(_File(path, tenant, n_bytes, status.st_atime_ns))
        return files, totals


def _read(note: Path) -> str:
    try:
        return note.read_text(encoding="ascii")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def scope_folder(root: Path, scope: Scope) -> Path:
    """Where all that belongs to a scope lies."""
    return root / TENANTS / scope.tenant / scope.collection


def scopes(root: Path) -> list[Scope]:
    """The scopes that a store has a catalog of."""
    found = sorted(root.glob(f"{TENANTS}/*/*/catalog.sqlite"))
    return [Scope(tenant=p.parts[-3], collection=p.parts[-2]) for p in found]
