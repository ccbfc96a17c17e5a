"""How what reads cached KV is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

from coinrag_integrations.engine.c2kv.extractor import Init
from coinrag_integrations.engine.prompt import PromptTemplate
from coinrag_integrations.errors import ConfigError

Context = Literal["spans", "chunks", "text"]
Kind = Literal["lora", "full", "links", "c2kv"]
_LISTED: dict[str, tuple[str, ...]] = {
    "kind": ("lora", "full", "links", "c2kv"),
    "context": ("spans", "chunks", "text"),
    "init": ("last", "eos", "mean"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    """Retrieval as served (CoinRAG, arXiv 2608.07458: k_c = 5, k = 10, RAFT noise 0.15), and AdamW.

    `kind` says what is trained. "lora": an adapter of the base model, which encodes and stays as it is.
    "full": all weights, those that encode too, so that chunks are encoded anew in every step;
    `through_cache` lets gradients flow through what was encoded. "links": the embeddings of `n_links`
    tokens behind each chunk, and nothing else. "c2kv": the extractor of slots (see `engine.c2kv`), for a
    model and a reader that stay as they are: slots begin as `init` says, and see `overlap` tokens before
    their blocks; a sample has a random number of chunks, and one of `ratios`. What changes is of `rank`,
    or with `copies` whole projections, as in the paper. It is taught the answer's likelihood, with weight
    `ce`; what the reader says behind the same chunks uncompressed, with weight `kl` at the answer, and
    `kl_question` at the question; and to have a chunk said again behind its slots, with weight
    `reconstruction`.

    `context` "spans" composes KV of nuggets, "chunks" KV of whole chunks, "text" prefills the tokens of
    "spans", through what is trained: the twin to compare with. `n_passages` of an example's are
    candidates; with probability `noise` none that helps is among them. `shuffle` is how often passages
    stand in another order than the retrieval's. An example that takes more than `max_tokens` is
    left out. One step is the mean over `batch` examples, `at_once` of them in one pass; `n_examples` are
    seen in all, each once. Every `check_every` steps the likelihood of `n_held_out` examples is
    measured; after `patience` checks without a better one, training ends, and the best weights are
    kept.
    """

    kind: Kind = "lora"
    context: Context = "spans"
    n_chunks: int = 5
    n_nuggets: int = 10
    n_passages: int = 10
    noise: float = 0.15
    shuffle: float = 0.5
    max_tokens: int | None = None
    rank: int = 16
    alpha: int = 32
    n_links: int = 5
    through_cache: bool = False
    init: Init = "last"
    ratios: tuple[int, ...] = (4,)
    overlap: int = 0
    copies: bool = False
    ce: float = 1.0
    kl: float = 1.0
    kl_question: float = 2.0
    reconstruction: float = 0.0
    learning_rate: float = 4e-4
    warmup: float = 0.05
    weight_decay: float = 0.0
    max_norm: float = 1.0
    batch: int = 8
    at_once: int = 4
    n_examples: int = 3200
    n_held_out: int = 48
    check_every: int = 25
    patience: int = 8
    seed: int = 0
    prompt: PromptTemplate = field(default_factory=PromptTemplate)

    @classmethod
    def paper_recipe(cls, n_examples: int = 277_280) -> Self:
        """CoinRAG's own: full fine-tuning, one pass over its examples, 16 a step, 1024 tokens at most.

        What the paper does not say (warm-up, schedule, checks) is as elsewhere here.
        """
        return cls(
            kind="full",
            through_cache=True,
            shuffle=0.0,
            max_tokens=1024,
            learning_rate=5e-6,
            batch=16,
            at_once=1,
            n_examples=n_examples,
            check_every=100,
        )

    @classmethod
    def link_recipe(cls, n_links: int = 5, n_examples: int = 3200) -> Self:
        """Link tokens of a frozen model, behind whole chunks, as KVLink places them."""
        return cls(
            kind="links",
            context="chunks",
            n_links=n_links,
            learning_rate=5e-3,
            n_examples=n_examples,
        )

    @classmethod
    def slot_recipe(
        cls, ratios: tuple[int, ...] = (4,), n_examples: int = 3200, *, copies: bool = False
    ) -> Self:
        """C2KV's extractor, with the full-context teacher; any order of chunks.

        As low-rank changes, or as `copies` with the learning rate of the paper's scripts for small models.
        """
        return cls(
            kind="c2kv",
            context="chunks",
            shuffle=1.0,
            ratios=ratios,
            n_passages=5,
            rank=32,
            alpha=64,
            copies=copies,
            learning_rate=5e-5 if copies else 1e-3,
            n_examples=n_examples,
        )

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        for name, values in _LISTED.items():
            if getattr(self, name) not in values:
                given = getattr(self, name)
                raise ConfigError(f"{name} is {given!r}: use one of {', '.join(values)}")
        if self.kind == "links" and self.context != "chunks":
            raise ConfigError("link tokens stand behind whole chunks: use context='chunks'")
        if self.kind == "c2kv" and (self.context != "chunks" or not self.ratios):
            raise ConfigError("slots stand for whole chunks: use context='chunks', and some ratios")
        names = ["ce", "kl", "kl_question", "reconstruction"]
        if not any(getattr(self, it) for it in names):
            raise ConfigError(f"nothing is taught: give one of {', '.join(names)} a weight")
        names.append("overlap")
        if wrong := [f"{it}={getattr(self, it)}" for it in names if getattr(self, it) < 0]:
            raise ConfigError(f"{', '.join(wrong)} must be at least 0")
        if any(ratio < 1 for ratio in self.ratios):
            raise ConfigError(f"ratios {self.ratios} must be at least 1")
        if (self.copies or self.reconstruction or self.ce != 1) and self.kind != "c2kv":
            raise ConfigError("copies, reconstruction and ce are of slots: use kind='c2kv'")
        if self.through_cache and (self.kind != "full" or self.context == "text"):
            raise ConfigError("through_cache needs kind='full', and a context that is composed")
        names = ["n_chunks", "n_nuggets", "n_passages", "rank", "alpha", "n_links"]
        names += ["batch", "at_once", "check_every", "n_held_out"]
        if wrong := [name for name in names if getattr(self, name) < 1]:
            raise ConfigError(f"{', '.join(wrong)} must be at least 1")
        if self.n_examples < self.batch:
            raise ConfigError(f"n_examples={self.n_examples} is less than a batch of {self.batch}")
        if not 0 <= self.noise <= 1 or not 0 <= self.shuffle <= 1 or not 0 <= self.warmup < 1:
            raise ConfigError("noise, shuffle and warmup are shares between 0 and 1")

    @property
    def scale(self) -> float:
        """What low-rank changes are multiplied by."""
        return self.alpha / self.rank

    @property
    def n_steps(self) -> int:
        """Steps of the optimiser."""
        return self.n_examples // self.batch
