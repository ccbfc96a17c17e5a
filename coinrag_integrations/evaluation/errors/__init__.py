"""Why answers are wrong: what was found for each question, classes of errors, a page to look at."""

from __future__ import annotations

from coinrag_integrations.evaluation.errors.classes import ERRORS, Case, Finding, Reading
from coinrag_integrations.evaluation.errors.evidence import EVIDENCE, Evidence, read_evidence
from coinrag_integrations.evaluation.errors.judged import ErrorReport, judge
from coinrag_integrations.evaluation.errors.page import render_page

__all__ = [
    "ERRORS",
    "EVIDENCE",
    "Case",
    "ErrorReport",
    "Evidence",
    "Finding",
    "Reading",
    "judge",
    "read_evidence",
    "render_page",
]
