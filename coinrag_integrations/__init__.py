"""Answer questions from cached keys and values of the spans that matter.

The engine lives in `coinrag_integrations.engine`, the object most programs need in
`coinrag_integrations.rag`, the framework adapters in `.llamaindex` and `.langchain`. Importing
this package loads neither torch nor a framework.
"""

from __future__ import annotations

from coinrag_integrations import errors
from coinrag_integrations.types import (
    Chunk,
    ChunkId,
    Document,
    Nugget,
    ScoredSpan,
    Span,
    SpanRef,
)

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "ChunkId",
    "Document",
    "Nugget",
    "ScoredSpan",
    "Span",
    "SpanRef",
    "__version__",
    "errors",
]
