"""Looking after a store: check it, remove what nobody needs, change its codec. Loads no model.

`repair` alone needs an open `CoinRAG`: what is lost is encoded and indexed again from the stored texts.
"""

from __future__ import annotations

from coinrag_integrations.maintenance.checking import ScopeReport, VariantReport, repair, verify
from coinrag_integrations.maintenance.converting import convert
from coinrag_integrations.maintenance.removing import (
    collect_garbage,
    delete_documents,
    set_limits,
)

__all__ = [
    "ScopeReport",
    "VariantReport",
    "collect_garbage",
    "convert",
    "delete_documents",
    "repair",
    "set_limits",
    "verify",
]
