"""A store that was prepared for serving, and requests for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from coinrag_integrations.engine import Engine, EngineConfig, LoadedModel, Text
from coinrag_integrations.serving.checking import Incoming, Texts
from coinrag_integrations.serving.config import ServingConfig
from coinrag_integrations.serving.loading import Loader, open_texts
from coinrag_integrations.serving.writing import PrefixWriter, Written
from coinrag_integrations.types import Chunk, Scope
from tests.tiny import fill

QUESTION = "Who built the organ?"
SENTENCES = "The tidal organ of Marenqué was built by Bastien Roule in 1923. " * 20


def pytest_collection_modifyitems(items) -> None:
    """vLLM's engine in this process comes first: it cannot look into modules of Numba that are in use."""
    items.sort(key=lambda item: item.path.name != "test_offline.py")


@dataclass(frozen=True)
class Served:
    """A filled store of the tiny model, with both sides of serving open over it."""

    engine: Engine
    chunks: list[Chunk]
    writer: PrefixWriter
    config: ServingConfig
    texts: dict[Scope, Texts]
    loader: Loader

    def pieces(self, *refs):
        prompt = self.engine.prompt
        return [Text(prompt.head), *refs, Text(prompt.tail(QUESTION))]

    def written(self, *refs) -> Written:
        return self.writer.write(self.pieces(*refs))

    def incoming(self, *refs, **changes: object) -> Incoming:
        written = self.written(*refs)
        request = Incoming(params=written.params, prompt=written.prompt, salt=written.salt)
        return replace(request, **changes)


@contextmanager
def serving(model: LoadedModel, folder: Path, **options: object) -> Iterator[Served]:
    """Both sides of serving over a new store."""
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read", **options)
    with Engine(model, folder, config) as engine:
        chunks = fill(engine, SENTENCES)
        writer = PrefixWriter.of(engine)
        served = ServingConfig.parse({"store": str(folder)})
        texts, close = open_texts(served, engine.scope)
        loader = Loader.open(served, engine.scope, torch.device("cpu"))
        yield Served(engine, chunks, writer, served, {engine.scope: texts}, loader)
        loader.close()
        close()


@pytest.fixture
def served(model: LoadedModel, tmp_path: Path) -> Iterator[Served]:
    with serving(model, tmp_path / "store") as it:
        yield it


@pytest.fixture
def slotted(model: LoadedModel, tmp_path: Path) -> Iterator[Served]:
    """The same, with C2KV's slots of four tokens."""
    with serving(model, tmp_path / "slotted", c2kv=(4,)) as it:
        yield it
