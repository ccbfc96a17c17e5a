"""A LangChain document compressor that orders documents by a cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor
from langchain_core.documents import Document as LangDocument
from pydantic import ConfigDict, Field, PrivateAttr

from coinrag_integrations.langchain._convert import text_of
from coinrag_integrations.retrieval import CrossEncoder
from coinrag_integrations.retrieval.rerank import BGE_RERANKER

RERANK_SCORE = "coinrag_rerank_score"


class CoinRAGRerank(BaseDocumentCompressor):
    """Keeps the documents that FlagEmbedding's cross-encoder puts first. Needs the extra `bge`.

    It reads documents without their handles and gives them back with them;
    `metadata["coinrag_rerank_score"]` is its score, from 0 to 1.

        >>> ContextualCompressionRetriever(
        ...     base_compressor=CoinRAGRerank(top_n=5), base_retriever=CoinRAGRetriever(rag=rag, k=20)
        ... )
    """

    model_config = ConfigDict(extra="forbid")

    model: str = BGE_RERANKER
    top_n: int = Field(default=5, gt=0)
    device: str | None = None
    _encoder: CrossEncoder = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Nothing is loaded before the first question."""
        self._encoder = CrossEncoder(self.model, device=self.device)

    def compress_documents(
        self,
        documents: Sequence[LangDocument],
        query: str,
        callbacks: Callbacks = None,
    ) -> Sequence[LangDocument]:
        """The best documents for a question, best first; those given are left as they are.

        Raises:
            ModelError: the cross-encoder cannot be loaded.
        """
        scores = self._encoder.score(query, [text_of(document) for document in documents])
        ranked = sorted(zip(scores, documents, strict=True), key=lambda it: -it[0])
        return [
            document.model_copy(update={"metadata": {**document.metadata, RERANK_SCORE: score}})
            for score, document in ranked[: self.top_n]
        ]
