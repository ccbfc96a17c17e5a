"""TTFT of all ways to answer, on the same chunks: what each reads, and that its parts are there."""

from __future__ import annotations

import json

import pytest

from coinrag_integrations.engine import EngineConfig
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation import measure_ttft
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document
from tests.tiny import HashEmbedder

TEXTS = [f"The {name} organ was built in 18{i}0. " * 4 for i, name in enumerate("abcdef")]
QUESTIONS = ["Who built the a organ?", "When was the c organ built?", "What is d?"]


@pytest.fixture
def rag(model, tmp_path):
    config = EngineConfig(chunk_tokens=64, coverage="all", c2kv=(4, 8), load="read")
    options = {"embedder": HashEmbedder(), "config": config, "extractor": "untrained"}
    with CoinRAG.open(tmp_path, model=model, **options) as rag:
        rag.add([Document(document_id=str(i), text=text) for i, text in enumerate(TEXTS)])
        yield rag


def test_every_way_reads_what_it_stands_for(rag):
    report = measure_ttft(rag, QUESTIONS, n_chunks=4, n_nuggets=3, full_size=False, n_warmup=1)
    methods = report.methods
    assert list(methods) == ["full", "chunk", "spans", "c2kv:4", "c2kv:8", "hybrid:4"]
    assert report.n == 3
    n_bytes = rag.engine.model.layout.bytes_per_entry
    for name, method in methods.items():
        assert method.ttft_ms.p50 > 0
        assert set(report.parts_ms[name]) == {"load", "compose", "prefill"}
        assert method.bytes_read == (0 if name == "full" else method.entries * n_bytes)
    whole = methods["chunk"].entries
    for ratio in (4, 8):
        fewer = methods[f"c2kv:{ratio}"].entries
        assert whole / ratio <= fewer < whole / ratio + 4  # a short last block a chunk
    assert methods["c2kv:4"].entries < methods["hybrid:4"].entries < whole
    assert report.spans_breakdown_ms == report.parts_ms["spans"]
    json.dumps(report.to_dict())


def test_whole_chunks_have_to_be_there(rag):
    with pytest.raises(ConfigError, match="chunks of 64 tokens"):
        measure_ttft(rag, QUESTIONS, n_chunks=40)
    with pytest.raises(ConfigError, match="no questions"):
        measure_ttft(rag, [])
