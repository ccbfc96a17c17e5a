"""A cross-encoder that reads question and passage together, to order what was retrieved."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coinrag_integrations.errors import ModelError

BGE_RERANKER = "BAAI/bge-reranker-v2-m3"


class CrossEncoder:
    """A reranker of FlagEmbedding. Needs the extra `bge`.

    `model` is a hub name or a local folder with a sequence classifier and its tokenizer.
    """

    def __init__(
        self,
        model: str | Path = BGE_RERANKER,
        *,
        device: str | None = None,
        batch_size: int = 32,
        max_length: int = 512,
    ) -> None:
        """Nothing is loaded before the first question."""
        self.name, self._device = str(model), device
        self._batch_size, self._max_length = batch_size, max_length
        self._lock = threading.Lock()

    def score(self, question: str, texts: Sequence[str]) -> list[float]:
        """How well each text answers the question, from 0 to 1.

        Raises:
            ModelError: the model cannot be loaded.
        """
        if not texts:
            return []
        with self._lock:
            scores = self._model.compute_score(
                [(question, text) for text in texts],
                batch_size=self._batch_size,
                max_length=self._max_length,
                normalize=True,
            )
        return [float(score) for score in np.atleast_1d(scores)]

    @cached_property
    def _model(self) -> Any:
        try:
            from FlagEmbedding import FlagReranker
        except ImportError as error:
            raise ModelError(
                "FlagEmbedding cannot be imported: pip install 'coinrag-integrations[bge]' "
                f"({error})"
            ) from error
        try:
            return FlagReranker(self.name, use_fp16=False, devices=self._device)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"cannot load the reranker {self.name!r}: {error}. Give a local folder, or a hub "
                "name that this machine can reach"
            ) from error
