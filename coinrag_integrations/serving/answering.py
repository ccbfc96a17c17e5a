"""Who answers for a store: its own engine, or a server that runs its model."""

from __future__ import annotations

import threading
from typing import Any

from coinrag_integrations.engine import Engine
from coinrag_integrations.serving.client import ServedModel


class Answering:
    """The engine itself, or the server at `base_url`, reached once. Copies are the same."""

    def __init__(
        self, base_url: str | None, api_key: str | None = None, model: str | None = None
    ) -> None:
        """Nothing is reached yet."""
        self._base_url, self._api_key, self._model = base_url, api_key, model
        self._served: ServedModel | None = None
        self._lock = threading.Lock()

    def of(self, engine: Engine) -> Engine | ServedModel:
        """Who answers for an engine's store.

        Raises:
            StoreError: what the server needs cannot be written into the store.
        """
        if self._base_url is None:
            return engine
        with self._lock:
            if self._served is None:
                options = {"api_key": self._api_key, "model": self._model}
                self._served = ServedModel.of(engine, self._base_url, **options)
            return self._served

    def __deepcopy__(self, _: object) -> Answering:
        """The same: connections are shared."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """What to reach, but no connection."""
        return (Answering, (self._base_url, self._api_key, self._model))
