"""Chroma as we use it: how to reach it, and its errors and limits translated once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from coinrag_integrations.errors import ConfigError, SpanIndexError
from coinrag_integrations.types import Metadata

if TYPE_CHECKING:
    from chromadb.api import ClientAPI

T = TypeVar("T")
_RESERVED = "chroma:document"


def open_client(where: str | Path | None) -> ClientAPI:
    """A Chroma client: None for memory, `http://host:port` for a server, else a folder.

    Without telemetry. One process at a time may write to a folder; a server serves many.

    Raises:
        SpanIndexError: the server does not answer, or the folder cannot be opened.
        ConfigError: the address is not one.
    """
    import chromadb
    from chromadb.config import Settings

    settings = Settings(anonymized_telemetry=False)
    if where is None:
        return chromadb.EphemeralClient(settings)
    if not str(where).startswith(("http://", "https://")):
        with guard(f"open Chroma in {where}"):
            return chromadb.PersistentClient(str(where), settings)
    try:
        url = urlsplit(str(where))
        host, port = url.hostname, url.port
    except ValueError:  # a port that is no number, or out of range
        host, port = None, None
    if not host:
        raise ConfigError(f"{where!r} is no address of a Chroma server: use http://host:port")
    secure = url.scheme == "https"
    port = port or (443 if secure else 8000)
    with guard(f"reach the Chroma server {where}; is it running (chroma run --port {port})?"):
        return chromadb.HttpClient(host, port, ssl=secure, settings=settings)


@contextmanager
def guard(action: str) -> Iterator[None]:
    """Translate whatever Chroma raises in the block into `SpanIndexError`."""
    import httpx
    from chromadb.errors import ChromaError

    try:
        yield
    except (ChromaError, httpx.HTTPError, ValueError, TypeError, OSError, RuntimeError) as error:
        raise SpanIndexError(f"cannot {action} ({type(error).__name__}: {error})") from error


def pages(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """`items` in runs of at most `size`: Chroma refuses larger ones."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def clean_metadata(metadata: Metadata | Mapping[str, Any]) -> dict[str, Any]:
    """What Chroma can hold of `metadata`: None is left out.

    Raises:
        SpanIndexError: a key or value that would be refused, or silently lost (NaN, infinity, nested).
    """
    clean: dict[str, Any] = {}
    for key, value in metadata.items():
        if value is None:
            continue
        if not isinstance(key, str) or not key or key[0] in "$#" or key == _RESERVED:
            raise SpanIndexError(
                f"metadata key {_shown(key)} cannot be kept: keys are text, not empty, do not begin "
                f"with '$' or '#', and are not {_RESERVED!r}"
            )
        if not (is_list(value) if isinstance(value, list) else _is_kept(value)):
            raise SpanIndexError(
                f"metadata {_shown(key)} is {_shown(value)}: only text, booleans, finite numbers of "
                "64 bits and lists of one of them can be kept"
            )
        clean[key] = value
    return clean


def is_list(value: Any) -> bool:
    """Whether a value is a list that Chroma keeps: not empty, of text, of booleans or of numbers."""
    return isinstance(value, list) and len(set(map(type, value))) == 1 and all(map(_is_kept, value))


def _is_kept(value: Any) -> bool:
    # Larger integers would come back as floats, NaN and infinity would vanish.
    return isinstance(value, str) or (
        isinstance(value, int | float) and abs(value) < (2**63 if isinstance(value, int) else inf)
    )


def _shown(value: object) -> str:
    """A value in an error: short, also if writing all of it out takes forever or is refused."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.80}"
