"""C2KV (arXiv 2607.17715): one cached entry, a slot, for every k tokens of a document."""

from __future__ import annotations

from coinrag_integrations.engine.c2kv.blocks import Blocks
from coinrag_integrations.engine.c2kv.extraction import SlotEncoder
from coinrag_integrations.engine.c2kv.extractor import Extractor

__all__ = ["Blocks", "Extractor", "SlotEncoder"]
