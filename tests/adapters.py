"""What the tests of both framework adapters share: texts, a slow embedder, a ticker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from coinrag_integrations.rag import CoinRAG, Reply, ReplyStream
from coinrag_integrations.retrieval import Embedder, RetrievalConfig

T = TypeVar("T")

QUESTION = "Who built the tidal organ of Marenqué?"
TEXTS = {
    "organ": (
        "The tidal organ of Marenqué was built by Bastien Roule in 1923. It has copper pipes. "
        "The tidal organ of Marenqué was built by Bastien Roule in 1923. The tide plays it."
    ),
    "café": (
        "Café Zoé 🫖 opens at noon — naïve visitors wait. 灯台は白い。港は静かです。 "
        "The e\u0301 in cafe\u0301 is two characters {here}, and 👩‍👩‍👧 is five.\n\n  Last line.  "
    ),
    "wheel": "".join(f"Wheel number {i} turns {3 * i} times a day. " for i in range(9)),
    "light": "The lighthouse of Sorn is white. It was painted in 1951 by Ada Quill, a sailor.",
}
# Looks into every chunk: of chunks that are equally near, Chroma returns an arbitrary few.
WIDE = RetrievalConfig(n_chunks=32, n_nuggets=10)
# One text after another that could be taken for the one before.
REPEATED = "Round and round goes the wheel." + " the tidal wheel" * 60
FIRST = "Bastien Roule built the organ of Marenqué, and Ada Quill painted the lighthouse of Sorn."


class SlowEmbedder:
    """An embedder that takes 0.2 s a question, as one behind a network may."""

    def __init__(self, inner: Embedder) -> None:
        self.inner, self.embedder_id = inner, inner.embedder_id

    def embed_documents(self, texts: Sequence[str]) -> np.ndarray:
        return self.inner.embed_documents(texts)

    def embed_query(self, text: str) -> np.ndarray:
        time.sleep(0.2)
        return self.inner.embed_query(text)


class WatchedStream:
    """A reply's stream that takes 30 ms a piece, and notes whether it was closed."""

    def __init__(self, inner: ReplyStream) -> None:
        self.inner, self.n_pieces, self.closed = inner, 0, False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        time.sleep(0.03)
        piece = next(self.inner)
        self.n_pieces += 1
        return piece

    def close(self) -> None:
        self.inner.close()
        self.closed = True

    @property
    def reply(self) -> Reply:
        return self.inner.reply


def watch_streams(rag: CoinRAG, monkeypatch: pytest.MonkeyPatch) -> list[WatchedStream]:
    """Every stream that `rag` opens from now on."""
    streams: list[WatchedStream] = []
    original = rag.stream_spans

    def watched(*args: Any, **options: Any) -> WatchedStream:
        streams.append(WatchedStream(original(*args, **options)))
        return streams[-1]

    monkeypatch.setattr(rag, "stream_spans", watched)
    return streams


def assert_stopped(streams: list[WatchedStream], at: int = 1) -> None:
    """One stream was opened, and closed after `at` of its pieces."""
    (stream,) = streams
    assert (stream.n_pieces, stream.closed) == (at, True)
    assert list(stream) == []


async def cancel_after_first_piece(
    work: Coroutine[Any, Any, object], streams: list[WatchedStream]
) -> None:
    """Cancel `work` while its second piece is computed, and see the generation stop."""
    task = asyncio.create_task(work)
    while not streams or streams[0].n_pieces < 1:
        assert not task.done(), task.result()
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.2)
    assert_stopped(streams, at=streams[0].n_pieces)
    assert streams[0].n_pieces <= 3


async def ticks_during(work: Awaitable[T]) -> tuple[T, int]:
    """The result of `work`, and how often a 10 ms ticker came to run meanwhile."""
    n = 0

    async def tick() -> None:
        nonlocal n
        while True:
            await asyncio.sleep(0.01)
            n += 1

    ticker = asyncio.create_task(tick())
    try:
        return await work, n
    finally:
        ticker.cancel()


async def leaving_the_loop_free(work: Awaitable[T]) -> T:
    """The result of `work`, which takes a while, and beside which the event loop goes on."""
    begin = time.perf_counter()
    result, ticks = await ticks_during(work)
    spent = time.perf_counter() - begin
    assert spent > 0.1, "too short to tell"
    assert ticks >= 0.5 * spent / 0.01 - 2
    return result


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )


def import_without(blocked: str, package: str) -> str:
    """The message of the ImportError that importing `package` raises when `blocked` is missing."""
    done = run_python(f"""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == {blocked!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Blocker())
        try:
            import {package}
        except ImportError as error:
            print(type(error).__name__, error)
    """)
    assert done.returncode == 0, done.stderr
    return done.stdout
