"""How a reader adapter is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from coinrag_integrations.engine.prompt import PromptTemplate
from coinrag_integrations.errors import ConfigError

Context = Literal["spans", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    """Retrieval as served (CoinRAG, arXiv 2608.07458: k_c = 5, k = 10, RAFT noise 0.15), LoRA and AdamW.

    `context` "spans" composes KV, "text" prefills the same tokens, through the adapter: the twin to
    compare with. `n_passages` of an example's are candidates; with probability `noise` none that helps is
    among them. `shuffle` is how often passages stand in another order than the retrieval's. One step is
    the mean over `batch` examples; `n_examples` are seen in all, each once. Every `check_every` steps the
    likelihood of `n_held_out` examples is measured; after `patience` checks without a better one, training
    ends, and the best weights are kept.
    """

    context: Context = "spans"
    n_chunks: int = 5
    n_nuggets: int = 10
    n_passages: int = 10
    noise: float = 0.15
    shuffle: float = 0.5
    rank: int = 16
    alpha: int = 32
    learning_rate: float = 4e-4
    warmup: float = 0.05
    weight_decay: float = 0.0
    max_norm: float = 1.0
    batch: int = 8
    n_examples: int = 3200
    n_held_out: int = 48
    check_every: int = 25
    patience: int = 8
    seed: int = 0
    prompt: PromptTemplate = field(default_factory=PromptTemplate)

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.context not in ("spans", "text"):
            raise ConfigError(f"context is {self.context!r}: use one of spans, text")
        numbers = {
            name: getattr(self, name)
            for name in ("n_chunks", "n_nuggets", "n_passages", "rank", "alpha", "batch")
        }
        numbers |= {"check_every": self.check_every, "n_held_out": self.n_held_out}
        if wrong := [name for name, value in numbers.items() if value < 1]:
            raise ConfigError(f"{', '.join(wrong)} must be at least 1")
        if self.n_examples < self.batch:
            raise ConfigError(f"n_examples={self.n_examples} is less than a batch of {self.batch}")
        if not 0 <= self.noise <= 1 or not 0 <= self.shuffle <= 1 or not 0 <= self.warmup < 1:
            raise ConfigError("noise, shuffle and warmup are shares between 0 and 1")

    @property
    def n_steps(self) -> int:
        """Steps of the optimiser."""
        return self.n_examples // self.batch
