"""A cross-encoder that reads question and passage together, to order what was retrieved."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coinrag_integrations.retrieval.flag import load_flag_model

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
        return load_flag_model("FlagReranker", self.name, self._device)
