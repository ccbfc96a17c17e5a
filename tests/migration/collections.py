"""Collections as applications make them, through the frameworks' own classes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import chromadb
from chromadb.api.client import Client
from chromadb.config import Settings as ChromaSettings
from langchain_chroma import Chroma
from langchain_core.documents import Document as LangDocument
from langchain_core.embeddings import Embeddings
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import MetadataMode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from tests.tiny import HashEmbedder


def no_telemetry() -> ChromaSettings:
    """Of its own for each client: Chroma writes into it."""
    return ChromaSettings(anonymized_telemetry=False)


_PAGE = 2000  # neither framework keeps to Chroma's limit of 5,461 by itself


class HashEmbeddings(Embeddings):
    """The tests' embedder as LangChain's."""

    model_name = "hash"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return HashEmbedder().embed_documents(texts).tolist()  # type: ignore[no-any-return]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class HashEmbedding(BaseEmbedding):
    """The tests' embedder as LlamaIndex's."""

    model_name: str = "hash"

    def _get_text_embedding(self, text: str) -> list[float]:
        return HashEmbeddings().embed_query(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@contextmanager
def client_of(folder: Path) -> Iterator[chromadb.ClientAPI]:
    client = chromadb.PersistentClient(str(folder), no_telemetry())
    try:
        yield client
    finally:
        cast(Client, client).close()


@contextmanager
def langchain_store(
    folder: Path, embeddings: Embeddings | None = None, name: str = "app"
) -> Iterator[Chroma]:
    """The application's vector store, closed afterwards."""
    with client_of(folder) as client:
        yield Chroma(name, embeddings or HashEmbeddings(), client=client)


@contextmanager
def llamaindex_store(folder: Path, name: str = "app") -> Iterator[ChromaVectorStore]:
    """The application's vector store, closed afterwards."""
    with client_of(folder) as client:
        yield ChromaVectorStore(chroma_collection=client.get_or_create_collection(name))


def fill_langchain(
    folder: Path,
    texts: Sequence[str],
    metadatas: Sequence[dict[str, Any]] | None = None,
    embeddings: Embeddings | None = None,
) -> None:
    documents = [
        LangDocument(id=f"row-{i}", page_content=text, metadata=metadatas[i] if metadatas else {})
        for i, text in enumerate(texts)
    ]
    with langchain_store(folder, embeddings) as store:
        for start in range(0, len(documents), _PAGE):
            store.add_documents(documents[start : start + _PAGE])


def fill_llamaindex(
    folder: Path,
    texts: Sequence[str],
    metadatas: Sequence[dict[str, Any]] | None = None,
    **fields: Any,
) -> None:
    """Nodes of documents `doc-0`, `doc-1` …, two of each."""
    nodes = []
    for i, text in enumerate(texts):
        node = TextNode(
            id_=f"node-{i}",
            text=text,
            metadata=metadatas[i] if metadatas else {},
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc-{i // 2}")},
            **fields,
        )
        node.embedding = HashEmbedding().get_text_embedding(node.get_content(MetadataMode.EMBED))
        nodes.append(node)
    with llamaindex_store(folder) as store:
        for start in range(0, len(nodes), _PAGE):
            store.add(nodes[start : start + _PAGE])


def digests(folder: Path) -> dict[str, str]:
    """Every file of a folder, with a hash of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
