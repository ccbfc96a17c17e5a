"""Other people's Chroma collections: opened so that not a byte of them changes.

Chroma writes to a folder whenever it opens one, so a folder is read from a copy of it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from coinrag_integrations.errors import ConfigError, SpanIndexError
from coinrag_integrations.retrieval import open_client
from coinrag_integrations.retrieval.chroma import guard

if TYPE_CHECKING:
    from chromadb.api import ClientAPI
    from chromadb.api.client import Client
    from chromadb.api.models.Collection import Collection

_ATTEMPTS = 3
# Where LangChain's Chroma, LlamaIndex's ChromaVectorStore and its indexes keep the collection.
_INSIDE = ("_collection", "_chroma_collection", "vector_store")


@contextmanager
def open_collection(
    source: object, name: str | None = None, *, scratch: Path | None = None
) -> Iterator[Collection]:
    """A collection to read from.

    `source` is a folder, the address of a server (`http://host:port`), or an object that is open already:
    a Chroma collection, LangChain's `Chroma`, LlamaIndex's `ChromaVectorStore` or an index over one. A
    folder is copied into `scratch` (default: the system's temporary folder) while it is read. `name` may
    be left out where there is one collection only.

    Raises:
        SpanIndexError: no such database or collection, Chroma cannot be reached, or another process
            writes to the folder.
        ConfigError: an object that is none of these.
    """
    if not isinstance(source, str | Path):
        yield _inside(source)
    elif str(source).startswith(("http://", "https://")):
        yield _named(open_client(str(source)), name, str(source))
    else:
        with _copy_of(Path(source), scratch) as copy:
            client = open_client(copy)
            with closing(cast("Client", client)):
                yield _named(client, name, str(source))


def folder_bytes(folder: Path) -> int:
    """What a copy of a folder takes."""
    return sum(size for size, _ in _state(folder).values())


def _inside(source: object) -> Collection:
    from chromadb.api.models.Collection import Collection

    found: Any = source
    for _ in range(len(_INSIDE)):
        if isinstance(found, Collection):
            return found
        found = next((it for key in _INSIDE if (it := getattr(found, key, None))), None)
    raise ConfigError(
        f"{type(source).__name__} holds no Chroma collection: give a folder, a server's address, "
        "LangChain's Chroma, LlamaIndex's ChromaVectorStore, or the collection itself"
    )


def _named(client: ClientAPI, name: str | None, where: str) -> Collection:
    with guard(f"list the collections of {where}"):
        there = sorted(collection.name for collection in client.list_collections())
    if name is None and len(there) == 1:
        name = there[0]
    if name not in there:
        what = "there is more than one" if name is None and there else f"no collection {name!r}"
        raise SpanIndexError(f"{where}: {what}. Collections: {', '.join(there) or 'none'}")
    with guard(f"open the collection {name!r}"):
        # Never the embedding function that it names: Chroma would load, or even fetch it.
        return client.get_collection(name, embedding_function=None)


@contextmanager
def _copy_of(folder: Path, scratch: Path | None) -> Iterator[Path]:
    """A copy that is gone afterwards."""
    if not (folder / "chroma.sqlite3").is_file():
        raise SpanIndexError(
            f"there is no Chroma database in {folder}: give the folder that holds chroma.sqlite3"
        )
    try:
        made = tempfile.TemporaryDirectory(
            prefix="coinrag-copy-", dir=scratch, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise SpanIndexError(f"cannot make a folder in {scratch}: {error}") from error
    with made as root:
        for attempt in range(_ATTEMPTS):
            target = Path(root) / f"copy-{attempt}"
            before = _state(folder)
            try:
                shutil.copytree(folder, target)
            except (OSError, shutil.Error) as error:
                raise SpanIndexError(
                    f"cannot copy {folder} ({folder_bytes(folder) / 1e6:,.1f} MB) to {root}: {error}. "
                    "Choose another place with --scratch (scratch=)"
                ) from error
            if _state(folder) == before:
                yield target
                return
            shutil.rmtree(target, ignore_errors=True)
    raise SpanIndexError(
        f"{folder} is being written to: stop the application while it is read, or give the address "
        "of its server"
    )


def _state(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of change of every file."""
    found = {}
    for path in folder.rglob("*"):
        try:
            stat = path.stat()
        except FileNotFoundError:  # journals come and go
            continue
        if path.is_file():
            found[path] = (stat.st_size, stat.st_mtime_ns)
    return found
