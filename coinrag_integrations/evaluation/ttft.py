"""Time to first token: full prefill, whole-chunk KV, spans and slots, on the same chunks in one run.

The floor is what no way of caching can beat: the question prefilled on a prefix that already lies in
memory. Retrieval is the same for all and is left out.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from coinrag_integrations.engine import AnswerStream, GenerationConfig
from coinrag_integrations.engine.generation import generate
from coinrag_integrations.engine.timings import Stopwatch, Timings
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval.forms import of_chunks
from coinrag_integrations.types import ScoredSpan

_ONE_TOKEN = GenerationConfig(max_new_tokens=1)
_PARTS = ("load", "compose", "prefill")
_PACKAGES = ("torch", "transformers", "safetensors", "chromadb", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """P50, mean and P99 of some milliseconds."""

    p50: float
    mean: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        p50, p99 = np.percentile(values, (50, 99)).tolist()
        return cls(p50=round(p50, 3), mean=round(float(np.mean(values)), 3), p99=round(p99, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodReport:
    """One way of answering: its TTFT, and the mean entries and bytes it read from the store."""

    ttft_ms: Spread
    entries: float
    bytes_read: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TTFTReport:
    """The benchmark's result; `speedup` is full prefill over spans, parts and breakdown are medians."""

    n: int
    methods: dict[str, MethodReport]
    parts_ms: dict[str, dict[str, float]]
    floor_ms: Spread
    spans_breakdown_ms: dict[str, float]
    speedup: dict[str, float]
    machine: dict[str, Any]
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Samples:
    timings: list[Timings] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)

    def report(self) -> MethodReport:
        return MethodReport(
            ttft_ms=Spread.of([t.ttft_ms for t in self.timings]),
            entries=float(np.mean(self.entries)),
            bytes_read=float(np.mean([t.bytes_read for t in self.timings])),
        )

    def parts(self) -> dict[str, float]:
        """Medians of the parts of the TTFT."""
        return {part: self.median(f"{part}_ms") for part in _PARTS}

    def median(self, name: str) -> float:
        return round(float(np.median([getattr(t, name) for t in self.timings])), 3)


def measure_ttft(
    rag: CoinRAG,
    questions: Sequence[str],
    *,
    n_chunks: int = 4,
    n_nuggets: int = 10,
    full_size: bool = True,
    n_warmup: int = 2,
    on_progress: Callable[[int], None] | None = None,
) -> TTFTReport:
    """Measure every method once for every question, in turn, after `n_warmup` rounds.

    Every question gets its `n_chunks` nearest chunks (of `full_size` alone, unless others will do), and
    the `n_nuggets` nearest nuggets of those. Of a store with slots, those of each ratio are measured too
    ("c2kv:4"), and of the first one the best chunk whole with slots of the others ("hybrid:4").

    Raises:
        ConfigError: no questions, or a store without whole chunks (coverage "nuggets").
    """
    if rag.engine.config.coverage != "all":
        raise ConfigError(
            "the benchmark compares whole chunks: build the store with coverage 'all'"
        )
    if not questions:
        raise ConfigError("no questions to measure: give at least one")
    ratios = rag.engine.config.c2kv
    names = ["full", "chunk", "spans", *(f"c2kv:{ratio}" for ratio in ratios)]
    methods = {name: _Samples() for name in [*names, *(f"hybrid:{it}" for it in ratios[:1])]}
    floor: list[float] = []
    rounds = [*questions[:n_warmup], *questions]
    for done, question in enumerate(rounds):
        chunks = (
            _full_chunks(rag, question, n_chunks)
            if full_size
            else rag.index.search_chunks(question, n_chunks)
        )
        spans = rag.index.search_nuggets(question, chunks, n_nuggets)
        counted = done >= len(rounds) - len(questions)
        for name, samples in methods.items():
            timings, entries = _first_token(_stream(rag, name, question, chunks, spans))
            if counted:
                samples.timings.append(timings)
                samples.entries.append(entries)
        milliseconds = _floor(rag, question, spans)
        if counted:
            floor.append(milliseconds)
        if on_progress is not None:
            on_progress(done + 1)
    reports = {name: samples.report() for name, samples in methods.items()}
    full, ours = reports["full"].ttft_ms, reports["spans"].ttft_ms
    return TTFTReport(
        n=len(questions),
        methods=reports,
        floor_ms=Spread.of(floor),
        parts_ms={name: samples.parts() for name, samples in methods.items()},
        spans_breakdown_ms=methods["spans"].parts(),
        speedup={"p50": round(full.p50 / ours.p50, 2), "p99": round(full.p99 / ours.p99, 2)},
        machine=describe_machine(rag.engine.model.device),
        versions={name: version(name) for name in _PACKAGES},
    )


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    on_gpu = device.type == "cuda"
    return {
        "cpu": str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "python": platform.python_version(),
    }


def _full_chunks(rag: CoinRAG, question: str, n_chunks: int) -> list[ScoredSpan]:
    """The nearest chunks that have the full number of tokens."""
    size = rag.engine.config.chunk_tokens
    wanted, width = n_chunks, n_chunks * 4
    while True:
        found = rag.index.search_chunks(question, width)
        full = [chunk for chunk in found if len(chunk.ref) == size][:wanted]
        if len(full) == wanted:
            return full
        if len(found) < width:
            raise ConfigError(
                f"the store has only {len(full)} chunks of {size} tokens: add longer documents, or "
                "lower n_chunks"
            )
        width *= 2


def _stream(
    rag: CoinRAG,
    method: str,
    question: str,
    chunks: Sequence[ScoredSpan],
    spans: Sequence[ScoredSpan],
) -> AnswerStream:
    if method == "full":
        return rag.engine.stream_full(question, [c.ref.chunk_id for c in chunks], _ONE_TOKEN)
    form, _, ratio = method.partition(":")
    chosen = {"spans": spans, "chunk": chunks}.get(form)
    if chosen is None:
        chosen = of_chunks("c2kv" if form == "c2kv" else "hybrid", chunks, int(ratio), n_raw=1)
    return rag.engine.stream(question, [span.ref for span in chosen], _ONE_TOKEN)


def _first_token(stream: AnswerStream) -> tuple[Timings, int]:
    for _ in stream:
        pass
    answer = stream.answer
    return answer.timings, sum(ref.n_entries for ref in answer.spans)


def _floor(rag: CoinRAG, question: str, spans: Sequence[ScoredSpan]) -> float:
    online = rag.engine.prompt.tail(question)
    prefix, _ = rag.engine.compose([span.ref for span in spans], room=len(online) + 1)
    watch = Stopwatch(rag.engine.model.device)
    for _ in generate(rag.engine.model, prefix, [online], _ONE_TOKEN, watch):
        pass
    return watch.timings().ttft_ms
