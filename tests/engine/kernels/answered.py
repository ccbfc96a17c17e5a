"""The same question through every implementation of the kernels; print one JSON object.

A program of its own: `TRITON_INTERPRET` must be set before a kernel is defined. Not a test module.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.engine.kernels import choose_kernels
from tests.tiny import fill, supported_model

FAMILIES = ("llama", "gemma3", "glm4", "smollm3")


def answers(family: str) -> dict[str, object]:
    """Texts, and how far the prefixes are from that of the reference."""
    texts, prefixes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for kernels in ("torch", "numba", "triton"):
            config = EngineConfig(chunk_tokens=32, coverage="all", kernels=kernels)
            with Engine(supported_model(family), Path(folder), config) as engine:
                assert engine.kernels.name == kernels
                refs = [chunk.ref() for chunk in fill(engine)]
                prefixes[kernels] = engine.compose(refs)[0].kv
                texts[kernels] = engine.answer("Who built it?", refs).text
    return {
        "texts": texts,
        "furthest": max(float((kv - prefixes["torch"]).abs().max()) for kv in prefixes.values()),
    }


if __name__ == "__main__":
    found = {family: answers(family) for family in FAMILIES}
    auto = choose_kernels("auto", torch.device("cpu")).name
    json.dump({"auto": auto, "families": found}, sys.stdout)
