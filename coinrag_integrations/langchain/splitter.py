"""A LangChain text splitter whose pieces are the store's own chunks, with their nuggets."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Self

from langchain_core.documents import Document as LangDocument
from langchain_text_splitters import TextSplitter

from coinrag_integrations.engine import Engine
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain._convert import document_id_of, document_of_chunk
from coinrag_integrations.nuggets import NuggetProposer, extract_nuggets
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document


class NuggetTextSplitter(TextSplitter):
    """Cuts documents into the chunks that a store would make of them.

    Joined, the pieces of a text are the text. A piece's id is the chunk's id, `start_index` its
    exact place in the document, and its nuggets are in the metadata.

        >>> pieces = NuggetTextSplitter.from_rag(rag).split_documents(documents)
    """

    def __init__(self, engine: Engine, proposer: NuggetProposer) -> None:
        """Prefer `from_rag`."""
        super().__init__(
            chunk_size=engine.config.chunk_tokens,
            chunk_overlap=0,
            length_function=lambda text: len(engine.model.tokenizer.encode(text).ids),
            add_start_index=True,
            strip_whitespace=False,
        )
        self._engine, self._proposer = engine, proposer

    @classmethod
    def from_rag(cls, rag: CoinRAG) -> Self:
        """A splitter with the tokenizer, the chunk size and the proposer of `rag`."""
        return cls(rag.engine, rag.proposer)

    def split_text(self, text: str) -> list[str]:
        """The texts of the chunks, in order."""
        return [chunk.text for chunk in self._engine.chunk(Document(document_id="", text=text))]

    def create_documents(
        self, texts: list[str], metadatas: list[dict[Any, Any]] | None = None
    ) -> list[LangDocument]:
        """The chunks of texts, as documents.

        Raises:
            ConfigError: there are not as many metadatas as texts.
        """
        if metadatas is not None and len(metadatas) != len(texts):
            raise ConfigError(f"got {len(texts)} texts and {len(metadatas)} metadatas")
        return self.split_documents(
            LangDocument(page_content=text, metadata=metadata)
            for text, metadata in zip(texts, metadatas or [{}] * len(texts), strict=True)
        )

    def split_documents(self, documents: Iterable[LangDocument]) -> list[LangDocument]:
        """The chunks of documents, as documents with a copy of their metadata."""
        return [piece for document in documents for piece in self._split(document)]

    def _split(self, document: LangDocument) -> list[LangDocument]:
        whole = Document(document_id=document_id_of(document), text=document.page_content)
        return [
            document_of_chunk(
                extract_nuggets(chunk, self._proposer), copy.deepcopy(document.metadata)
            )
            for chunk in self._engine.chunk(whole)
        ]
