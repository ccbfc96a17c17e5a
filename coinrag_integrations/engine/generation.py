"""Prefill questions behind their prefixes, then decode. Knows token ids, not spans or stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.runner import EagerRunner, Runner, StaticRunners
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.visibility import HIDDEN
from coinrag_integrations.errors import BudgetError, ConfigError

FinishReason = Literal["stop", "length", "empty"]  # empty: nothing was asked of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How to decode. Temperature 0 is greedy; a `seed` makes sampling repeatable.

    Raises:
        ConfigError: a value outside its range.
    """

    max_new_tokens: int = 48
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}: use at least 1")
        if not 0 <= self.temperature < inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ConfigError(
                "temperature must be a number from 0, top_p in (0, 1], top_k at least 0: got "
                f"{self.temperature}, {self.top_p}, {self.top_k}"
            )
        if isinstance(self.stop, str) or not all(self.stop):
            raise ConfigError("stop must be a tuple of non-empty strings")


def check_room(model: LoadedModel, plan: PrefixPlan, n_question: int, max_new_tokens: int) -> None:
    """Refuse a question that the model's window cannot hold.

    Raises:
        BudgetError: context, question and answer together are longer than the window.
    """
    if plan.length + n_question + max_new_tokens > model.window:
        raise BudgetError(
            f"{plan.n_entries} cached entries, {plan.n_online + n_question} online tokens and "
            f"{max_new_tokens} answer tokens exceed the model's window of {model.window}: shorten "
            "the question, retrieve less, or lower max_new_tokens"
        )


def generate(
    model: LoadedModel,
    prefix: Prefix,
    questions: Sequence[Sequence[int]],
    config: GenerationConfig,
    watch: Stopwatch,
    static: StaticRunners | None = None,
    keep: Callable[[Runner], None] | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of every answer, the last one perhaps an id that ends it, then None.

    One question for each of the prefix's plans. Their tokens, and the plans' online text, are
    computed in one pass, each seeing what stands before it; then one token of every answer at a
    time. `static` runs them compiled or as CUDA graphs; without it they run eagerly. Closing the
    iterator stops the work. `keep` is shown, at the end, what ran.

    Raises:
        BudgetError: the model's window is too small.
    """
    for plan, question in zip(prefix.plans, questions, strict=True):
        check_room(model, plan, len(question), config.max_new_tokens)
    choosers = [_Chooser(config, model.device) for _ in questions]
    ended = [False] * len(questions)
    ids, at = _online(prefix, questions)
    with ExitStack() as stack:
        with watch.part("prefill"):
            runner = _runner(stack, model, prefix, ids.shape[1], config.max_new_tokens, static)
            if keep is not None:
                stack.callback(keep, runner)
            tokens = _choose(choosers, runner.run(ids, at))
        watch.first_token()
        for _ in range(1, config.max_new_tokens):
            yield _open(tokens, ended)
            ended = [e or token in model.stop_ids for token, e in zip(tokens, ended, strict=True)]
            if all(ended):
                return
            with watch.part("decode"):
                at = at[:, -1:] + 1
                tokens = _choose(choosers, runner.run(torch.tensor(tokens)[:, None], at))
        yield _open(tokens, ended)


def _runner(
    stack: ExitStack,
    model: LoadedModel,
    prefix: Prefix,
    longest: int,
    n_new: int,
    static: StaticRunners | None,
) -> Runner:
    """A static runner if there is one free, else an eager one."""
    if static is not None:
        runner = stack.enter_context(static.borrow(prefix, longest, n_new))
        if runner is not None:
            return runner
    return EagerRunner(model, prefix, longest + n_new)


def _online(
    prefix: Prefix, questions: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions [B, m] of what is computed first, aligned on the last tokens.

    Shorter ones are padded on the left, with tokens at `HIDDEN`.
    """
    texts = [
        (
            [*plan.online_ids, *question],
            [*plan.online_positions(), *range(plan.n_rows, plan.n_rows + len(question))],
        )
        for plan, question in zip(prefix.plans, questions, strict=True)
    ]
    width = max(len(ids) for ids, _ in texts)
    ids = torch.zeros((len(texts), width), dtype=torch.long)
    at = torch.full_like(ids, HIDDEN)
    for b, (text, positions) in enumerate(texts):
        ids[b, width - len(text) :] = torch.tensor(text)
        at[b, width - len(text) :] = torch.tensor(positions)
    return ids, at


def _open(tokens: Sequence[int], ended: Sequence[bool]) -> list[int | None]:
    """The tokens of the answers that go on."""
    return [None if end else token for token, end in zip(tokens, ended, strict=True)]


def _choose(choosers: Sequence[_Chooser], logits: torch.Tensor) -> list[int]:
    """The next token of each answer: logits [B, V]."""
    return [choose(row) for choose, row in zip(choosers, logits, strict=True)]


class _Chooser:
    """Picks the next token from logits [V]."""

    def __init__(self, config: GenerationConfig, device: torch.device) -> None:
        self.greedy = config.temperature == 0
        self.warpers = LogitsProcessorList()
        if self.greedy:
            return
        self.random = torch.Generator(device)
        if config.seed is None:
            self.random.seed()
        else:
            self.random.manual_seed(config.seed)
        self.warpers.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            self.warpers.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1:
            self.warpers.append(TopPLogitsWarper(config.top_p))

    def __call__(self, logits: torch.Tensor) -> int:
        if self.greedy:
            return int(logits.argmax())
        # These warpers look at no earlier tokens.
        chances = self.warpers(None, logits[None]).softmax(-1)
        return int(torch.multinomial(chances[0], 1, generator=self.random))
