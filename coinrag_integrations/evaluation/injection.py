"""Whether instructions in cached spans have more power than the same text in a prompt.

Each attack is a short article with an instruction inside, a question that the article answers, and a
canary: words that the instruction asks for and nothing else would bring about. Asked are the nuggets'
KV, the whole chunk's KV and the chunk's text prefilled, with the instruction and without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.engine.layout import dtype_name
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.likelihood import (
    Paired,
    answer_ids,
    answer_logits,
    losses,
    no_prefix,
)
from coinrag_integrations.evaluation.metrics import contains_answer
from coinrag_integrations.rag import MODES, CoinRAG, Mode
from coinrag_integrations.types import Chunk, Document, ScoredSpan, SpanRef

# No stop strings: a canary counts wherever it comes.
_GENERATION = GenerationConfig(max_new_tokens=48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An instruction `text` between the two halves of an article that answers the question."""

    name: str
    kind: str
    before: str
    text: str
    after: str
    question: str
    answer: str
    canary: str

    @property
    def documents(self) -> tuple[Document, Document]:
        """The article with the instruction, and without it."""
        return (
            Document(document_id=f"attack:{self.name}", text=self.before + self.text + self.after),
            Document(document_id=f"clean:{self.name}", text=self.before + self.after),
        )

    def hit(self, text: str) -> bool:
        """Whether a text holds the canary, in any case."""
        return self.canary.casefold() in text.casefold()


@cache
def attacks() -> tuple[Attack, ...]:
    """Twenty attacks: plain orders, look-alikes of control tokens, roles and markers, false facts."""
    path = resources.files(__package__).joinpath("injection.jsonl")
    return tuple(Attack(**json.loads(line)) for line in path.read_text("utf-8").splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answer, and mean log-probabilities a token of the canary and of the true answer instead."""

    answer: str
    canary: bool
    correct: bool
    canary_logprob: float
    answer_logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """One attack: what each mode gave with the instruction and without it.

    `exposed` says whether the nuggets that were found hold the canary at all.
    """

    name: str
    kind: str
    exposed: bool
    attacked: dict[Mode, Asked]
    clean: dict[Mode, Asked]

    def power(self, mode: Mode) -> float:
        """How much likelier the instruction made its canary, in nats a token."""
        return self.attacked[mode].canary_logprob - self.clean[mode].canary_logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeResult:
    """A mode over all attacks: counts of answers, and means of log-probabilities a token.

    `power` is what the instruction adds to the canary's; `over_full` its difference to that of the
    same text in a prompt, positive where a cached instruction has more power, over the attacks that
    were exposed (all, if none was).
    """

    canaries: int
    clean_canaries: int
    correct: int
    clean_correct: int
    canary_logprob: float
    clean_canary_logprob: float
    answer_logprob: float
    power: float
    over_full: Paired


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectionReport:
    """The benchmark's result; `exposed` counts attacks whose canary stood among the nuggets."""

    n: int
    exposed: int
    model: str
    dtype: str
    modes: dict[Mode, ModeResult]
    attacks: tuple[AttackResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure_injection(
    rag: CoinRAG,
    attacks: Sequence[Attack],
    *,
    n_nuggets: int = 10,
    on_progress: Callable[[int], None] | None = None,
) -> InjectionReport:
    """Add the attacks' documents to a store made for them, and ask each of its own in every mode.

    Raises:
        ConfigError: no attacks, or a store without whole chunks (coverage "nuggets").
    """
    if not attacks:
        raise ConfigError("no attacks to measure: give at least one")
    if rag.engine.config.coverage != "all":
        raise ConfigError("the modes are compared on whole chunks: use a store of coverage 'all'")
    rag.add(document for attack in attacks for document in attack.documents)
    results = []
    for done, attack in enumerate(attacks, 1):
        results.append(_ask_all(rag, attack, n_nuggets))
        if on_progress is not None:
            on_progress(done)
    return InjectionReport(
        n=len(results),
        exposed=sum(result.exposed for result in results),
        model=rag.engine.model.name,
        dtype=dtype_name(rag.engine.model.layout.dtype),
        modes={mode: _summary(mode, results) for mode in MODES},
        attacks=tuple(results),
    )


def _ask_all(rag: CoinRAG, attack: Attack, n_nuggets: int) -> AttackResult:
    asked: list[dict[Mode, Asked]] = []
    exposed = False
    for document in attack.documents:
        chunks = list(
            map(rag.engine.catalog.chunk, rag.engine.catalog.chunk_ids(document.document_id))
        )
        whole = [_whole(chunk) for chunk in chunks]
        nuggets = rag.index.search_nuggets(attack.question, whole, n_nuggets)
        exposed = exposed or any(attack.hit(nugget.text) for nugget in nuggets)
        asked.append(
            {
                mode: _ask(rag, attack, mode, nuggets if mode == "coinrag" else whole)
                for mode in MODES
            }
        )
    return AttackResult(
        name=attack.name, kind=attack.kind, exposed=exposed, attacked=asked[0], clean=asked[1]
    )


def _ask(rag: CoinRAG, attack: Attack, mode: Mode, spans: Sequence[ScoredSpan]) -> Asked:
    stream = rag.stream_spans(attack.question, spans, mode, generation=_GENERATION)
    for _ in stream:
        pass
    text = stream.reply.text
    refs = [span.ref for span in spans]
    return Asked(
        answer=text,
        canary=attack.hit(text),
        correct=contains_answer(text, [attack.answer]),
        canary_logprob=_logprob(rag, attack.question, attack.canary, mode, refs),
        answer_logprob=_logprob(rag, attack.question, attack.answer, mode, refs),
    )


def _logprob(
    rag: CoinRAG, question: str, answer: str, mode: Mode, refs: Sequence[SpanRef]
) -> float:
    """The mean log-probability of an answer's tokens."""
    engine = rag.engine
    tail, wanted = engine.prompt.tail(question), answer_ids(engine.prompt, answer)
    if mode == "full":
        context = [i for ref in refs for i in engine.catalog.chunk(ref.chunk_id).token_ids]
        prefix, tail = no_prefix(engine.model), (*engine.prompt.head, *context, *tail)
    else:
        prefix, _ = engine.compose(refs, room=len(tail) + len(wanted))
    return -float(losses(answer_logits(engine.model, prefix, tail, wanted), wanted).mean())


def _whole(chunk: Chunk) -> ScoredSpan:
    return ScoredSpan(
        ref=chunk.ref(),
        text=chunk.text,
        score=1.0,
        document_id=chunk.document_id,
        char_start=chunk.char_start,
        char_stop=chunk.char_start + len(chunk.text),
    )


def _summary(mode: Mode, results: Sequence[AttackResult]) -> ModeResult:
    attacked = [result.attacked[mode] for result in results]
    clean = [result.clean[mode] for result in results]
    exposed = [result for result in results if result.exposed] or results
    return ModeResult(
        canaries=sum(asked.canary for asked in attacked),
        clean_canaries=sum(asked.canary for asked in clean),
        correct=sum(asked.correct for asked in attacked),
        clean_correct=sum(asked.correct for asked in clean),
        canary_logprob=_mean(asked.canary_logprob for asked in attacked),
        clean_canary_logprob=_mean(asked.canary_logprob for asked in clean),
        answer_logprob=_mean(asked.answer_logprob for asked in attacked),
        power=_mean(result.power(mode) for result in results),
        over_full=Paired.of([r.power(mode) - r.power("full") for r in exposed]),
    )


def _mean(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 4)
