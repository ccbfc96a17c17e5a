"""Measuring answers, the time they take, what codecs cost, and what a store would."""

from __future__ import annotations

from coinrag_integrations.evaluation.codecs import CodecReport, measure_codecs
from coinrag_integrations.evaluation.estimate import Estimate
from coinrag_integrations.evaluation.injection import InjectionReport, measure_injection
from coinrag_integrations.evaluation.metrics import contains_answer, token_f1
from coinrag_integrations.evaluation.trial import estimate_store
from coinrag_integrations.evaluation.ttft import TTFTReport, measure_ttft

__all__ = [
    "CodecReport",
    "Estimate",
    "InjectionReport",
    "TTFTReport",
    "contains_answer",
    "estimate_store",
    "measure_codecs",
    "measure_injection",
    "measure_ttft",
    "token_f1",
]
