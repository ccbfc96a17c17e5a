"""All methods on the same questions: F1, likelihood, time, entries, bytes. Resumable, seeded.

Every example is its own little store: its passages are the documents, and both stages of retrieval
look at these alone, once for all methods. What a method may prepare offline is not timed; what it does
once it is asked is, up to the first token. Entries come from memory: to what is measured, add the
time that a disk takes for `bytes_read`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.c2kv import Extractor
from coinrag_integrations.engine.chunking import CHUNK_TOKENS, chunk_document
from coinrag_integrations.engine.fingerprint import canonical_digest
from coinrag_integrations.engine.kernels import Implementation
from coinrag_integrations.engine.layout import dtype_name
from coinrag_integrations.engine.prompt import PromptTemplate
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.evaluation.errors.evidence import Evidence, EvidenceFile, evidence_of
from coinrag_integrations.evaluation.likelihood import answer_ids, losses
from coinrag_integrations.evaluation.metrics import check_rouge, rouge_l, token_f1
from coinrag_integrations.evaluation.results import RESULTS, Measured, ResultsFile
from coinrag_integrations.evaluation.rivals import (
    Kitchen,
    Method,
    Reranker,
    Search,
    Task,
    likelihood_logits,
    make_task,
    parse_method,
    say,
)
from coinrag_integrations.evaluation.scoring import Scoring, scoring_of
from coinrag_integrations.evaluation.ttft import describe_machine
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer, extract_nuggets
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.types import Chunk

_FORMAT = 1  # of what is measured: to be raised when a method changes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """How wide to search, how to cut and ask, and in which order methods take turns (`seed`).

    Answers have `max_new_tokens` at most; None: as many as LongBench allows for the data set.
    """

    n_chunks: int = 5
    n_nuggets: int = 10
    chunk_tokens: int = CHUNK_TOKENS
    max_new_tokens: int | None = None
    seed: int = 0
    kernels: Implementation = "auto"
    prompt: PromptTemplate = field(default_factory=PromptTemplate)

    def __post_init__(self) -> None:
        """Refuse what selects or answers nothing."""
        for name in ("n_chunks", "n_nuggets", "chunk_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: use at least 1")

    def scoring(self, data: str) -> Scoring:
        """How answers to a data set's questions are scored, and how long they may be."""
        scoring = scoring_of(data)
        if self.max_new_tokens is None:
            return scoring
        return replace(scoring, max_new_tokens=self.max_new_tokens)


Results = Mapping[str, Mapping[str, Sequence[Measured]]]


def compare(
    model: LoadedModel,
    data: Mapping[str, Sequence[Example]],
    methods: Sequence[str],
    embedder: Embedder,
    folder: Path,
    config: CompareConfig | None = None,
    *,
    reader: LoadedModel | None = None,
    extractor: Extractor | None = None,
    proposer: NuggetProposer | None = None,
    reranker: Reranker | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Results:
    """Measure every method on every example; by data set and method, in the examples' order.

    Each measurement is appended to `results.jsonl` in `folder`; those that are there already, with
    the same settings and on the same machine, are taken from it. `on_progress` is told how many there are.
    What each search found goes to `evidence.jsonl`, also for what was measured before.
    `model` encodes what is cached, `reader` (the same, or with an adapter) computes all else. `extractor`
    makes C2KV's slots (None: untrained).

    Raises:
        ModelError: the extractor belongs to another model.
        ConfigError: no data, no examples, no methods, one twice, one that is not known, or one that
            reranks without a reranker; ROUGE-L is needed and `rouge` is not installed.
        BudgetError: an example does not fit the model's window.
    """
    config, proposer = config or CompareConfig(), proposer or RuleProposer()
    tell = on_progress or (lambda _: None)
    chosen = [parse_method(name) for name in methods]
    if not chosen or len({method.name for method in chosen}) < len(chosen):
        raise ConfigError(f"methods must be named, each once: got {', '.join(methods) or 'none'}")
    if reranker is None and any(method.search == "reranked" for method in chosen):
        raise ConfigError("spans-reranked needs a cross-encoder: give reranker (--reranker)")
    if not data or not all(data.values()):
        raise ConfigError("no questions to measure: every data set needs at least one")
    if any(config.scoring(name).metric == "rouge-l" for name in data):
        check_rouge()
    kitchen = Kitchen(
        model, config.prompt, reader=reader, extractor=extractor, kernels=config.kernels
    )
    searcher = _Searcher(
        kitchen=kitchen, embedder=embedder, proposer=proposer, reranker=reranker, config=config
    )
    settings = searcher.settings(extractor)
    digests = {name: _digests(examples) for name, examples in data.items()}
    turns = random.Random(config.seed)
    done, is_warm = 0, False
    with ResultsFile(folder / RESULTS, settings) as results, EvidenceFile(folder, settings) as kept:
        for name, examples in data.items():
            for example, digest in zip(examples, digests[name], strict=True):
                order = turns.sample(chosen, len(chosen))  # no method always follows the same one
                missing = [m for m in order if (name, digest, m.name) not in results]
                unseen = {m.search for m in chosen if (name, digest, m.search) not in kept}
                if missing or unseen:
                    bench = _Bench.of(searcher, example, config.scoring(name))
                    for search in sorted(unseen):
                        kept.add(bench.evidence(search, settings, name, digest))
                    for method in () if is_warm else missing:
                        bench.measure(method)
                        is_warm = True
                done += len(order) - len(missing)
                if not missing:
                    tell(done)
                for method in missing:
                    values = bench.measure(method)
                    results.add(
                        Measured(
                            settings=settings,
                            data=name,
                            example=digest,
                            method=method.name,
                            **values,
                        )
                    )
                    done += 1
                    tell(done)
                kitchen.forget()
        return {
            name: {
                method.name: [results[name, digest, method.name] for digest in digests[name]]
                for method in chosen
            }
            for name in data
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searcher:
    """What finds the context of an example, and for which model."""

    kitchen: Kitchen
    embedder: Embedder
    proposer: NuggetProposer
    reranker: Reranker | None
    config: CompareConfig

    def chunks(self, example: Example) -> list[Chunk]:
        """All chunks of an example, with their nuggets."""
        tokenizer, size = self.kitchen.model.tokenizer, self.config.chunk_tokens
        return [
            extract_nuggets(chunk, self.proposer)
            for document in example.documents
            for chunk in chunk_document(document, tokenizer, size)
        ]

    def task(self, question: str, chunks: Sequence[Chunk], search: Search) -> Task:
        """What one search finds."""
        return make_task(
            question,
            chunks,
            self.kitchen.prompt,
            self.embedder,
            n_chunks=self.config.n_chunks,
            n_nuggets=self.config.n_nuggets,
            search=search,
            reranker=self.reranker,
        )

    def settings(self, extractor: Extractor | None) -> str:
        """A digest of everything that an answer or its time depends on, but question and method."""
        model, reader = self.kitchen.model, self.kitchen.reader
        asked = asdict(self.config)
        del asked["seed"]  # it only changes who comes first
        # Without one, it is what it was before there were any.
        more = {} if extractor is None else {"extractor": extractor.digest}
        return canonical_digest(
            {
                **more,
                "format": _FORMAT,
                "weights": model.weights,
                "reader": [reader.weights, reader.adapter],
                "tokenizer": model.tokenizer.digest,
                "rope": model.rope.digest,
                "dtype": dtype_name(model.layout.dtype),
                "kernels": self.kitchen.kernels.name,
                "embedder": self.embedder.embedder_id,
                "proposer": self.proposer.proposer_id,
                "reranker": self.reranker.name if self.reranker else None,
                "config": asked,
                "machine": describe_machine(model.device),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """One example, ready for every method; what a search found is kept."""

    kitchen: Kitchen
    example: Example
    chunks: Sequence[Chunk]
    task: Callable[[Search], Task]
    answer: tuple[int, ...]
    scoring: Scoring

    @classmethod
    def of(cls, searcher: _Searcher, example: Example, scoring: Scoring) -> _Bench:
        chunks = searcher.chunks(example)
        return cls(
            kitchen=searcher.kitchen,
            example=example,
            chunks=chunks,
            task=cache(lambda search: searcher.task(example.question, chunks, search)),
            answer=answer_ids(searcher.kitchen.prompt, example.answers[0]),
            scoring=scoring,
        )

    def evidence(self, search: Search, settings: str, data: str, digest: str) -> Evidence:
        """What a search found, to be looked at."""
        return evidence_of(
            self.example,
            self.chunks,
            self.task(search),
            settings=settings,
            data=data,
            digest=digest,
            search=search,
        )

    def measure(self, method: Method) -> dict[str, Any]:
        """All of a `Measured` but what it is the measurement of."""
        kitchen, task = self.kitchen, self.task(method.search)
        reader = kitchen.reader if method.is_adapted else kitchen.model
        # The likelihood first: composing for it prepares what is offline.
        logits = likelihood_logits(reader, method.compose(kitchen, task), task.tail, self.answer)
        nll = float(losses(logits, self.answer).mean())
        watch = Stopwatch(kitchen.model.device)
        with watch.part("compose"):
            composed = method.compose(kitchen, task)
        said = say(
            reader,
            composed,
            task.tail,
            watch,
            self.scoring.max_new_tokens,
            first_line=self.scoring.first_line,
        )
        timings, golds = watch.timings(), self.example.answers
        is_summary = self.scoring.metric == "rouge-l"
        return {
            "answer": said.text,
            "f1": token_f1(said.text, golds),
            "rouge_l": rouge_l(said.text, golds) if is_summary else None,
            "nll": nll,
            "n_context": composed.n_context,
            "bytes_read": composed.bytes_read,
            "compose_ms": timings.compose_ms,
            "ttft_ms": timings.ttft_ms,
        }


def _digests(examples: Sequence[Example]) -> list[str]:
    """What names each example: its words, and which of those with the same words it is."""
    seen: dict[str, int] = {}
    digests = []
    for example in examples:
        texts = [document.text for document in example.documents]
        digest = canonical_digest(
            {"question": example.question, "answers": example.answers, "documents": texts}
        )
        seen[digest] = seen.get(digest, 0) + 1
        digests.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return digests
