"""What answers cost from end to end: building, disk, reading, prefill, concurrency, at what F1.

A store is really built out of the passages of a data set, and really asked by several roads (`roads`).
Every road is charged for the parts of the build that it needs, and for the time that its questions took.
It has paid for itself after as many questions as make it the cheaper one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from coinrag_integrations.engine import EngineConfig, GenerationConfig, LoadedModel
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.cost import building
from coinrag_integrations.evaluation.cost.building import Built, build_store, distinct
from coinrag_integrations.evaluation.cost.roads import ROADS, Asked, Road, ask_all
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.evaluation.estimate import Guess, break_even
from coinrag_integrations.evaluation.statistics import Estimate, bootstrap, paired_bootstrap
from coinrag_integrations.evaluation.ttft import Spread, describe_machine
from coinrag_integrations.ingest import OnProgress
from coinrag_integrations.nuggets import NuggetProposer
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import Embedder, RetrievalConfig

REFERENCES: tuple[Road, ...] = ("full", "text")
_EXTRACTION = "extraction"  # seconds of an LLM that were given, not measured
_OF_NUGGETS = {
    *(building.NUGGETS, building.EMBED_NUGGETS, building.INDEX_NUGGETS),
    _EXTRACTION,
}
# What a road can do without; all of them cut, embed and index chunks.
_SPARED: Mapping[Road, set[str]] = {
    "full": {*_OF_NUGGETS, building.KV},
    "text": {building.KV},
    "chunk": _OF_NUGGETS,
    "spans": set(),
}
_PACKAGES = ("torch", "transformers", "chromadb", "coinrag-integrations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What an hour of the machine costs, and a gigabyte (10^9 bytes) on disk for a month of 30 days.

    The store is kept for `days`.
    """

    hour: float
    gb_month: float = 0.0
    days: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what is no price."""
        for name in ("hour", "gb_month", "days"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}: use 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """Which roads, how many questions (None: all), how many at once, how wide to search.

    "full" is what the others are compared with. `cold` has the operating system forget the KV files
    before each turn. `extraction_seconds` are added for every chunk, as if an LLM had found its
    nuggets. `prices` turn seconds into money.
    """

    roads: tuple[Road, ...] = ROADS
    n_questions: int | None = None
    concurrency: tuple[int, ...] = (1, 2, 4)
    n_chunks: int = 5
    n_nuggets: int = 10
    max_new_tokens: int = 32
    seed: int = 0
    cold: bool = False
    extraction_seconds: float = 0.0
    prices: Prices | None = None

    def __post_init__(self) -> None:
        """Refuse what measures nothing, or nothing against anything."""
        if unknown := [road for road in self.roads if road not in ROADS]:
            raise ConfigError(f"road {unknown[0]!r} is not known: use some of {', '.join(ROADS)}")
        for name, values in (("roads", self.roads), ("concurrency", self.concurrency)):
            if len(set(values)) < len(values) or not values:
                raise ConfigError(f"{name} {values} must be some, each once")
        if "full" not in self.roads:
            raise ConfigError("the roads must hold 'full': the others are compared with it")
        if min(self.concurrency) < 1 or self.max_new_tokens < 1:
            raise ConfigError("concurrency and max_new_tokens must be at least 1")
        if not 0 <= self.extraction_seconds < math.inf:
            raise ConfigError(
                f"extraction_seconds is {self.extraction_seconds}: use 0 or more seconds a chunk"
            )
        if self.cold and not hasattr(os, "posix_fadvise"):
            raise ConfigError("cold needs posix_fadvise, which this system has not: leave it out")


@dataclass(frozen=True, slots=True)
class Line:
    """What something costs: once, and for each of some questions."""

    fixed: float
    each: tuple[float, ...]

    @property
    def per_question(self) -> float:
        """The mean."""
        return float(np.mean(self.each))

    def at(self, n_questions: float) -> float:
        """With so many questions."""
        return self.fixed + n_questions * self.per_question

    def paid_off(self, other: Line, seed: int = 0) -> Guess:
        """After how many questions it is no dearer than another line, for good; infinite: never.

        The range is the bootstrap's over the questions, 95 %; what is paid once is taken as it was.
        """
        saved = paired_bootstrap(other.each, self.each, seed)
        return break_even(
            Guess.exact(self.fixed - other.fixed), Guess(saved.mean, saved.low, saved.high)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoadCost:
    """One road at one concurrency. `to_full` is F1 minus that of full prefill, question by question.

    `line` is the machine's seconds, or money; `paid_off` after how many questions it is as cheap as the
    roads named. `parts_ms` are means of a question's time.
    """

    n: int
    f1: Estimate
    to_full: Estimate
    build_seconds: float
    disk_bytes: int
    machine_seconds: float
    answer_ms: Spread
    ttft_ms: Spread
    parts_ms: Mapping[str, float]
    bytes_read: float
    n_declined: int
    line: Line
    paid_off: Mapping[Road, Guess]

    @property
    def per_second(self) -> float:
        """Questions a second."""
        return 1.0 / self.machine_seconds

    @property
    def is_worse(self) -> bool:
        """Whether its F1 is lower than that of full prefill beyond chance: not at equal accuracy."""
        return self.to_full.high < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """What was built and what was asked, by concurrency and road. `reused`: the store was there."""

    built: Built
    reused: bool
    levels: Mapping[int, Mapping[Road, RoadCost]]
    config: CostConfig
    machine: Mapping[str, Any]
    versions: Mapping[str, str] = field(
        default_factory=lambda: {name: version(name) for name in _PACKAGES}
    )

    @property
    def unit(self) -> str:
        """Of lines: seconds of the machine, or money."""
        return "s" if self.config.prices is None else "money"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; a number of questions without end is None."""
        levels = {
            n: {
                road: asdict(it) | {"per_second": it.per_second, "is_worse": it.is_worse}
                for road, it in roads.items()
            }
            for n, roads in self.levels.items()
        }
        value = {
            "unit": self.unit,
            "built": asdict(self.built) | {"total_seconds": self.built.total_seconds},
            "reused": self.reused,
            "levels": levels,
            "config": asdict(self.config),
            "machine": dict(self.machine),
            "versions": dict(self.versions),
        }
        plain: dict[str, Any] = _plain(value)
        return plain


def measure_cost(
    examples: Sequence[Example],
    folder: Path,
    model: LoadedModel,
    embedder: Embedder,
    config: CostConfig | None = None,
    *,
    engine: EngineConfig | None = None,
    adapter: str | Path = "",
    proposer: NuggetProposer | None = None,
    on_build: OnProgress | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> CostReport:
    """Build a store of all passages in `folder`, or find it there, and ask the examples' questions.

    The store keeps every token if whole chunks are asked for, otherwise those of nuggets. `adapter`
    answers. `on_progress` is told how many answers there are.

    Raises:
        ConfigError: no questions, fewer than are asked at once, or see `build_store`.
        BudgetError: the chunks of a question do not fit the model's window.
        CoinRAGError: see `CoinRAG.open`.
    """
    config, engine = config or CostConfig(), engine or EngineConfig()
    asked = examples[: config.n_questions]
    if len(asked) < max(config.concurrency):
        raise ConfigError(
            f"{len(asked)} questions cannot be asked {max(config.concurrency)} at once: give more "
            "questions or a lower concurrency"
        )
    if "chunk" in config.roads:
        engine = replace(engine, coverage="all")
    documents = distinct([document for it in examples for document in it.documents])
    built, reused = build_store(
        documents, folder, model, embedder, engine, proposer=proposer, on_progress=on_build
    )
    with CoinRAG.open(
        folder / building.STORE,
        model=model,
        embedder=embedder,
        config=engine,
        adapter=adapter,
        retrieval=RetrievalConfig(n_chunks=config.n_chunks, n_nuggets=config.n_nuggets),
        generation=GenerationConfig(max_new_tokens=config.max_new_tokens, stop=("\n",)),
    ) as rag:
        rows = ask_all(
            rag,
            asked,
            config.roads,
            config.concurrency,
            cold=config.cold,
            seed=config.seed,
            on_progress=on_progress,
        )
    return CostReport(
        built=built,
        reused=reused,
        levels={n: sum_up(built, roads, config) for n, roads in rows.items()},
        config=config,
        machine=describe_machine(model.device),
    )


def sum_up(
    built: Built, rows: Mapping[Road, Sequence[Asked]], config: CostConfig
) -> dict[Road, RoadCost]:
    """What each road costs, from its answers to the same questions."""
    lines = {road: _line(road, built, rows[road], config) for road in rows}
    f1 = {road: [row.f1 for row in rows[road]] for road in rows}
    return {
        road: RoadCost(
            n=len(asked),
            f1=bootstrap(f1[road], config.seed),
            to_full=paired_bootstrap(f1[road], f1["full"], config.seed),
            build_seconds=sum(build_parts(road, built, config).values()),
            disk_bytes=disk_bytes(road, built),
            machine_seconds=float(np.mean([row.machine_s for row in asked])),
            answer_ms=Spread.of([row.answer_s * 1e3 for row in asked]),
            ttft_ms=Spread.of([row.ttft_ms for row in asked]),
            parts_ms=_parts(asked),
            bytes_read=float(np.mean([row.timings.bytes_read for row in asked])),
            n_declined=sum(row.timings.n_declined for row in asked),
            line=lines[road],
            paid_off={
                other: lines[road].paid_off(lines[other], config.seed)
                for other in REFERENCES
                if other in lines and other != road and road != "full"
            },
        )
        for road, asked in rows.items()
    }


def build_parts(road: Road, built: Built, config: CostConfig) -> dict[str, float]:
    """Seconds of the parts of building that a road needs."""
    parts = dict(built.seconds)
    if config.extraction_seconds:
        parts[_EXTRACTION] = config.extraction_seconds * built.n_chunks
    return {name: seconds for name, seconds in parts.items() if name not in _SPARED[road]}


def disk_bytes(road: Road, built: Built) -> int:
    """Bytes on disk that a road needs: the catalog, its rows of the index, its KV."""
    kv = {"chunk": built.kv_chunk_bytes or 0, "spans": built.kv_span_bytes}.get(road, 0)
    rows = built.index_bytes if road in ("text", "spans") else built.chunk_index_bytes
    return built.catalog_bytes + rows + kv


def _line(road: Road, built: Built, asked: Sequence[Asked], config: CostConfig) -> Line:
    build, each = sum(build_parts(road, built, config).values()), [row.machine_s for row in asked]
    prices = config.prices
    if prices is None:
        return Line(build, tuple(each))
    second = prices.hour / 3600
    rent = disk_bytes(road, built) / 1e9 * prices.gb_month * prices.days / 30
    return Line(build * second + rent, tuple(s * second for s in each))


def _parts(asked: Sequence[Asked]) -> dict[str, float]:
    """Mean milliseconds of a question: what it spent where. "other" is above all the catalog."""
    parts = {
        "retrieve": [row.timings.retrieve_ms for row in asked],
        "read": [row.timings.load_ms + row.timings.recompute_ms for row in asked],
        "compose": [row.timings.compose_ms for row in asked],
        "prefill": [row.timings.prefill_ms for row in asked],
        "decode": [row.timings.decode_ms for row in asked],
    }
    means = {name: float(np.mean(values)) for name, values in parts.items()}
    total = float(np.mean([row.answer_s for row in asked])) * 1e3
    return {**means, "other": total - sum(means.values())}


def _plain(value: Any) -> Any:
    """For JSON: infinite numbers are None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(it) for it in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
