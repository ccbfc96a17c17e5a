"""What `make kernels` ends in: one JSON line on the kernels of this machine and of GPUs that are not here.

`place_vs_memcpy`: `place` of 465 entries of SmolLM2 against a flat copy of the same bytes.
`question_prefill_vs_weights`: a question of 30 tokens behind 272 entries of the demo model, against
one token through each of its weight matrices as they are loaded, all else left out; once as the
engine runs it, once compiled, and once against merely reading the bytes of the matrices.
`aot`: the Triton kernels compiled for each architecture, the worst over their variants. `families`:
whether the correctness gate lets a tiny random model of the real class pass.

Run as `python -m benchmarks.report_kernels` from the repository's root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import nn

from coinrag_integrations.engine import LoadedModel, gate, load_model
from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.engine.runner import EagerRunner, StaticRunners
from coinrag_integrations.errors import UnsupportedModelError
from coinrag_integrations.evaluation.ttft import Spread, describe_machine
from coinrag_integrations.settings import resolve_model
from tests.engine.kernels import compiled
from tests.tiny import SUPPORTED, prefix_of, tiny_model

DEVICE = torch.device("cpu")
N_ENTRIES, N_QUESTION, ROUNDS = 272, 30, 40
IDS = torch.arange(200, 200 + N_QUESTION)[None]
AT = torch.arange(N_ENTRIES, N_ENTRIES + N_QUESTION)[None]


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(os.cpu_count() or 1)  # the tests' models, being tiny, set one
    model = load_model(resolve_model("demo"), device="cpu")
    with ExitStack() as stack:
        steps = {"question": _question(model), "compiled": _compiled(model, stack)}
        steps |= {"weights": lambda: _stream(model.hf), "read": lambda: _read(model.hf)}
        times = {name: _measure(step) for name, step in steps.items()}
    kernels = choose_kernels("auto", DEVICE)
    print(f"kernels: {kernels.name} ({kernels.reason})")
    for name, spread in times.items():
        print(f"{name:10}{spread.p50:8.2f} P50{spread.mean:8.2f} mean{spread.p99:8.2f} P99 ms")
    report = {
        "place_vs_memcpy": _place_vs_memcpy(),
        "question_prefill_vs_weights": round(times["question"].p50 / times["weights"].p50, 2),
        "compiled_prefill_vs_weights": round(times["compiled"].p50 / times["weights"].p50, 2),
        "question_prefill_vs_read": round(times["question"].p50 / times["read"].p50, 2),
        "aot": compiled.summary(),
        "families": {name: _gate(name) for name in SUPPORTED},
        "machine": describe_machine(DEVICE),
    }
    print(json.dumps(report))


def _place_vs_memcpy() -> float:
    """In a process of its own, where OpenMP's idle threads sleep instead of spinning beside ours."""
    command = [sys.executable, "benchmarks/bench_place.py", "--layout", "smollm2-135m"]
    done = subprocess.run(
        [*command, "--entries", "465"],
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1])["place_vs_memcpy"])


def _question(model: LoadedModel) -> Callable[[], object]:
    """The first pass of an answer, without sampling."""
    prefix = prefix_of(model, range(100, 100 + N_ENTRIES), room=N_QUESTION)
    return lambda: EagerRunner(model, prefix, N_QUESTION).run(IDS, AT)


def _compiled(model: LoadedModel, stack: ExitStack) -> Callable[[], object]:
    """The same, compiled; taking over the prefix included."""
    prefix = prefix_of(model, range(100, 100 + N_ENTRIES), room=N_QUESTION)
    runner = stack.enter_context(StaticRunners(model, "compiled").borrow(prefix, N_QUESTION, 1))
    assert runner is not None

    def run() -> None:
        runner.begin(prefix, N_QUESTION)
        runner.run(IDS, AT)

    return run


@torch.inference_mode()
def _stream(model: nn.Module) -> None:
    """One token through every matrix that a pass multiplies by, as it was loaded."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            x = torch.ones(1, module.in_features, dtype=module.weight.dtype)
            nn.functional.linear(x, module.weight, module.bias)


@torch.inference_mode()
def _read(model: nn.Module) -> None:
    """Every byte of the same matrices into the registers."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.view(torch.int64).sum()


def _measure(step: Callable[[], object]) -> Spread:
    """One step by itself: in turns, each would find its weights pushed out of the caches."""
    times = []
    for done in range(ROUNDS + 5):
        begin = time.perf_counter()
        step()
        if done >= 5:
            times.append((time.perf_counter() - begin) * 1e3)
    return Spread.of(times)


def _gate(family: str) -> str:
    config_class, options = SUPPORTED[family]
    try:
        gate.check(tiny_model(config_class, **options), choose_kernels("auto", DEVICE).place)
    except UnsupportedModelError:
        return "refused"
    return "ok"


if __name__ == "__main__":
    main()
