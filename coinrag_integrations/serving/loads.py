"""Prefixes on their way into a paged cache: loaded by threads, written by the server's own thread.

Threads read and place; the blocks are written in `step`, between two steps of the model, so that no
backend's cache is touched while the model reads it. Whatever happens to one prefix, the others do not
notice. Imports no vllm.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from coinrag_integrations.serving.checking import Injection
from coinrag_integrations.serving.loading import Loader, Rows
from coinrag_integrations.serving.paged import Share, slots_of, write_rows
from coinrag_integrations.types import Scope

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The rows `[start, N)` of a request's prefix, for its `blocks`; no injection: the request fails."""

    request_id: str
    injection: Injection | None
    start: int = 0
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A request whose prefix is there, or (`error`) will not be."""

    request_id: str
    error: str = ""
    n_rows: int = 0
    bytes_read: int = 0
    load_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(kw_only=True)
class Loads:
    """What one process is loading. All methods are for one thread."""

    loaders: Mapping[Scope, Loader]
    block_size: int
    n_threads: int
    share: Share
    _pool: ThreadPoolExecutor = field(init=False)
    _under_way: dict[str, tuple[Order, Future[Rows] | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Have threads, which start when there is something to do."""
        self._pool = ThreadPoolExecutor(self.n_threads, thread_name_prefix="coinrag-load")

    def start(self, orders: Sequence[Order]) -> None:
        """Begin to load."""
        for order in orders:
            future = None
            if order.injection is not None:
                future = self._pool.submit(self._load, order.injection, order.start)
            self._under_way[order.request_id] = (order, future)

    def step(self) -> list[Landed]:
        """Write what has been loaded since the last call, and say how it went. Never raises."""
        done = [it for it in self._under_way.values() if it[1] is None or it[1].done()]
        landed = []
        for order, future in done:
            del self._under_way[order.request_id]
            landed.append(self._land(order, future))
        return landed

    def close(self) -> None:
        """Wait for what is being read, and close the files."""
        self._pool.shutdown(cancel_futures=True)
        for loader in self.loaders.values():
            loader.close()

    def _load(self, injection: Injection, start: int) -> Rows:
        return self.loaders[injection.scope].load(injection, start)

    def _land(self, order: Order, future: Future[Rows] | None) -> Landed:
        if future is None:
            return Landed(request_id=order.request_id, error="refused")
        try:
            rows = future.result()
            begin = time.perf_counter()
            n = rows.kv.shape[3]
            slots = slots_of(order.blocks, self.block_size, range(order.start, order.start + n))
            write_rows(self.share, rows.kv, slots)
        except Exception as error:  # noqa: BLE001 - an exception here would end the whole server
            logger.warning(
                "request %s fails: its prefix cannot be loaded: %s", order.request_id, error
            )
            return Landed(request_id=order.request_id, error=f"{type(error).__name__}: {error}")
        return Landed(
            request_id=order.request_id,
            n_rows=n,
            bytes_read=rows.bytes_read,
            load_seconds=rows.seconds,
            write_seconds=time.perf_counter() - begin,
        )
