"""What reading spans costs, against the bytes it moves. No model: random KV of a real layout.

Rows: `read` (verified spans out of the store) and `preadv` (the same ranges of the same files, unverified:
the floor), each warm (the files are in the page cache) and cold (they have just been dropped from it).
The rows take turns, so that a slow moment of the machine meets all of them. The last line of stdout is
one JSON object with P50, mean and P99 of each, and ratios of the medians.
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
from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.engine.store import CODECS, KVStore
from coinrag_integrations.evaluation.ttft import Spread, describe_machine
from coinrag_integrations.types import ChunkId, Span, SpanRef

CHUNK = 512
SHAPES = {"spans": (4, 3, 19), "chunks": (4, 1, CHUNK)}  # chunks, spans of each, tokens of each


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="smollm2-135m", choices=sorted(LAYOUTS))
    parser.add_argument("--codec", default="none", choices=CODECS)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    layout = LAYOUTS[options.layout]
    rows: dict[str, dict[str, Spread]] = {}
    n_bytes: dict[str, int] = {}
    quantise = choose_kernels("auto", torch.device("cpu")).quantise
    with (
        tempfile.TemporaryDirectory(prefix="coinrag-bench-") as folder,
        KVStore(Path(folder), layout, _fingerprint(options.codec), quantise=quantise) as store,
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
            n_bytes[name], rows[name] = _measure(store, refs, options.rounds)
    ratios = {
        name: {
            state: round(spreads[f"read {state}"].p50 / spreads[f"preadv {state}"].p50, 3)
            for state in ("warm", "cold")
        }
        for name, spreads in rows.items()
    }
    for name, spreads in rows.items():
        for row, spread in spreads.items():
            print(f"{name:8}{row:14}{spread.p50:9.2f} ms P50{spread.p99:9.2f} ms P99")
        print(f"{name:8}read over preadv: {ratios[name]}")
    print(
        json.dumps(
            {
                "layout": options.layout,
                "codec": options.codec,
                "bytes": n_bytes,
                "ratios": ratios,
                "ms": {
                    name: {row: [s.p50, s.mean, s.p99] for row, s in spreads.items()}
                    for name, spreads in rows.items()
                },
                "rounds": options.rounds,
                "machine": describe_machine(torch.device("cpu")),
            }
        )
    )


def _measure(store: KVStore, refs: list[SpanRef], rounds: int) -> tuple[int, dict[str, Spread]]:
    stage = store.stage(refs)
    ranges = _ranges(store, refs)
    steps: dict[str, Callable[[], object]] = {
        "read": lambda: store.read(stage),
        "preadv": lambda: _preadv(ranges),
    }
    times: dict[str, list[float]] = {}
    for done in range(rounds + 3):
        for state in ("warm", "cold"):
            for name, step in steps.items():
                if state == "cold":
                    _drop_from_cache(store, refs)
                else:
                    step()
                begin = time.perf_counter()
                step()
                if done >= 3:
                    spent = (time.perf_counter() - begin) * 1e3
                    times.setdefault(f"{name} {state}", []).append(spent)
    n_bytes = sum(len(buffer) for _, _, buffer in ranges)
    return n_bytes, {row: Spread.of(values) for row, values in times.items()}


def _ranges(store: KVStore, refs: list[SpanRef]) -> list[tuple[Path, int, memoryview]]:
    """File, offset and room of every range that `read` reads for these spans."""
    found, stage = [], store.stage(refs)
    for index, ref in enumerate(refs):
        header = store.header(ref.chunk_id)
        for part, rows, target in stage.targets(index, header.rows(Span(ref.start, ref.stop))):
            offset = header.parts[part.name].offset + rows.start * part.row_bytes
            found.append((store.path(ref.chunk_id), offset, memoryview(target.reshape(-1))))
    return found


def _preadv(ranges: list[tuple[Path, int, memoryview]]) -> None:
    for path, offset, buffer in ranges:
        file = os.open(path, os.O_RDONLY)
        os.preadv(file, [buffer], offset)
        os.close(file)


def _drop_from_cache(store: KVStore, refs: list[SpanRef]) -> None:
    for chunk_id in {ref.chunk_id for ref in refs}:
        file = os.open(store.path(chunk_id), os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _fingerprint(codec: str) -> Fingerprint:
    return Fingerprint(
        weights="random",
        tokenizer="none",
        rope="none",
        layout="",
        dtype="",
        context="alone",
        codec=codec,
    )


if __name__ == "__main__":
    main()
