"""Codes against raw entries with the real model: bytes and likelihood, as ratios.

`COINRAG_EVAL_DATA` may name a folder of .jsonl files; without it, the demo's questions are asked.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from coinrag_integrations.demo.model import ensure_demo_model
from coinrag_integrations.engine import load_model
from coinrag_integrations.evaluation.codecs import measure_codecs
from coinrag_integrations.evaluation.data import demo_examples, read_examples
from coinrag_integrations.retrieval.embedders import MiniLMEmbedder
from tests.faults import Scale

N_QUESTIONS = {"short": 4, "full": 100}


def run(scale: Scale) -> dict[str, Any]:
    """Ratios to raw of bytes (of a whole chunk) and of nats a token, by codec."""
    n = N_QUESTIONS[scale]
    folder = os.environ.get("COINRAG_EVAL_DATA")
    files = sorted(Path(folder).glob("*.jsonl")) if folder else []
    examples = read_examples(files, n) if files else demo_examples(n)
    report = measure_codecs(load_model(ensure_demo_model()), examples, MiniLMEmbedder())
    return {
        "codec": {
            name: {"bytes": result.full_bytes_ratio, "nll": result.nll_ratio}
            for name, result in report.codecs.items()
            if name != "raw"
        }
    }
