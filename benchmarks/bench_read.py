"""What reading spans costs, against the bytes it moves. No model: random KV of a real layout.

Rows: `read` (verified spans out of the store) and `pread` (the same bytes, unverified: the floor).
Warm rows find the files in the page cache, cold ones have just had them dropped from it. The last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from layouts import LAYOUTS

from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.evaluation.ttft import Spread, describe_machine
from coinrag_integrations.types import ChunkId, Span, SpanRef

CHUNK = 512
SHAPES = {"spans": (4, 3, 19), "chunks": (4, 1, CHUNK)}  # chunks, spans of each, tokens of each


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="smollm2-135m", choices=sorted(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    layout = LAYOUTS[options.layout]
    results: dict[str, dict[str, Spread]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="coinrag-bench-") as folder,
        KVStore(Path(folder), layout, _fingerprint()) as store,
    ):
        ids = [ChunkId(f"{i:032x}") for i in range(4)]
        for chunk_id in ids:
            kv = torch.randn(layout.staged(CHUNK)).to(layout.dtype)
            store.put(chunk_id, kv, [Span(0, CHUNK)])
        for name, (n_chunks, n_spans, n_tokens) in SHAPES.items():
            step = CHUNK // n_spans
            refs = [
                SpanRef(chunk_id, i * step, i * step + n_tokens)
                for chunk_id in ids[:n_chunks]
                for i in range(n_spans)
            ]
            results[name] = _measure(store, refs, options.rounds)
    for name, rows in results.items():
        for row, spread in rows.items():
            print(f"{name:8}{row:12}{spread.p50:9.2f} ms P50{spread.p99:9.2f} ms P99")
    print(
        json.dumps(
            {
                "layout": options.layout,
                "bytes": {
                    name: c * s * t * layout.bytes_per_entry for name, (c, s, t) in SHAPES.items()
                },
                "ms": {
                    name: {row: [s.p50, s.mean, s.p99] for row, s in rows.items()}
                    for name, rows in results.items()
                },
                "rounds": options.rounds,
                "machine": describe_machine(torch.device("cpu")),
            }
        )
    )


def _measure(store: KVStore, refs: list[SpanRef], rounds: int) -> dict[str, Spread]:
    n_entries, layout = sum(map(len, refs)), store.layout
    staged = torch.empty(layout.staged(n_entries), dtype=layout.dtype)
    rows: dict[str, Callable[[], object]] = {
        "read": lambda: store.read(refs, staged),
        "pread": lambda: _pread(store, refs, staged),
    }
    spreads = {name: Spread.of(_times(step, rounds)) for name, step in rows.items()}
    spreads["read cold"] = Spread.of(
        _times(rows["read"], rounds, before=lambda: _drop_from_cache(store, refs))
    )
    return spreads


def _times(
    step: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    times = []
    for done in range(rounds + 3):
        before()
        begin = time.perf_counter()
        step()
        if done >= 3:
            times.append((time.perf_counter() - begin) * 1e3)
    return times


def _pread(store: KVStore, refs: list[SpanRef], staged: torch.Tensor) -> None:
    row = 0
    for ref in refs:
        rows = staged[row : row + len(ref)].view(torch.uint8).reshape(-1).numpy().data
        file = os.open(store.path(ref.chunk_id), os.O_RDONLY)
        os.preadv(file, [rows], 4096 + ref.start * store.layout.bytes_per_entry)
        os.close(file)
        row += len(ref)


def _drop_from_cache(store: KVStore, refs: list[SpanRef]) -> None:
    for chunk_id in {ref.chunk_id for ref in refs}:
        file = os.open(store.path(chunk_id), os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _fingerprint() -> Fingerprint:
    return Fingerprint(
        weights="random", tokenizer="none", rope="none", layout="", dtype="", context="alone"
    )


if __name__ == "__main__":
    main()
