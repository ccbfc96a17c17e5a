"""On paper: how large a store gets, how often its NVMe has what is asked for, and what has to be moved.

Nothing is measured here. Questions ask for chunks by a Zipf law with exponent `--skew`; each reads spans
of `--n-chunks` of them. Nodes share the questions evenly, each with an LRU cache of `--nvme` bytes before
remote storage that has everything. Hit rates are Che's approximation (Che, Tung and Wang, 2002: an item is
there with 1 - exp(-p t), t such that the cache is full), summed over ranks in logarithmic steps. The last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from layouts import LAYOUTS
from numpy.typing import NDArray

from coinrag_integrations.engine.store.codec import CODECS, Codec, chunk_bytes

CHUNKS = (10_000, 1_000_000, 100_000_000)
_STEPS = 4000  # ranks are taken together in so many steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A row: bytes of the store, the share of reads that NVMe serves, GB/s a node and in all."""

    n_chunks: int
    store_tb: float
    hit_rate: float
    nvme_gb_per_s: float
    network_gb_per_s: float
    remote_gb_per_s: float
    nodes_for_all: int


def main() -> None:
    """Compute and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="qwen2-7b", choices=sorted(LAYOUTS))
    parser.add_argument("--codec", default="none", choices=CODECS)
    parser.add_argument("--ratio", type=int, default=1, help="tokens of an entry: 1, or of C2KV")
    parser.add_argument("--coverage", type=float, default=0.6, help="share of tokens in nuggets")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--active", type=int, default=465, help="entries behind a question")
    parser.add_argument("--questions", type=float, default=100.0, help="a second, in all")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--nvme", type=float, default=8e12, help="bytes of each node's cache")
    parser.add_argument("--skew", type=float, default=0.9)
    parser.add_argument("--n-chunks", type=int, default=5, help="chunks a question reads of")
    options = parser.parse_args()
    rows = [fleet(options, n) for n in CHUNKS]
    print(f"{'chunks':>12}{'store TB':>10}{'hits':>8}{'NVMe GB/s':>11}{'net GB/s':>10}{'nodes':>7}")
    for it in rows:
        print(
            f"{it.n_chunks:12,}{it.store_tb:10.2f}{it.hit_rate:8.1%}{it.nvme_gb_per_s:11.3f}"
            f"{it.network_gb_per_s:10.3f}{it.nodes_for_all:7}"
        )
    print(json.dumps({"assumed": vars(options), "fleets": [asdict(it) for it in rows]}))


def fleet(options: argparse.Namespace, n_chunks: int) -> Fleet:
    """What so many chunks come to."""
    codec = Codec(options.codec, LAYOUTS[options.layout], options.ratio)
    share = 1.0 if options.ratio > 1 else options.coverage
    each = chunk_bytes(codec, codec.entries(int(options.chunk_tokens * share)))
    store, read = each * n_chunks, codec.n_bytes(options.active)
    hits = hit_rate(n_chunks, options.skew, int(options.nvme // each))
    per_node = options.questions / options.nodes * read / 1e9
    return Fleet(
        n_chunks=n_chunks,
        store_tb=store / 1e12,
        hit_rate=hits,
        nvme_gb_per_s=per_node * hits,
        network_gb_per_s=per_node * (1 - hits),
        remote_gb_per_s=per_node * (1 - hits) * options.nodes,
        nodes_for_all=-(-store // int(options.nvme)),
    )


def hit_rate(n_items: int, skew: float, n_kept: int) -> float:
    """The share of requests that an LRU cache of `n_kept` of `n_items` answers, by Che's approximation."""
    if n_kept >= n_items:
        return 1.0
    if n_kept < 1:
        return 0.0
    p, count = popularity(n_items, skew)
    low, high = 0.0, 1.0
    while float((count * -np.expm1(-p * high)).sum()) < n_kept:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        full = float((count * -np.expm1(-p * middle)).sum()) < n_kept
        low, high = (middle, high) if full else (low, middle)
    return float((count * p * -np.expm1(-p * high)).sum())


def popularity(n_items: int, skew: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps of ranks: the probability of one item of each, and how many items it has."""
    edges = np.unique(np.geomspace(1, n_items + 1, _STEPS).astype(np.int64))
    count = np.diff(edges).astype(np.float64)
    middle = np.sqrt(edges[:-1].astype(np.float64) * (edges[1:] - 1))
    weight = middle**-skew
    return weight / float((weight * count).sum()), count


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
