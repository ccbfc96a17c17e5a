"""An index to look after: rows are listed and deleted without their embedder. For `maintenance`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.retrieval.chroma import guard
from coinrag_integrations.retrieval.embedders import Vectors
from coinrag_integrations.retrieval.folder import ChromaFolder
from coinrag_integrations.retrieval.index import SpanIndex

if TYPE_CHECKING:
    from chromadb.api import ClientAPI


def open_for_upkeep(client: ClientAPI | ChromaFolder, name: str, mark: Path) -> SpanIndex | None:
    """An index whose rows can be listed and deleted, whoever embedded them; None if there is none.

    Raises:
        SpanIndexError: Chroma fails.
    """
    api = client.client if isinstance(client, ChromaFolder) else client
    with guard(f"list the collections of {name!r}"):
        found = {it.name: it.metadata or {} for it in api.list_collections()}
    metadata = found.get(f"{name}_chunks")
    if metadata is None:
        return None
    return SpanIndex(client, _AnyEmbedder(str(metadata.get("coinrag_embedder"))), name, mark=mark)


@dataclass(frozen=True, slots=True)
class _AnyEmbedder:
    """Stands for the embedder of rows that are only looked after."""

    embedder_id: str

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        raise SpanIndexError(
            f"this needs the embedder {self.embedder_id!r}: open the store with it"
        )

    def embed_query(self, text: str) -> Vectors:
        return self.embed_documents([text])
