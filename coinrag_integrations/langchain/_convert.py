"""LangChain documents to and from spans and chunks, and its embeddings and models as we call them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.documents import Document as LangDocument
from langchain_core.embeddings import Embeddings
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable

from coinrag_integrations import _adapters
from coinrag_integrations.engine import mark, strip_handles
from coinrag_integrations.engine.handles import CLOSE
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.retrieval.embedders import Vectors, unit_vectors
from coinrag_integrations.types import Chunk, Document, Nugget, ScoredSpan


def document_of(span: ScoredSpan, handle: str = "") -> LangDocument:
    """A retrieved span as a document: its exact text behind its handle, its triple and its score."""
    return LangDocument(
        id=_adapters.span_id(span.ref),
        page_content=mark(handle, span.text),
        metadata={**_adapters.span_metadata(span), _adapters.SCORE: span.score},
    )


def span_of(document: LangDocument) -> ScoredSpan:
    """The span that a document of our retriever or splitter stands for.

    Raises:
        ConfigError: the document is not ours, or its text was changed.
    """
    score = float(document.metadata.get(_adapters.SCORE, 0.0))
    return _adapters.read_span(document.metadata, text_of(document), _owner(document), score)


def context_of(document: LangDocument) -> ScoredSpan | str:
    """The span that a document stands for; the text of any other document."""
    score = float(document.metadata.get(_adapters.SCORE, 0.0))
    return _adapters.span_or_text(document.metadata, text_of(document), _owner(document), score)


def text_of(document: LangDocument) -> str:
    """A document's words, without the handle around them; words that look like one are kept."""
    content, expected = document.page_content, document.metadata.get("coinrag_digest")
    for words in (content, content.partition("\u27e7")[2].removesuffix(CLOSE)):
        if _adapters.digest(words) == expected:
            return words
    return strip_handles(content)


def document_of_chunk(chunk: Chunk, metadata: dict[str, Any]) -> LangDocument:
    """A chunk with its nuggets as a document; `metadata` is that of the document it is cut from."""
    own = {**_adapters.chunk_metadata(chunk), "start_index": chunk.char_start}
    return LangDocument(id=chunk.chunk_id, page_content=chunk.text, metadata={**metadata, **own})


def nuggets_of(document: LangDocument) -> tuple[Nugget, ...]:
    """The nuggets of a document of our splitter; their characters count from its text.

    Raises:
        ConfigError: the document carries none.
    """
    return _adapters.read_nuggets(document.metadata, document.page_content, _owner(document))


def document_id_of(document: LangDocument) -> str:
    """The document's id; else its source, with the page if it has one; else a hash of its text."""
    if document.id:
        return document.id
    source, page = document.metadata.get("source"), document.metadata.get("page")
    if source:
        return str(source) if page is None else f"{source}#{page}"
    text = document.page_content.encode("utf-8", "surrogatepass")
    return f"sha256:{hashlib.sha256(text).hexdigest()[:32]}"


def read_document(document: LangDocument) -> Document:
    """A LangChain document as one of ours.

    Raises:
        DocumentError: a metadata value that cannot be stored.
    """
    document_id = document_id_of(document)
    return Document(
        document_id=document_id,
        text=document.page_content,
        metadata=_adapters.flat_metadata(document.metadata, document_id),
    )


class LangChainEmbedder:
    """LangChain embeddings as an `Embedder`."""

    def __init__(self, embeddings: Embeddings, embedder_id: str | None = None) -> None:
        """`embedder_id` is made of class and model name if it is not given.

        Raises:
            ConfigError: the embeddings do not say their model, so indexes could be mixed up.
        """
        kind = type(embeddings).__name__
        model = getattr(embeddings, "model_name", None) or getattr(embeddings, "model", None)
        if embedder_id is None and not isinstance(model, str):
            raise ConfigError(
                f"{kind} has neither model_name nor model: give embedder_id, a name that changes "
                "whenever its vectors do"
            )
        self._embeddings = embeddings
        self.embedder_id = embedder_id or f"{kind}:{model}"

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """One unit vector a text: [n, d]."""
        return unit_vectors(self._embeddings.embed_documents(list(texts)))

    def embed_query(self, text: str) -> Vectors:
        """The question's unit vector: [d]."""
        return unit_vectors([self._embeddings.embed_query(text)])[0]  # type: ignore[no-any-return]  # numpy indexing


def complete_with(model: Runnable[Any, Any]) -> Callable[[str], str]:
    """A chat model, LLM or chain from text to text as the function that `LLMProposer` calls."""

    def complete(prompt: str) -> str:
        reply = model.invoke(prompt)
        return str(reply.text) if isinstance(reply, BaseMessage) else reply

    return complete


def _owner(document: LangDocument) -> str:
    return f"document {document.id or text_of(document)[:40]!r}"
