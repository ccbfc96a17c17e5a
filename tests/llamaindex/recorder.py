"""Keeps the events that LlamaIndex is told of."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent


class Recorder(BaseEventHandler):
    """Their names, and themselves."""

    names: list[str] = []  # noqa: RUF012  (a pydantic field)
    events: list[Any] = []  # noqa: RUF012

    @classmethod
    def class_name(cls) -> str:
        return "Recorder"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        self.names.append(event.class_name())
        self.events.append(event)
