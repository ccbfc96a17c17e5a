"""Prefill the question behind a prefix, then decode. Knows token ids, not spans or stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from coinrag_integrations.engine import hf
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import BudgetError, ConfigError

FinishReason = Literal["stop", "length"]


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


def check_room(model: LoadedModel, n_entries: int, n_online: int, max_new_tokens: int) -> None:
    """Refuse a question that the model's window cannot hold.

    Raises:
        BudgetError: entries, question and answer together are longer than the window.
    """
    if n_entries + n_online + max_new_tokens > model.window:
        raise BudgetError(
            f"{n_entries} cached entries, {n_online} question tokens and {max_new_tokens} answer "
            f"tokens exceed the model's window of {model.window}: shorten the question, retrieve "
            "less, or lower max_new_tokens"
        )


def generate(
    model: LoadedModel,
    prefix: Prefix,
    online: Sequence[int],
    config: GenerationConfig,
    watch: Stopwatch,
) -> Iterator[int]:
    """Yield the ids of the answer, the last one perhaps an id that ends it.

    Computes `online` in one pass behind the prefix, then one token at a time. Closing the iterator
    stops the work.

    Raises:
        BudgetError: the model's window is too small.
    """
    check_room(model, prefix.n_entries, len(online), config.max_new_tokens)
    choose = _Chooser(config, model.device)
    with watch.part("prefill"):
        cache = prefix.cache(len(online) + config.max_new_tokens)
        ids = torch.tensor([online], device=model.device)
        token = choose(hf.next_logits(model.hf, ids, cache), ids)
    watch.first_token()
    yield token
    for _ in range(config.max_new_tokens - 1):
        if token in model.stop_ids:
            return
        with watch.part("decode"):
            ids = torch.tensor([[token]], device=model.device)
            token = choose(hf.next_logits(model.hf, ids, cache), ids)
        yield token


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

    def __call__(self, logits: torch.Tensor, ids: torch.Tensor) -> int:
        if self.greedy:
            return int(logits.argmax())
        chances = self.warpers(ids, logits[None]).softmax(-1)
        return int(torch.multinomial(chances[0], 1, generator=self.random))
