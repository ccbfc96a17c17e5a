"""What every test shares: a tiny model once a session, fresh stores, and no network but loopback."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from coinrag_integrations.engine import Engine, EngineConfig, LoadedModel
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex, open_client
from tests.chroma_server import serving
from tests.commands import Run, runner
from tests.tiny import HashEmbedder, tiny_model

# CI runs the same examples every time; elsewhere every run looks at new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")

# A tiny model gains nothing from threads, and pays for waking them.
torch.set_num_threads(1)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a test starts heeds SIGINT: a shell has its background jobs, and all below them, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _only_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches out fails, instead of passing only where there is a network."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOOPBACK:
            raise OSError(f"tests have no network: tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    """A random fp32 Llama of three layers."""
    return tiny_model()


@pytest.fixture
def engine(model: LoadedModel, tmp_path: Path) -> Iterator[Engine]:
    """An engine over an empty store; chunks of 32 tokens, every token kept."""
    # What was stored is read, also where this machine is so busy that encoding would be faster.
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read")
    with Engine(model, tmp_path / "store", config) as it:
        yield it


@pytest.fixture
def rag(engine: Engine) -> CoinRAG:
    """An empty CoinRAG over the engine, with Chroma in memory."""
    index = SpanIndex(open_client(None), HashEmbedder(), f"t{uuid4().hex}")
    return CoinRAG(engine, index)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command of ours."""
    return runner(monkeypatch, capsys)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A Chroma server in a process of its own: its address, and a way to end it."""
    with serving(tmp_path / "s") as it:
        yield it
