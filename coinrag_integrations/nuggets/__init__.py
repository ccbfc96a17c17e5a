"""Nuggets: short spans of a chunk that state one fact.

A proposer suggests candidate strings, by rules (`RuleProposer`) or by asking an LLM
(`LLMProposer`). `align` decides which of them stand in the chunk, and where. `extract_nuggets`
does both. Nothing that cannot be pointed at in the source becomes a nugget.
"""

from coinrag_integrations.nuggets.align import Abandoned, Alignment, align, align_ranges
from coinrag_integrations.nuggets.extract import coverage, extract_nuggets
from coinrag_integrations.nuggets.known import KnownNuggets
from coinrag_integrations.nuggets.llm import (
    EXTRACTION_PROMPT,
    LLMProposer,
    extraction_prompt,
    parse_reply,
)
from coinrag_integrations.nuggets.propose import NuggetProposer, RangeProposer
from coinrag_integrations.nuggets.rules import RuleProposer

__all__ = [
    "EXTRACTION_PROMPT",
    "Abandoned",
    "Alignment",
    "KnownNuggets",
    "LLMProposer",
    "NuggetProposer",
    "RangeProposer",
    "RuleProposer",
    "align",
    "align_ranges",
    "coverage",
    "extract_nuggets",
    "extraction_prompt",
    "parse_reply",
]
