"""Engines that several test modules only ask: made once for a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.types import Chunk
from tests.tiny import SUPPORTED, fill, supported_model


@pytest.fixture(scope="module")
def engines(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Engine, list[Chunk]]]]:
    """For each family an engine, and four chunks that its store holds whole."""
    config = EngineConfig(chunk_tokens=32, coverage="all", kernels="torch")
    made = {}
    for name in SUPPORTED:
        engine = Engine(supported_model(name), tmp_path_factory.mktemp(name), config)
        made[name] = (engine, fill(engine, "One two three four five six seven. " * 9)[:4])
    yield made
    for engine, _ in made.values():
        engine.close()
