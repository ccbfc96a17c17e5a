"""KV of several fingerprints side by side: a folder each, named by the first digits of its digest."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.store.remote import Remote
from coinrag_integrations.errors import ChunkNotFoundError, FingerprintMismatchError, StoreError
from coinrag_integrations.files import write_text
from coinrag_integrations.types import ChunkId, Scope

_NOTE = "fingerprint.json"
_CHUNK_ID = re.compile("[0-9a-f]{32}")


def variants(kv: Path) -> dict[str, Fingerprint]:
    """The fingerprints whose KV lies in `kv`, by the names of their folders.

    Raises:
        StoreError: a note cannot be read.
    """
    return {path.parent.name: _read(path) for path in sorted(kv.glob(f"*/{_NOTE}"))}


def choose_variant(kv: Path, fingerprint: Fingerprint, *, add: bool = False) -> Path:
    """The folder of a fingerprint: the one that is there, or a new one if it may be `add`ed.

    Nothing is made yet: `claim` does.

    Raises:
        FingerprintMismatchError: `kv` holds other fingerprints only; names the fields that differ.
        StoreError: a note cannot be read.
    """
    folder = kv / fingerprint.digest[:16]
    if not (folder / _NOTE).exists():
        others = list(variants(kv).values())
        # Where only slots are left of it, its entries may come again.
        of_it = (replace(other, extractor=fingerprint.extractor) for other in others)
        if others and not add and fingerprint not in of_it:
            raise _mismatch(kv, _nearest(others, fingerprint), fingerprint)
    return folder


def claim(folder: Path, fingerprint: Fingerprint) -> None:
    """Make a folder that of a fingerprint, or see that it is.

    Raises:
        FingerprintMismatchError: it is another's; names the fields and both values.
        StoreError: the folder cannot be read or made, or its note cannot be read.
    """
    try:
        if not (folder / _NOTE).exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / _NOTE, json.dumps(fingerprint.to_dict(), indent=1))
            return
    except OSError as error:
        raise StoreError(f"cannot open the KV store {folder}: {error}") from error
    found = _read(folder / _NOTE)
    if found != fingerprint:
        raise _mismatch(folder, found, fingerprint)


def drop_variant(kv: Path, name: str, remote: Remote | None, scope: Scope) -> None:
    """Remove the KV of one fingerprint; texts and index stay. For the one writing process.

    Raises:
        StoreError: there is none of that name, or the disk or the remote storage refuses.
    """
    if name not in variants(kv):
        known = ", ".join(variants(kv)) or "none"
        raise StoreError(f"{kv} holds no fingerprint {name!r}: there is {known}")
    if remote is not None:
        for key in remote.keys(f"{scope.tenant}/{scope.collection}/{name}"):
            remote.delete(key)
    try:
        (kv / name / _NOTE).unlink()
        sweep_variants(kv)
    except OSError as error:
        raise StoreError(f"cannot remove {kv / name}: {error}") from error


def sweep_variants(kv: Path) -> None:
    """Remove folders without a note: what is left when `drop_variant` was interrupted."""
    for folder in kv.glob("*/"):
        if not (folder / _NOTE).exists():
            shutil.rmtree(folder)


def delete_everywhere(kv: Path, chunk_id: ChunkId, remote: Remote | None, scope: Scope) -> None:
    """Remove a chunk's file, and its remote object, of every fingerprint.

    Raises:
        StoreError: the disk, or the remote storage, refuses.
    """
    if not is_id(chunk_id):
        return  # nothing is ever stored under it
    for folder in kv.glob("*/"):  # also one that is being dropped, and has no note any more
        if remote is not None:
            remote.delete(chunk_key(scope, folder.name, chunk_id))
        path = chunk_path(folder, chunk_id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot delete {path}: {error}") from error


def _mismatch(
    folder: Path, found: Fingerprint, fingerprint: Fingerprint
) -> FingerprintMismatchError:
    """The error that says in what two fingerprints differ."""
    values = "; ".join(
        f"{n} is {_short(getattr(found, n))}, this engine has {_short(getattr(fingerprint, n))}"
        for n in found.differences(fingerprint)
    )
    return FingerprintMismatchError(
        f"the store {folder} was built differently: {values}. Use the model and options it was "
        "built with, add this fingerprint beside it (add_fingerprint=True), or build another store"
    )


def is_id(chunk_id: str) -> bool:
    """Whether this can be the id of a chunk."""
    return bool(_CHUNK_ID.fullmatch(chunk_id))


def check_id(chunk_id: str) -> None:
    """Refuse what must not become part of a path; it may come from a prompt or a database.

    Raises:
        ChunkNotFoundError: the id is not one of ours.
    """
    if not is_id(chunk_id):
        raise no_id(chunk_id)


def no_id(chunk_id: str) -> ChunkNotFoundError:
    """The error for what cannot be the id of a chunk."""
    return ChunkNotFoundError(f"{chunk_id!r:.80} is not a chunk id: expected 32 hex digits")


def chunk_key(scope: Scope, name: str, chunk_id: ChunkId) -> str:
    """The name of a chunk's remote object: that of its file below `tenants/`, but for "kv/".

    Raises:
        ChunkNotFoundError: as for `check_id`.
    """
    check_id(chunk_id)
    return f"{scope.tenant}/{scope.collection}/{name}/{chunk_id[:2]}/{chunk_id}.safetensors"


def chunk_path(folder: Path, chunk_id: ChunkId) -> Path:
    """Where a chunk's file lies in the folder of a fingerprint.

    Raises:
        ChunkNotFoundError: as for `check_id`.
    """
    check_id(chunk_id)
    return folder / chunk_id[:2] / f"{chunk_id}.safetensors"


def _nearest(found: list[Fingerprint], fingerprint: Fingerprint) -> Fingerprint:
    return min(found, key=lambda other: len(other.differences(fingerprint)))


def _read(path: Path) -> Fingerprint:
    try:
        return Fingerprint.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} cannot be read: {error}. Build the store anew") from error


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:16]}…"
