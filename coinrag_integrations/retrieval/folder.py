"""A Chroma database in a folder: many processes may read it, or one may write to it, never both.

Chroma keeps parts of an index in memory. A process that reads beside a writer misses what is written, and
two that write corrupt the folder without a word. A server (`chroma run`) has neither problem.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.files import sync
from coinrag_integrations.retrieval.chroma import open_client

try:
    import fcntl
except ImportError:  # Windows: nothing keeps processes apart there
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.client import Client


@dataclass(kw_only=True)
class _Lock:
    """One process's lock on a folder, however many objects of it use the folder."""

    path: Path
    file: int
    n_holders: int = 0
    n_writers: int = 0
    _all: ClassVar[dict[tuple[int, Path], _Lock]] = {}
    _guard: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def hold(cls, path: Path) -> _Lock:
        with cls._guard:
            key = (os.getpid(), path)  # a forked child has locks of its own to take
            if key not in cls._all:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = cls(path=path, file=os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
                try:
                    lock.take(exclusive=False)
                except SpanIndexError:
                    os.close(lock.file)
                    raise
                cls._all[key] = lock
            cls._all[key].n_holders += 1
            return cls._all[key]

    def take(self, *, exclusive: bool) -> None:
        if fcntl is None:
            return
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(self.file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if exclusive:  # changing a lock gives up the old one first
                fcntl.flock(self.file, fcntl.LOCK_SH)
            how = "is open in another process" if exclusive else "is being written to"
            raise SpanIndexError(
                f"the Chroma folder {self.path.with_suffix('')} {how}: wait until it has ended, or "
                "have a server keep the index (`chroma run`, then chroma='http://host:port')"
            ) from error

    def release(self) -> None:
        with self._guard:
            self.n_holders -= 1
            if not self.n_holders:
                self._all.pop((os.getpid(), self.path), None)
                os.close(self.file)


@dataclass(kw_only=True)
class ChromaFolder:
    """A client of a folder, to be closed."""

    client: ClientAPI
    folder: Path
    _lock: _Lock
    _closed: bool = field(default=False)

    @classmethod
    def open(cls, folder: Path) -> ChromaFolder:
        """Open the database in `folder`, made if it is not there, for reading.

        Raises:
            SpanIndexError: another process is writing to it, or it cannot be opened.
        """
        try:
            lock = _Lock.hold(_lock_of(folder.resolve()))
        except OSError as error:
            raise SpanIndexError(f"cannot open Chroma in {folder}: {error}") from error
        try:
            return cls(client=open_client(folder), folder=folder, _lock=lock)
        except SpanIndexError:
            lock.release()
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only process that has the folder open.

        Raises:
            SpanIndexError: another one has.
        """
        lock = self._lock
        with lock._guard:
            if not lock.n_writers:
                lock.take(exclusive=True)
            lock.n_writers += 1
        try:
            yield
        finally:
            with lock._guard:
                lock.n_writers -= 1
                if not lock.n_writers:
                    lock.take(exclusive=False)

    def sync(self) -> None:
        """Have the disk hold all files of the database: Chroma does not see to it for its vectors.

        Raises:
            SpanIndexError: the disk refuses.
        """
        try:
            for path in (self.folder, *self.folder.rglob("*")):
                with suppress(FileNotFoundError):  # journals come and go
                    sync(path)
        except OSError as error:
            raise SpanIndexError(f"cannot sync {self.folder}: {error}") from error

    def close(self) -> None:
        """Close the client and let others in. Once is enough."""
        if self._closed:
            return
        self._closed = True
        cast("Client", self.client).close()
        self._lock.release()


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
