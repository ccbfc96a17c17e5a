"""What both of LangChain's models need to let a server answer."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, PrivateAttr

from coinrag_integrations.engine import AnswerStream
from coinrag_integrations.serving.answering import Answering
from coinrag_integrations.serving.client import ServedStream

Stream = AnswerStream | ServedStream


class Served(BaseModel):
    """Fields of a model that may run in a vLLM server: its address, key, and name for the model."""

    base_url: str | None = None
    api_key: str | None = Field(default=None, exclude=True, repr=False)
    served_model: str | None = None
    _answering: Answering = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Know who answers."""
        super().model_post_init(context)
        self._answering = Answering(self.base_url, self.api_key, self.served_model)
