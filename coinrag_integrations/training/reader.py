"""Train a reader adapter: LoRA on online tokens, behind KV that stays as it is. Resumable."""

from __future__ import annotations

import copy
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from coinrag_integrations.engine import LoadedModel, hf
from coinrag_integrations.engine.adapter import BASE_FILE, WEIGHTS_FILE
from coinrag_integrations.errors import BudgetError, ConfigError, ModelError
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.files import write_text
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.training.card import model_card
from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.training.examples import mixed
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
    max_seconds: float | None = None,
    on_progress: OnProgress | None = None,
) -> TrainingReport:
    """Train on examples, and write the best adapter so far into `folder` after every check.

    A slice of the examples is held out. Interrupted, it goes on from the last check when called again
    with the same folder and config. `max_seconds` ends it early, its learning rate planned for that.
    `data` says where the examples came from, for the model card.

    Raises:
        ConfigError: too few examples, or the folder was begun with another config.
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
    run = _Run(model, Sampler.of(model, embedder, config), config, folder, data)
    run.resume()
    return run.train(mixed(kept, config), held, max_seconds, on_progress or (lambda _: None))


class _Run:
    """One training: its model, optimiser and report."""

    def __init__(
        self,
        model: LoadedModel,
        sampler: Sampler,
        config: ReaderConfig,
        folder: Path,
        data: Sequence[str],
    ) -> None:
        self.base, self.sampler, self.config, self.folder = model, sampler, config, folder
        self.data = data
        torch.manual_seed(config.seed)
        self.peft = _lora(model, config)
        self.weights = [p for p in self.peft.parameters() if p.requires_grad]
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
            losses = [self._backward(next(samples)) for _ in range(config.batch)]
            torch.nn.utils.clip_grad_norm_(self.weights, config.max_norm)
            self.optimiser.step()
            self.optimiser.zero_grad()
            report.step += 1
            report.loss = sum(losses) / len(losses)
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
        if state["config"] != _plain(self.config):
            raise ConfigError(
                f"{self.folder} was begun with another config: give the same one, or another folder"
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

    def _backward(self, sample: Sample) -> float:
        loss = self._loss(sample)
        (loss / self.config.batch).backward()  # type: ignore[no-untyped-call]
        self.report.n_examples += 1
        return float(loss.detach())

    def _loss(self, sample: Sample) -> torch.Tensor:
        """Mean nats a token of the answer."""
        ids = torch.tensor([sample.ids], device=self.base.device)
        logits = hf.logits_behind(self.peft, ids[:, :-1], sample.kv, sample.n_answer)
        return cross_entropy(logits[0], ids[0, -sample.n_answer :])

    def _check(self, tests: Sequence[Sample]) -> bool:
        """Measure, and keep what is needed to go on; whether it is the best so far."""
        report = self.report
        with torch.no_grad():
            losses = [float(self._loss(sample)) for sample in tests]
        nll = sum(losses) / len(losses)
        is_best = nll < min(report.held_out.values(), default=math.inf)
        report.held_out[report.step] = round(nll, 5)
        if is_best:
            report.best_step = report.step
            self._save()
        self._log({"step": report.step, "held_out": round(nll, 5)})
        state = {
            "config": _plain(self.config),
            "weights": [weight.detach().cpu() for weight in self.weights],
            "optimiser": self.optimiser.state_dict(),
            "report": asdict(report),
        }
        part = self.folder / f".{STATE_FILE}.part"
        torch.save(state, part)
        part.replace(self.folder / STATE_FILE)
        return is_best

    def _save(self) -> None:
        """The adapter as peft writes it, in the model's dtype, and what it belongs to."""
        from safetensors.torch import load_file, save_file

        self.peft.peft_config["default"].base_model_name_or_path = self.base.name
        self.peft.save_pretrained(self.folder)
        path = self.folder / WEIGHTS_FILE
        dtype = self.base.layout.dtype
        save_file({k: v.to(dtype) for k, v in load_file(path).items()}, path)
        owner = {"weights": self.base.weights, "dtype": str(dtype)}
        config, report = _plain(self.config), asdict(self.report)
        text = {**owner, "config": config, "report": report}
        write_text(self.folder / BASE_FILE, json.dumps(text, indent=1) + "\n")
        card = model_card(self.base.name, config, report, self.data)
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


def _lora(model: LoadedModel, config: ReaderConfig) -> Any:
    """The model with trainable LoRA on all linear layers but the head; shares the base's parameters."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ModelError(
            f"training needs peft: pip install 'coinrag-integrations[train]' ({error})"
        ) from error
    shared = {id(it): it for it in (*model.hf.parameters(), *model.hf.buffers())}
    reader = copy.deepcopy(model.hf, shared)
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules="all-linear",
        bias="none",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(reader, lora)


def _plain(config: ReaderConfig) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]
