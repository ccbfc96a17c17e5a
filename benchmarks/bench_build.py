"""How fast a store is built, against the model's raw forward pass over the same chunks.

Rows: `raw` (the model's body over the same batches, keeping nothing), `encode` (keys captured), `store`
(captured and written, checksummed, synced), `add` (everything: chunking, nuggets, embedding, Chroma).
The last line of stdout is one JSON object. Each round runs every row; the ratio is of medians.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from coinrag_integrations.demo.data import demo_documents
from coinrag_integrations.engine import EngineConfig, load_model
from coinrag_integrations.engine.encoder import batches
from coinrag_integrations.engine.store.format import FORMAT_VERSION
from coinrag_integrations.evaluation.ttft import describe_machine
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.settings import resolve_model
from coinrag_integrations.types import Chunk


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--coverage", default="nuggets", choices=("nuggets", "all"))
    options = parser.parse_args()

    model = load_model(resolve_model(options.model))
    config = EngineConfig(coverage=options.coverage)
    documents = demo_documents()[: options.documents]
    seconds: dict[str, list[float]] = {name: [] for name in ("raw", "encode", "store", "add")}
    chunks: list[Chunk] = []
    for done in range(options.rounds + 1):
        folder = Path(tempfile.mkdtemp(prefix="coinrag-bench-"))
        try:
            with CoinRAG.open(folder, model=model, config=config) as rag:
                rag.index.embedder.embed_query("load it first")
                chunks[:] = [
                    chunk for document in documents for chunk in rag.engine.chunk(document)
                ]
                steps: dict[str, Callable[[], object]] = {
                    "raw": lambda: _raw(rag, [c.token_ids for c in chunks]),
                    "encode": lambda: [None for _ in rag.engine.encode(chunks)],
                    "store": lambda: [
                        rag.engine.store_chunk(*x) for x in rag.engine.encode(chunks)
                    ],
                    "add": lambda: rag.add(documents),
                }
                for name, step in steps.items():
                    for chunk in chunks:
                        rag.engine.store.delete(chunk.chunk_id)
                    begin = time.perf_counter()
                    step()
                    if done:  # the first round warms up
                        seconds[name].append(time.perf_counter() - begin)
        finally:
            shutil.rmtree(folder)
    n_tokens = sum(map(len, chunks))
    speed = {name: n_tokens / float(np.median(values)) for name, values in seconds.items()}
    for name, value in speed.items():
        print(f"{name:8}{value:10,.0f} tokens/s   {value / speed['raw']:.2f} of raw")
    print(
        json.dumps(
            {
                "n_tokens": n_tokens,
                "n_chunks": len(chunks),
                "rounds": options.rounds,
                "tokens_per_second": {name: round(value, 1) for name, value in speed.items()},
                "of_raw": {name: round(value / speed["raw"], 3) for name, value in speed.items()},
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "format_version": FORMAT_VERSION,
                "machine": describe_machine(model.device),
            }
        )
    )


def _raw(rag: CoinRAG, sequences: list[tuple[int, ...]]) -> None:
    model = rag.engine.model
    sequences = sorted(sequences, key=len, reverse=True)  # as the encoder does: little padding
    with torch.inference_mode():
        for run in batches(map(len, sequences), rag.engine.config.batch_tokens):
            longest = max(len(sequences[i]) for i in run)
            ids = torch.zeros((len(run), longest), dtype=torch.long, device=model.device)
            for row, i in zip(ids, run, strict=True):
                row[: len(sequences[i])] = torch.tensor(sequences[i])
            model.hf.base_model(ids, use_cache=False)


if __name__ == "__main__":
    main()
