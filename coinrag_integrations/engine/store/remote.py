"""Whole files and byte ranges of files in object storage, by any URL that fsspec knows.

    s3://bucket/prefix/acme/main/<fingerprint>/ab/ab34….safetensors
    └── URL ─────────┘ └── key ───────────────────────────────────┘

Credentials and endpoints come from the environment or from fsspec's own configuration (for S3:
AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL_S3, FSSPEC_S3_ENDPOINT_URL, ~/.config/fsspec …). Nothing of them is
written anywhere or shown in a message. Failures that may pass are tried again, here and nowhere below.
"""

from __future__ import annotations

import errno
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import fsspec
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

from coinrag_integrations.engine.store.retry import (
    NO_BUCKET,
    Retry,
    advice,
    code_of,
    is_transient,
    reason,
)
from coinrag_integrations.errors import ConfigError, RemoteError
from coinrag_integrations.files import publish

T = TypeVar("T")

# A request costs 2 ms of CPU here (measured: the client's work, whatever the line): what 2 MiB more of
# a response cost on loopback, and the time of 230 KiB over 1 Gbit/s. So a smaller gap is read as well.
_GAP = 128 * 1024
# S3's own advice is 8 to 16 MB a request, several at once; loopback shows no difference up to there.
_LARGEST = 8 * 2**20
# The client's default of 10 lets a question's ranges wait for each other.
_CONNECTIONS = 32

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
# Object storage shows an upload when it is complete; anything else gets a temporary name first.
_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci"})
# The local disk's faults in a download; reading from a remote never ends in one of these.
_LOCAL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})


class Remote:
    """A folder in remote storage. Safe to use from many threads, and in a process after a fork.

    Keys are relative paths of letters, digits, `_`, `.` and `-`; no part begins with a dot or a dash.
    Other keys are a ValueError. What the storage refuses, or what still fails after all attempts, is a
    RemoteError; what is not there, a FileNotFoundError.
    """

    def __init__(self, url: str, options: dict[str, Any], retry: Retry) -> None:
        """See `open`."""
        self._url, self._options, self._retry = url, options, retry
        self.url = _shown(url)
        self._opened: tuple[int, Any] | None = None
        self._inherited: Any = None
        fs = self._connect()
        self._root = fs._strip_protocol(url).rstrip("/")
        if not self._root:
            raise ConfigError(f"{self.url} names no bucket or folder: write it behind the '://'")

    @classmethod
    def open(cls, url: str, *, retry: Retry | None = None, **storage_options: Any) -> Self:
        """The folder at an fsspec URL (s3://bucket/prefix, gs://…, file:///…). Nothing is sent yet.

        `storage_options` go to the fsspec file system; better leave credentials to the environment.

        Raises:
            ConfigError: no such URL, or what reads it is not installed.
        """
        return cls(url, storage_options, retry or Retry())

    def __repr__(self) -> str:
        """The URL without what may be secret."""
        return f"Remote({self.url!r})"

    def put(self, key: str, path: Path) -> None:
        """Upload a local file; it replaces what was there, whole or not at all.

        Raises:
            OSError: the local file cannot be read.
            RemoteError: the storage cannot be reached or refuses; what was there stays.
        """
        with path.open("rb"):
            target = self._path(key)
        self._call("write", key, lambda fs, bound: _upload(fs, path, target, bound), missing=False)

    def fetch(self, key: str, path: Path) -> None:
        """Download to a local file, which is written over; it is not synced, and removed on an error.

        Raises:
            FileNotFoundError: there is no such object.
            OSError: the local disk refuses.
            RemoteError: the storage cannot be reached or refuses, or sends another number of bytes.
        """
        source = self._path(key)
        complete = False
        _create(path)
        try:
            self._call("read", key, lambda fs, bound: _download(fs, source, path, bound))
            complete = True
        finally:
            if not complete:
                path.unlink(missing_ok=True)

    def read_ranges(self, key: str, ranges: Sequence[range]) -> list[bytes]:
        """The bytes of each range, in their order; ranges that lie close together in one request.

        They may overlap and come in any order; all requests are under way at once.

        Raises:
            FileNotFoundError: there is no such object.
            RemoteError: the storage cannot be reached or refuses, or the object is shorter.
            ValueError: a range that is not of consecutive bytes from 0 on.
        """
        path = self._path(key)
        requests, place = merge(ranges)
        parts: dict[int, bytes] = {}

        def read(fs: Any, bound: dict[str, float]) -> None:
            todo = [i for i in range(len(requests)) if i not in parts]
            answers = fs.cat_ranges(
                [path] * len(todo),
                [requests[i].start for i in todo],
                [requests[i].stop for i in todo],
                on_error="return",
                **bound,
            )
            errors = [a for a in answers if isinstance(a, BaseException)]
            for i, answer in zip(todo, answers, strict=True):
                if not isinstance(answer, BaseException):
                    _check_length(len(answer), len(requests[i]), f"bytes {requests[i]}")
                    parts[i] = answer
            if errors:
                raise next((e for e in errors if not is_transient(e)), errors[0])

        if requests:
            self._call("read", key, read)
        return [
            b"" if i is None else _cut(parts[i], requests[i].start, wanted)
            for i, wanted in zip(place, ranges, strict=True)
        ]

    def size(self, key: str) -> int:
        """Bytes of an object.

        Raises:
            FileNotFoundError: there is no such object.
            RemoteError: the storage cannot be reached or refuses.
        """
        path = self._path(key)
        return self._call("look up", key, lambda fs, bound: _size(fs, path, bound))

    def exists(self, key: str) -> bool:
        """Whether there is such an object.

        Raises:
            RemoteError: the storage cannot be reached or refuses.
        """
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def delete(self, key: str) -> bool:
        """Remove an object; whether there was one.

        Raises:
            RemoteError: the storage cannot be reached or refuses.
        """
        path = self._path(key)
        if not self.exists(key):
            return False
        try:
            self._call("delete", key, lambda fs, bound: fs.rm_file(path, **bound))
        except FileNotFoundError:
            return False
        return True

    def keys(self, prefix: str = "") -> Iterator[str]:
        """The keys in a folder and all folders in it, in order; of the whole remote if it is "".

        Names that no key can have, such as temporary ones, are left out.

        Raises:
            RemoteError: the storage cannot be reached or refuses.
        """
        folder = self._path(prefix) if prefix else self._root
        found = self._call(
            "list", prefix, lambda fs, bound: fs.find(folder, **bound), missing=False
        )
        names = (str(name)[len(self._root) + 1 :] for name in found)
        return iter(sorted(name for name in names if _KEY.fullmatch(name)))

    def close(self) -> None:
        """Close the connections. Whoever reads meanwhile gets an error; nothing can be read later."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            _disconnect(opened[1])

    def __enter__(self) -> Self:
        """The remote itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _path(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r:.200} is not a key: expected relative/path/of.parts")
        return f"{self._root}/{key}"

    def _connect(self) -> Any:
        try:
            fs = _open_filesystem(self._url, self._options)
        except (ImportError, ValueError) as error:
            extra = "; pip install 'coinrag-integrations[s3]'" if self._url[:2] == "s3" else ""
            raise ConfigError(f"cannot use {self.url} as remote storage: {error}{extra}") from error
        self._opened = os.getpid(), fs
        return fs

    def _filesystem(self) -> Any:
        """The file system of this process. Two threads may open one each after a fork: no harm."""
        opened = self._opened  # once: another thread may close
        if opened is None:
            raise RemoteError(f"{self.url} was closed: open it again")
        pid, fs = opened
        if pid != os.getpid():
            # The parent's event loop does not run here, and its sockets are not ours to close.
            self._inherited = fs
            fs = self._connect()
        return fs

    def _call(
        self,
        what: str,
        key: str,
        do: Callable[[Any, dict[str, float]], T],
        *,
        missing: bool = True,
    ) -> T:
        """Do it until it is done, cannot succeed, or has been tried for long enough.

        `do` gets the file system and its time limit, as keywords. `missing`: the object may be.
        """
        began = time.monotonic()
        attempt = 0
        while True:
            attempt += 1
            fs = self._filesystem()
            left = began + self._retry.total_s - time.monotonic()
            try:
                return do(fs, {"timeout": max(left, 0.1)} if fs.async_impl else {})
            except RemoteError as error:
                raise RemoteError(f"cannot {what} {self.url}/{key}: {error}") from error
            # fsspec's back ends raise what they like: their errors share no other base.
            except Exception as error:
                if missing and isinstance(error, FileNotFoundError) and code_of(error) != NO_BUCKET:
                    raise FileNotFoundError(f"{self.url}/{key} is not there") from error
                if isinstance(error, OSError) and error.errno in _LOCAL and what == "read":
                    raise
                pause = self._retry.pause(attempt)
                spent = time.monotonic() - began
                if (
                    not is_transient(error)
                    or attempt == self._retry.attempts
                    or spent + pause >= self._retry.total_s
                ):
                    tries = f" ({attempt} attempts in {spent:.1f} s)" if attempt > 1 else ""
                    raise RemoteError(
                        f"cannot {what} {self.url}/{key}: {reason(error)}{tries}. {advice(error)}"
                    ) from error
            time.sleep(pause)


def merge(ranges: Sequence[range]) -> tuple[list[range], list[int | None]]:
    """The requests to make for `ranges`, and for each of them which one holds it; None if it is empty.

    Raises:
        ValueError: a range that is not of consecutive bytes from 0 on.
    """
    for wanted in ranges:
        if wanted.step != 1 or wanted.start < 0 or wanted.stop < wanted.start:
            raise ValueError(f"{wanted} is not a range of bytes")
    requests: list[range] = []
    place: list[int | None] = [None] * len(ranges)
    for i in sorted(range(len(ranges)), key=lambda i: (ranges[i].start, ranges[i].stop)):
        if not ranges[i]:
            continue
        start, stop = ranges[i].start, ranges[i].stop
        if requests:
            last = requests[-1]
            both = range(last.start, max(stop, last.stop))
            if stop <= last.stop or (start <= last.stop + _GAP and len(both) <= _LARGEST):
                requests[-1], place[i] = both, len(requests) - 1
                continue
        requests.append(range(start, stop))
        place[i] = len(requests) - 1
    return requests, place


def _open_filesystem(url: str, options: dict[str, Any]) -> Any:
    """An instance of its own: nobody else's settings, connections or listings.

    Raises:
        ImportError: what reads such URLs is not installed.
        ValueError: no such URL.
    """
    if "://" not in url or "::" in url:
        raise ValueError("expected one URL, such as s3://bucket/folder or file:///folder")
    fs, _ = fsspec.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
    if "s3" in _protocols(fs):
        # What is tried again is decided in one place, here. The user's own settings go first.
        fs.retries = 1
        fs.config_kwargs = {
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": _CONNECTIONS,
            **fs.config_kwargs,
        }
        # A download in one piece: one in parts could mix two versions of an object.
        fs.default_block_size = 5 * 2**30
    return fs


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _disconnect(fs: Any) -> None:
    session = getattr(fs, "_s3creator", None)
    if session is not None:  # other back ends close theirs when they are collected
        fs.close_session(fs.loop, session)


def _upload(fs: Any, path: Path, target: str, bound: dict[str, float]) -> None:
    if _protocols(fs) & _WHOLE:
        fs.put_file(str(path), target, **bound)
        return
    folder, _, name = target.rpartition("/")
    temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
    fs.makedirs(folder, exist_ok=True)
    try:
        fs.put_file(str(path), temporary)
        if isinstance(fs, LocalFileSystem):
            publish(Path(temporary), Path(target))
        else:
            fs.mv(temporary, target)
    finally:
        if fs.exists(temporary):
            fs.rm_file(temporary)


def _download(fs: Any, source: str, path: Path, bound: dict[str, float]) -> None:
    answer = Callback()
    fs.get_file(source, str(path), callback=answer, **bound)
    # The length that came with this very answer, where the back end says it.
    expected = _size(fs, source, bound) if answer.size is None else int(answer.size)
    _check_length(path.stat().st_size, expected, "the object")


def _create(path: Path) -> None:
    """Make the file first, so that a local fault is one, not the remote's."""
    try:
        path.open("wb").close()
    except FileNotFoundError as error:  # which would say that the object is missing
        raise NotADirectoryError(errno.ENOTDIR, "no such folder", str(path.parent)) from error


def _size(fs: Any, path: str, bound: dict[str, float]) -> int:
    info = fs.info(path, **bound)
    if info["type"] != "file":
        raise FileNotFoundError(path)
    return int(info["size"])


def _check_length(n_bytes: int, expected: int, what: str) -> None:
    if n_bytes != expected:
        raise RemoteError(f"{what}: {n_bytes:,} bytes came, expected {expected:,}. Not used")


def _cut(part: bytes, start: int, wanted: range) -> bytes:
    return part[wanted.start - start : wanted.stop - start]  # the whole part: no copy


def _shown(url: str) -> str:
    """A URL without user names, passwords and queries, and without a slash at its end."""
    return re.sub(r"(?<=[^:/])/+$", "", re.sub(r"://[^/@]*@", "://", url).partition("?")[0])
