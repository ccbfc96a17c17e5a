"""Train what reads cached KV: one loop for all that can be trained. Resumable."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.c2kv import Extractor
from coinrag_integrations.errors import BudgetError, ConfigError
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.files import write_text
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.training.card import model_card
from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.training.examples import mixed
from coinrag_integrations.training.kept import KeptEntries
from coinrag_integrations.training.learners import Learner, make_learner
from coinrag_integrations.training.samples import Sample, Sampler

_AHEAD = 4  # samples prepared and not yet learnt from
STATE_FILE, LOG_FILE, CARD_FILE = "training.pt", "training.jsonl", "MODEL_CARD.md"


@dataclass(slots=True)
class TrainingReport:
    """How far training is. Losses are nats a token of the answer; `held_out` by step."""

    n_steps: int = 0
    step: int = 0
    n_examples: int = 0
    n_too_long: int = 0
    loss: float = math.nan
    held_out: dict[int, float] = field(default_factory=dict)
    best_step: int = 0
    seconds: float = 0.0


OnProgress = Callable[[TrainingReport], None]


def train_reader(
    model: LoadedModel,
    examples: Sequence[Example],
    embedder: Embedder,
    folder: Path,
    config: ReaderConfig | None = None,
    *,
    data: Sequence[str] = (),
    reader: LoadedModel | None = None,
    cache: Path | None = None,
    start: Extractor | None = None,
    max_seconds: float | None = None,
    on_progress: OnProgress | None = None,
) -> TrainingReport:
    """Train what the config names, and write the best so far into `folder` after every check.

    A slice of the examples is held out. Interrupted, it goes on from the last check when called again
    with the same folder and config. `max_seconds` ends it early, its learning rate planned for that.
    `data` says where the examples came from, for the model card; `reader` is the model with an adapter
    merged in, for link tokens that are to stand beside one and slots that it is to read. In `cache`, a
    folder, entries are kept that slots are made of: a second pass and another training need not encode.
    `start` is an extractor to begin with, the same one when an interrupted training goes on.

    Raises:
        ConfigError: too few examples, or the folder was begun with another config or start.
        ModelError: peft is not installed, or the model has no linear layers that it knows.
        StoreError, DocumentError: see what is called.
    """
    config = config or ReaderConfig()
    if len(examples) <= config.n_held_out:
        raise ConfigError(
            f"{len(examples)} examples are too few: {config.n_held_out} of them are held out"
        )
    folder.mkdir(parents=True, exist_ok=True)
    order = Random(config.seed).sample(range(len(examples)), len(examples))
    held = [examples[i] for i in order[: config.n_held_out]]
    kept = [examples[i] for i in order[config.n_held_out :]]
    torch.manual_seed(config.seed)
    learner = make_learner(model, config, reader, start)
    on_disk = None if cache is None else KeptEntries(cache, model)
    sampler = Sampler.of(model, embedder, config, reader=learner.reader, kept=on_disk)
    run = _Run(learner, sampler, config, folder, data, None if start is None else start.digest)
    run.resume()
    return run.train(mixed(kept, config), held, max_seconds, on_progress or (lambda _: None))


class _Run:
    """One training: what learns, its optimiser and report."""

    def __init__(
        self,
        learner: Learner,
        sampler: Sampler,
        config: ReaderConfig,
        folder: Path,
        data: Sequence[str],
        start: str | None,
    ) -> None:
        self.learner, self.sampler, self.config, self.folder = learner, sampler, config, folder
        self.data, self.start = data, start
        self.weights = learner.weights
        self.optimiser = torch.optim.AdamW(
            self.weights, lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.report = TrainingReport(n_steps=config.n_steps)

    def train(
        self,
        examples: Iterator[Example],
        held: Sequence[Example],
        max_seconds: float | None,
        tell: OnProgress,
    ) -> TrainingReport:
        report, config = self.report, self.config
        spent, begin = report.seconds, time.monotonic()
        tests = [self.sampler.sample(example, Random(i)) for i, example in enumerate(held)]
        for _ in range(report.n_examples + report.n_too_long):  # those of before the interruption
            next(examples)
        if not report.held_out:
            self._check(tests)
        samples = self._samples(examples)
        since_best = 0
        while report.step < config.n_steps:
            done = report.step / config.n_steps
            if max_seconds is not None:
                done = max(done, (time.monotonic() - begin + spent) / max_seconds)
            if done >= 1:
                break
            self._set_rate(done)
            batch = list(islice(samples, config.batch))
            loss = sum(self._backward(part) for part in _parts(batch, config.at_once))
            torch.nn.utils.clip_grad_norm_(self.weights, config.max_norm)
            self.optimiser.step()
            self.optimiser.zero_grad()
            report.step += 1
            report.loss = loss / config.batch
            report.seconds = spent + time.monotonic() - begin
            self._log({"step": report.step, "loss": round(report.loss, 5)})
            if report.step % config.check_every == 0:
                since_best = 0 if self._check(tests) else since_best + 1
                if since_best >= config.patience:
                    break
            tell(report)
        if report.step not in report.held_out:
            self._check(tests)
        tell(report)
        return report

    def resume(self) -> None:
        """Go on from the last check, if there was one."""
        path = self.folder / STATE_FILE
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        begun = _plain(ReaderConfig()) | state["config"]  # an older version knew fewer settings
        if begun != _plain(self.config) or state.get("start") != self.start:
            raise ConfigError(
                f"{self.folder} was begun with another config, or from another start: give the same "
                "ones, or another folder"
            )
        for weight, value in zip(self.weights, state["weights"], strict=True):
            weight.data.copy_(value)
        self.optimiser.load_state_dict(state["optimiser"])
        self.report = TrainingReport(**state["report"])

    def _samples(self, examples: Iterator[Example]) -> Iterator[Sample]:
        """Samples in order, the next ones prepared while one is learnt from."""
        first = self.report.n_examples + self.report.n_too_long
        waiting: deque[Future[Sample | None]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="coinrag-sample") as pool:
            for number, example in enumerate(examples, first):
                waiting.append(pool.submit(self._sample, example, number))
                if len(waiting) <= _AHEAD:
                    continue
                sample = waiting.popleft().result()
                if sample is None:
                    self.report.n_too_long += 1
                else:
                    yield sample

    def _sample(self, example: Example, number: int) -> Sample | None:
        """The sample of an example, the same in every run; None if it does not fit."""
        try:
            return self.sampler.sample(example, Random(f"{self.config.seed}:{number}"))
        except BudgetError:
            return None

    def _backward(self, samples: Sequence[Sample]) -> float:
        """Add the gradients of one pass; the sum of its losses."""
        loss = self.learner.objective(samples).sum()
        (loss / self.config.batch).backward()  # type: ignore[no-untyped-call]
        self.report.n_examples += len(samples)
        return float(loss.detach())

    def _check(self, tests: Sequence[Sample]) -> bool:
        """Measure, and keep what is needed to go on; whether it is the best so far."""
        report = self.report
        with torch.no_grad():
            parts = _parts(tests, self.config.at_once)
            losses = [loss for part in parts for loss in self.learner.losses(part).tolist()]
        nll = math.fsum(losses) / len(losses)
        is_best: bool = nll < min(report.held_out.values(), default=math.inf)
        report.held_out[report.step] = round(nll, 5)
        if is_best:
            report.best_step = report.step
            self._save()
        self._log({"step": report.step, "held_out": round(nll, 5)})
        state = {
            "config": _plain(self.config),
            "start": self.start,
            "weights": [weight.detach().cpu() for weight in self.weights],
            "optimiser": self.optimiser.state_dict(),
            "report": asdict(report),
        }
        part = self.folder / f".{STATE_FILE}.part"
        torch.save(state, part)
        part.replace(self.folder / STATE_FILE)
        return is_best

    def _save(self) -> None:
        config, report = _plain(self.config), asdict(self.report)
        start = {} if self.start is None else {"start": self.start}
        self.learner.save(self.folder, {**start, "config": config, "report": report})
        card = model_card(self.learner.reader.name, config, report, self.data)
        write_text(self.folder / CARD_FILE, card)

    def _set_rate(self, done: float) -> None:
        """Linear warm-up, then a cosine to zero."""
        warm = min(done / self.config.warmup, 1.0) if self.config.warmup else 1.0
        rate = self.config.learning_rate * max(warm, 0.02) * 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimiser.param_groups:
            group["lr"] = rate

    def _log(self, line: dict[str, Any]) -> None:
        with (self.folder / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _plain(config: ReaderConfig) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]


def _parts(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    """So many samples at once, those of like length together if all fit no single pass."""
    if 1 < size < len(samples):
        samples = sorted(samples, key=len)
    for first in range(0, len(samples), size):
        yield samples[first : first + size]
