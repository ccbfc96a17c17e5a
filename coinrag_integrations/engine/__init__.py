"""KV extraction, storage, composition and generation. Knows no database and no framework."""

from __future__ import annotations

from coinrag_integrations.engine.answer import Answer, AnswerStream, Usage
from coinrag_integrations.engine.config import EngineConfig
from coinrag_integrations.engine.engine import Engine
from coinrag_integrations.engine.generation import GenerationConfig
from coinrag_integrations.engine.handles import mark, split_marked, strip_handles
from coinrag_integrations.engine.messages import Message
from coinrag_integrations.engine.model import LoadedModel, describe_model, load_model
from coinrag_integrations.engine.plan import Text
from coinrag_integrations.engine.prompt import PromptTemplate
from coinrag_integrations.engine.store import Catalog, KVStore
from coinrag_integrations.engine.timings import Timings
from coinrag_integrations.engine.tool_calls import CallReader, Parsed, ToolCall, parse_calls

__all__ = [
    "Answer",
    "AnswerStream",
    "CallReader",
    "Catalog",
    "Engine",
    "EngineConfig",
    "GenerationConfig",
    "KVStore",
    "LoadedModel",
    "Message",
    "Parsed",
    "PromptTemplate",
    "Text",
    "Timings",
    "ToolCall",
    "Usage",
    "describe_model",
    "load_model",
    "mark",
    "parse_calls",
    "split_marked",
    "strip_handles",
]
