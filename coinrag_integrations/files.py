"""Files that are whole or not there, also after a loss of power."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def sync(path: Path) -> None:
    """Have the disk hold what was written to a file, or to a directory's list of names."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_text(path: Path, text: str) -> None:
    """Write or replace a file. Also for others than the one writing process.

    Raises:
        OSError: the disk refuses; what was there stays.
    """
    for is_last in (False, False, True):
        try:
            _write_text(path, text)
        except FileNotFoundError:  # a writer that just begins swept it away
            if is_last or not path.parent.is_dir():
                raise
        else:
            return


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write or replace a safetensors file.

    Raises:
        OSError, SafetensorError: the disk refuses; what was there stays.
    """
    from safetensors.torch import save_file

    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(dict(tensors), temporary)
        share(temporary)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def share(path: Path) -> None:
    """Let those read a file who may read its folder: safetensors writes for its owner alone."""
    path.chmod(path.parent.stat().st_mode & 0o666)


def share_all(folder: Path) -> None:
    """The same for all safetensors files in a folder, as other libraries write them."""
    for path in folder.glob("*.safetensors"):
        share(path)


def publish(temporary: Path, path: Path) -> None:
    """Give a complete temporary file its name.

    Raises:
        OSError: the disk refuses.
    """
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sweep(root: Path) -> int:
    """Remove temporary files that an interrupted writer left; how many. For the one writing process."""
    names = (".*.tmp", ".tmp??????")  # ours, and those that safetensors writes to first
    leftovers = [path for name in names for path in root.rglob(name) if path.is_file()]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)
