"""What the tests of stores with slots share: a model and its extractor as folders, documents, a way in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from coinrag_integrations.demo.data import demo_documents
from coinrag_integrations.engine import EngineConfig, GenerationConfig, load_model
from coinrag_integrations.engine.c2kv.extractor import save_extractor
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig
from tests.engine.c2kv.parts import trained
from tests.tiny import HashEmbedder, save_tiny

# What was stored is read, also where this machine is so busy that encoding would be faster.
CONFIG = EngineConfig(chunk_tokens=64, coverage="all", c2kv=(4,), load="read")
PLAIN = replace(CONFIG, c2kv=())
DOCUMENTS = demo_documents()[:3]
QUESTION = DOCUMENTS[1].text[:60]
WIDE = RetrievalConfig(n_chunks=4, n_nuggets=5)
FORMS = ("spans", "chunks", "c2kv", "hybrid", "slots", "background")


def save_both(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """A tiny model, and an extractor of random weights for it."""
    model = save_tiny(folder / "model", seed=seed)
    extractor = folder / "extractor"
    extractor.mkdir()
    save_extractor(extractor, trained(load_model(model)), {})
    return model, extractor


def opened(folder: Path, **options: object) -> CoinRAG:
    """A store whose embedder is known by the name that stores remember."""
    rag = CoinRAG.open(folder, **options)  # type: ignore[arg-type]
    rag.generation = GenerationConfig(max_new_tokens=4)
    assert isinstance(rag.index.embedder, HashEmbedder)
    return rag
