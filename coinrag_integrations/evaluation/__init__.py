"""Measuring answers and the time they take."""

from __future__ import annotations

from coinrag_integrations.evaluation.metrics import contains_answer, token_f1
from coinrag_integrations.evaluation.ttft import TTFTReport, measure_ttft

__all__ = ["TTFTReport", "contains_answer", "measure_ttft", "token_f1"]
