"""Decode time a token against the context's length: full KV, and C2KV's slots in its place.

Random weights and entries: what a step takes depends on shapes alone. Each round measures every length and
ratio once, so that noise hits all alike. The floor is what a step has to read: the weights, and the
entries. The last line of stdout is one JSON object; `--plot FILE` draws it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench_ttft import SHAPES, random_model

from coinrag_integrations.engine import GenerationConfig, LoadedModel
from coinrag_integrations.engine.generation import generate
from coinrag_integrations.engine.model import choose_device
from coinrag_integrations.engine.plan import plan_prefix
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.evaluation.ttft import Spread, describe_machine
from coinrag_integrations.types import ChunkId, SpanRef

LENGTHS, RATIOS, STEPS = (2048, 4096, 8192, 16384), (1, 4, 8), 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--ratios", nargs="+", type=int, default=RATIOS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", default="smollm2-135m", choices=sorted(SHAPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    model = random_model(options.shape, device, max(options.lengths) + STEPS + 8)
    n_weights = sum(it.numel() * it.element_size() for it in model.hf.parameters())
    times: dict[tuple[int, int], list[float]] = {
        (ratio, length): [] for ratio in options.ratios for length in options.lengths
    }
    for round_ in range(options.rounds + 1):
        for (ratio, length), found in times.items():
            milliseconds = decode_ms(model, length, ratio)
            if round_:  # the first one pays for what is set up once
                found.append(milliseconds)
    report = {
        f"c2kv:{ratio}" if ratio > 1 else "full KV": {
            length: {
                "ms": numbers(Spread.of(times[ratio, length])),
                "bytes": n_weights + -(-length // ratio) * model.layout.bytes_per_entry,
            }
            for length in options.lengths
        }
        for ratio in options.ratios
    }
    print(f"{'':10}{'tokens':>8}{'P50 ms':>10}{'mean':>10}{'P99':>10}{'MB':>8}{'GB/s':>8}")
    for name, by_length in report.items():
        for length, row in by_length.items():
            p50, mean, p99 = row["ms"]
            speed = row["bytes"] / p50 / 1e6
            print(
                f"{name:10}{length:8}{p50:10.2f}{mean:10.2f}{p99:10.2f}{row['bytes'] / 1e6:8.0f}"
                f"{speed:8.1f}"
            )
    if options.plot:
        draw(report, options.plot)
    print(json.dumps({"decode": report, "machine": describe_machine(device)}))


def decode_ms(model: LoadedModel, n_tokens: int, ratio: int) -> float:
    """Mean milliseconds of the steps behind random entries for so many tokens, the first one apart."""
    plan = plan_prefix([SpanRef(ChunkId("0" * 32), 0, n_tokens, ratio)])
    kv = empty_kv(model.layout, plan.n_entries + STEPS + 2, model.device).normal_(std=0.1)
    prefix, watch = Prefix(kv=kv, plans=(plan,)), Stopwatch(model.device)
    config = GenerationConfig(max_new_tokens=STEPS + 1)
    for _ in generate(model, prefix, [[1]], config, watch):
        pass
    return watch.timings().decode_ms / STEPS


def numbers(spread: Spread) -> tuple[float, float, float]:
    """P50, mean and P99."""
    return spread.p50, spread.mean, spread.p99


def draw(report: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """One line a form: milliseconds a token against the tokens of the context."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4))
    for name, by_length in report.items():
        lengths = list(by_length)
        axes.plot(lengths, [row["ms"][0] for row in by_length.values()], marker="o", label=name)
    axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("decode time a token, median ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
