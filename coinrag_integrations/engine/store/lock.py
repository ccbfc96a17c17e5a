"""One writing process at a time; readers need no lock, since files appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coinrag_integrations.errors import StoreError


@contextmanager
def writing(root: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Be the only writer of the store in `root`. The system frees the lock if the process dies.

    Another writer is waited for up to `wait_seconds`.

    Raises:
        StoreError: another process, or another object of this one, is writing; says its process id.
    """
    lock, note = FileLock(root / ".writer.lock"), root / ".writer.pid"
    try:
        lock.acquire(timeout=wait_seconds)
    except Timeout as error:
        raise StoreError(
            f"the store {root} is being written to by process {_holder(note)}: wait until it has "
            "ended; reading is possible meanwhile"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot write to the store {root}: {error}") from error
    try:
        try:
            note.write_text(str(os.getpid()))
        except OSError as error:
            raise StoreError(f"cannot write to the store {root}: {error}") from error
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _holder(note: Path) -> str:
    """Whose note it is; it may be gone by now, or not yet be written."""
    try:
        return note.read_text(encoding="ascii", errors="replace").strip() or "unknown"
    except OSError:
        return "unknown"
