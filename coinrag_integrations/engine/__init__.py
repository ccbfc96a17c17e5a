"""KV extraction, storage, composition and generation. Knows no database and no framework."""

from __future__ import annotations

from coinrag_integrations.engine.answer import Answer, AnswerStream, Usage
from coinrag_integrations.engine.chat import Message
from coinrag_integrations.engine.config import EngineConfig
from coinrag_integrations.engine.engine import Engine
from coinrag_integrations.engine.generation import GenerationConfig
from coinrag_integrations.engine.handles import mark, split_marked, strip_handles
from coinrag_integrations.engine.model import LoadedModel, describe_model, load_model
from coinrag_integrations.engine.plan import Text
from coinrag_integrations.engine.prompt import PromptTemplate
from coinrag_integrations.engine.store import Catalog, KVStore
from coinrag_integrations.engine.timings import Timings

__all__ = [
    "Answer",
    "AnswerStream",
    "Catalog",
    "Engine",
    "EngineConfig",
    "GenerationConfig",
    "KVStore",
    "LoadedModel",
    "Message",
    "PromptTemplate",
    "Text",
    "Timings",
    "Usage",
    "describe_model",
    "load_model",
    "mark",
    "split_marked",
    "strip_handles",
]
