"""What `place` costs, against copying the same bytes on the same device. No model: random KV.

Rows: `copy` (one flat copy of the staged entries: the floor), `place` from bf16, and from codes of 8
and 4 bits, and `naive`, the chain of torch operations that one would write first. Each round
measures every row once, so that noise hits all alike. Bytes are those read and written. The last
line of stdout is one JSON object.

On a CPU, run it with OMP_WAIT_POLICY=passive: otherwise torch's threads go on spinning for milliseconds
after a row, on the cores that the next row needs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from layouts import LAYOUTS

from coinrag_integrations.engine.kernels import Kernels, choose_kernels
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.prefix import empty_kv
from coinrag_integrations.engine.rope import RopeTable, Rotary
from coinrag_integrations.evaluation.ttft import Spread, describe_machine

ENTRIES = (230, 465, 2048)
SPAN, GROUP, WARM_UP = 19, 64, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One row: milliseconds, and the bytes it has to read and write."""

    ms: Spread
    n_bytes: int

    @property
    def gb_per_s(self) -> float:
        """At the median."""
        return round(self.n_bytes / self.ms.p50 / 1e6, 2)

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        times = [self.ms.p50, self.ms.mean, self.ms.p99]
        return {"ms": times, "bytes": self.n_bytes, "gb_per_s": self.gb_per_s}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", nargs="+", default=sorted(LAYOUTS), choices=sorted(LAYOUTS))
    parser.add_argument("--entries", nargs="+", type=int, default=ENTRIES)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", default="auto", choices=("auto", "torch", "numba", "triton"))
    options = parser.parse_args()
    device = torch.device(options.device)
    kernels = choose_kernels(options.kernels, device)
    costs = {
        name: {
            n: measure(LAYOUTS[name], n, kernels, device, options.rounds) for n in options.entries
        }
        for name in options.layout
    }
    print(f"kernels: {kernels.name} ({kernels.reason}); ms, and P50 as a multiple of the copy's")
    for name, by_entries in costs.items():
        for n, rows in by_entries.items():
            for row, cost in rows.items():
                print(
                    f"{name:14}{n:6} {row:12}{cost.ms.p50:9.3f} P50{cost.ms.mean:9.3f} mean"
                    f"{cost.ms.p99:9.3f} P99{cost.gb_per_s:9.1f} GB/s{_ratio(rows, row):7.2f}x"
                )
    at = costs.get("smollm2-135m", {}).get(465)
    print(
        json.dumps(
            {
                "place_vs_memcpy": at and _ratio(at, "place bf16"),
                "costs": {
                    name: {
                        n: {row: cost.to_dict() for row, cost in rows.items()}
                        for n, rows in by_entries.items()
                    }
                    for name, by_entries in costs.items()
                },
                "kernels": kernels.name,
                "rounds": options.rounds,
                "machine": describe_machine(device),
            }
        )
    )


@torch.inference_mode()
def measure(
    layout: KVLayout, n_entries: int, kernels: Kernels, device: torch.device, rounds: int
) -> dict[str, Cost]:
    """Every row of one layout and number of entries, placed into one prefix."""
    staged = torch.randn(layout.staged(n_entries), device=device).to(layout.dtype)
    coded = {bits: kernels.quantise(staged, bits, GROUP, torch.float16) for bits in (8, 4)}
    spans, flat = list(staged.split(SPAN)), torch.empty_like(staged)
    out, slots = empty_kv(layout, n_entries, device), torch.arange(n_entries, device=device)
    half = layout.head_dim // 2
    rotary = Rotary(inv_freq=tuple(1e5 ** (-i / half) for i in range(half)))
    table = RopeTable(rotaries=(rotary,), layers=(0,) * layout.n_layers)
    turns = table.rotation(range(n_entries), device)
    cos, sin = (  # [T, 1, 1, D], as models have them
        torch.cat((angles[0], angles[0]), -1)[:, None, None] for angles in (turns.cos, turns.sin)
    )
    steps: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: flat.copy_(staged), 2 * staged.nbytes),
        "place bf16": (lambda: kernels.place(staged, turns, out, slots), 2 * staged.nbytes),
        "place int8": (
            lambda: kernels.place(coded[8], turns, out, slots),
            coded[8].n_bytes + staged.nbytes,
        ),
        "place int4": (
            lambda: kernels.place(coded[4], turns, out, slots),
            coded[4].n_bytes + staged.nbytes,
        ),
        "naive": (lambda: _naive(spans, cos, sin), 2 * staged.nbytes),
    }
    times = _times({name: step for name, (step, _) in steps.items()}, device, rounds)
    return {
        name: Cost(ms=Spread.of(times[name]), n_bytes=n_bytes)
        for name, (_, n_bytes) in steps.items()
    }


def _naive(spans: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[L, 2, H, N, D] out of spans, the way it is written with no kernel."""
    keys, values = torch.cat(spans).unbind(2)
    a, b = keys.float().chunk(2, dim=-1)
    keys = (keys.float() * cos + torch.cat((-b, a), dim=-1) * sin).to(values.dtype)
    return torch.stack((keys, values), dim=2).permute(1, 2, 3, 0, 4).contiguous()


def _times(
    steps: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each step in each round, in turn, after a few rounds to warm up."""
    timed = _timed_on_gpu if device.type == "cuda" else _timed
    times: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(rounds + WARM_UP):
        for name, step in steps.items():
            ms = timed(step)
            if done >= WARM_UP:
                times[name].append(ms)
    return times


def _timed(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return (time.perf_counter() - begin) * 1e3


def _timed_on_gpu(step: Callable[[], object]) -> float:
    """Between two events of the stream: what the host needs to launch counts only if it is slower."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _ratio(rows: dict[str, Cost], row: str) -> float:
    """P50 over that of the copy."""
    return round(rows[row].ms.p50 / rows["copy"].ms.p50, 3)


if __name__ == "__main__":
    main()
