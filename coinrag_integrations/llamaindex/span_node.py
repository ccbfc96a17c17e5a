"""A retrieved span as a node that shows LLMs its handle, and everybody else its words."""

from __future__ import annotations

from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import MetadataMode, TextNode

from coinrag_integrations.engine import mark


class SpanNode(TextNode):
    """The exact words of a span. What an LLM is given carries the span's handle.

    Embedding models, rerankers, citations and people see the words alone. A node that is stored
    somewhere comes back as a `TextNode`, which is read as text.
    """

    handle: str = Field(default="", description="Stands in front of the words in prompts.")

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        """The words, with metadata and handle as the mode asks."""
        if metadata_mode != MetadataMode.LLM or not self.handle:
            return super().get_content(metadata_mode)
        # Marked first: LlamaIndex strips what it puts together, and words may end in white space.
        marked = {"text": mark(self.handle, self.text), "handle": ""}
        return self.model_copy(update=marked).get_content(metadata_mode)
