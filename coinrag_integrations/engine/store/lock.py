"""One writing process at a time; readers need no lock, since files appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from coinrag_integrations.errors import StoreError


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Be the only writer of the store in `root`. The system frees the lock if the process dies.

    Raises:
        StoreError: another process, or another object of this one, is writing; says its process id.
    """
    lock, note = FileLock(root / ".writer.lock"), root / ".writer.pid"
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        holder = note.read_text().strip() if note.is_file() else "unknown"
        raise StoreError(
            f"the store {root} is being written to by process {holder}: wait until it has ended; "
            "reading is possible meanwhile"
        ) from error
    except OSError as error:
        raise StoreError(f"cannot write to the store {root}: {error}") from error
    try:
        note.write_text(str(os.getpid()))
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()
