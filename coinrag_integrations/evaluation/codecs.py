"""What coded entries cost in quality: the likelihood of gold answers, raw entries against codes.

Every question gets the same spans from the same encoded chunks; only what is placed differs: entries in
the model's dtype, or the codes that a store would keep of them. Knows no store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.chunking import CHUNK_TOKENS, chunk_document
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import (
    Bits,
    Implementation,
    Kernels,
    Quantised,
    choose_kernels,
)
from coinrag_integrations.engine.layout import dtype_name
from coinrag_integrations.engine.plan import PrefixPlan, Text, arrange, merge, plan_prefix
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from coinrag_integrations.engine.prompt import Prompt, PromptTemplate, build_prompt
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.evaluation.likelihood import Paired, answer_ids, answer_logits, losses
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer, extract_nuggets
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.types import Chunk, ChunkId, Span, SpanRef

Pieces = Literal["spans", "chunks"]
RAW = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """A way to code entries: bits, how many entries share a key's scales, and the scales' dtype."""

    name: str
    bits: Bits
    group: int
    scale_dtype: torch.dtype = torch.float16


CODINGS = (Coding(name="int8", bits=8, group=128), Coding(name="int4", bits=4, group=64))


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecConfig:
    """What stands before each question.

    `pieces` "spans" takes the `n_nuggets` nearest nuggets of `n_documents` documents and codes what a
    store with coverage "nuggets" holds; "chunks" takes and codes their chunks whole.
    """

    pieces: Pieces = "spans"
    n_documents: int = 5
    n_nuggets: int = 10
    chunk_tokens: int = CHUNK_TOKENS
    kernels: Implementation = "auto"
    prompt: PromptTemplate = field(default_factory=PromptTemplate)

    def __post_init__(self) -> None:
        """Refuse what selects nothing."""
        if self.pieces not in ("spans", "chunks"):
            raise ConfigError(f"pieces is {self.pieces!r}: use one of spans, chunks")
        if self.n_documents < 1 or self.n_nuggets < 1:
            raise ConfigError(
                f"n_documents={self.n_documents} and n_nuggets={self.n_nuggets} must be at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecResult:
    """One coding against raw entries.

    `bytes_ratio` is that of the chunks measured, `full_bytes_ratio` that of a chunk of full size. `nll`
    is the mean over the questions of nats a token, `nll_sum` the nats of all tokens; ratios and
    differences (nats a token, positive is worse) are to raw entries. `first_token` is the share of
    questions whose greedy first token is the same.
    """

    bytes_ratio: float
    full_bytes_ratio: float
    nll: float
    nll_sum: float
    nll_ratio: float
    nll_sum_ratio: float
    difference: Paired
    first_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecReport:
    """The benchmark's result: `codecs` by name, "raw" first. Entries and tokens are means."""

    n: int
    pieces: Pieces
    model: str
    dtype: str
    kernels: str
    entries: float
    answer_tokens: float
    codecs: dict[str, CodecResult]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure_codecs(
    model: LoadedModel,
    examples: Sequence[Example],
    embedder: Embedder,
    config: CodecConfig | None = None,
    *,
    codings: Sequence[Coding] = CODINGS,
    proposer: NuggetProposer | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> CodecReport:
    """The likelihood of every example's first answer, with raw entries and with each coding.

    Raises:
        ConfigError: no examples, two codings of one name, or entries that cannot be coded.
        BudgetError: an example does not fit the model's window.
    """
    config = config or CodecConfig()
    names = [RAW, *(coding.name for coding in codings)]
    if len(set(names)) < len(names):
        raise ConfigError(f"codings need names of their own, and none may be {RAW!r}: got {names}")
    if not examples:
        raise ConfigError("no questions to measure: give at least one")
    bench = _Bench.of(model, config, codings)
    rows = []
    for done, example in enumerate(examples, 1):
        rows.append(bench.measure(example, embedder, proposer or RuleProposer()))
        if on_progress is not None:
            on_progress(done)
    return CodecReport(
        n=len(rows),
        pieces=config.pieces,
        model=model.name,
        dtype=dtype_name(model.layout.dtype),
        kernels=bench.kernels.name,
        entries=float(np.mean([row.n_entries for row in rows])),
        answer_tokens=float(np.mean([len(row.losses[RAW]) for row in rows])),
        codecs={name: _result(name, rows, bench.full_bytes_ratio(name)) for name in names},
    )


Coded = torch.Tensor | Quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What a store would hold of a chunk: the entries of its covered ranges, one after the other."""

    covered: Sequence[Span]
    entries: Coded

    def rows(self, ref: SpanRef) -> slice:
        """Where a span lies in `entries`; a covered range holds all of it."""
        first = 0
        for span in self.covered:
            if span.start <= ref.start and ref.stop <= span.stop:
                return slice(first + ref.start - span.start, first + ref.stop - span.start)
            first += len(span)
        raise ConfigError(f"span [{ref.start}, {ref.stop}) of chunk {ref.chunk_id} is not covered")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One question: the losses [n] of its answer and the greedy first token, by coding."""

    n_entries: int
    losses: dict[str, torch.Tensor]
    first: dict[str, int]
    n_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """A model, what it is measured with, and the entries [P, L, 2, H, D] of the prompt's head."""

    model: LoadedModel
    config: CodecConfig
    kernels: Kernels
    prompt: Prompt
    head: torch.Tensor
    codings: Mapping[str, Coding]

    @classmethod
    def of(cls, model: LoadedModel, config: CodecConfig, codings: Sequence[Coding]) -> _Bench:
        prompt = build_prompt(model.tokenizer, config.prompt)
        return cls(
            model=model,
            config=config,
            kernels=choose_kernels(config.kernels, model.device),
            prompt=prompt,
            head=encode(model, [prompt.head])[0].contiguous(),
            codings={coding.name: coding for coding in codings},
        )

    def measure(self, example: Example, embedder: Embedder, proposer: NuggetProposer) -> _Row:
        documents = example.chosen(self.config.n_documents)
        chunks = [
            extract_nuggets(chunk, proposer)
            for document in documents
            for chunk in chunk_document(document, self.model.tokenizer, self.config.chunk_tokens)
        ]
        if self.config.pieces == "chunks":
            chunks = [replace(chunk, nuggets=()) for chunk in chunks]
        refs = nearest_spans(example.question, chunks, embedder, self.config.n_nuggets)
        plan = plan_prefix([Text(self.prompt.head), *arrange(refs)], max_entries=self.model.window)
        wanted = {ref.chunk_id for ref in refs}
        stored = list(self._stored(chunk for chunk in chunks if chunk.chunk_id in wanted))
        question = self.prompt.tail(example.question)
        answer = answer_ids(self.prompt, example.answers[0])
        room = len(question) + len(answer)
        found: dict[str, torch.Tensor] = {}
        first: dict[str, int] = {}
        n_bytes: dict[str, int] = {}
        for name in (RAW, *self.codings):
            coded = {key: replace(s, entries=self._code(name, s.entries)) for key, s in stored}
            n_bytes[name] = sum(_n_bytes(s.entries) for s in coded.values())
            prefix = self._compose(plan, coded, room)
            logits = answer_logits(self.model, prefix, question, answer)
            found[name], first[name] = losses(logits, answer).cpu(), int(logits[0].argmax())
        return _Row(n_entries=plan.n_entries, losses=found, first=first, n_bytes=n_bytes)

    def full_bytes_ratio(self, name: str) -> float:
        """Bytes of a whole chunk's codes to those of its entries."""
        shape = self.model.layout.staged(self.config.chunk_tokens)
        entries = torch.zeros(shape, dtype=self.model.layout.dtype, device=self.model.device)
        return _n_bytes(self._code(name, entries)) / entries.nbytes

    def _stored(self, chunks: Iterator[Chunk]) -> Iterator[tuple[ChunkId, _Stored]]:
        for chunk in chunks:  # one by one: padding would change a few last bits
            covered = merge([n.span for n in chunk.nuggets]) or [Span(0, len(chunk))]
            kv = encode(self.model, [chunk.token_ids])[0]
            entries = torch.cat([kv[span.start : span.stop] for span in covered])
            yield chunk.chunk_id, _Stored(covered=covered, entries=entries)

    def _code(self, name: str, entries: Coded) -> Coded:
        if name == RAW or isinstance(entries, Quantised):
            return entries
        coding = self.codings[name]
        try:
            return self.kernels.quantise(entries, coding.bits, coding.group, coding.scale_dtype)
        except ValueError as error:
            raise ConfigError(f"codec {name!r} cannot hold the entries: {error}") from error

    def _compose(self, plan: PrefixPlan, stored: Mapping[ChunkId, _Stored], room: int) -> Prefix:
        device = self.model.device
        kv = empty_kv(self.model.layout, plan.n_entries + room, device)
        rotation = self.model.rope.rotation(plan.positions(), device)
        rows = torch.arange(plan.n_entries, device=device)
        head = slice(0, len(plan.head))
        self.kernels.place(self.head, rotation[head], kv, rows[head])
        for segment in plan.segments:
            chunk = stored[segment.ref.chunk_id]
            to = slice(segment.row, segment.row + len(segment.ref))
            part = chunk.entries[chunk.rows(segment.ref)]
            self.kernels.place(part, rotation[to], kv, rows[to])
        return Prefix(kv=kv, plans=(plan,))


def nearest_spans(
    question: str, chunks: Sequence[Chunk], embedder: Embedder, n_nuggets: int
) -> list[SpanRef]:
    """What retrieval would find among these chunks, best first: their nearest nuggets.

    A chunk without nuggets stands for itself; if none has any, all are taken.
    """
    has_nuggets = any(chunk.nuggets for chunk in chunks)
    return rank_spans(question, chunks, embedder)[: n_nuggets if has_nuggets else len(chunks)]


def rank_spans(question: str, chunks: Sequence[Chunk], embedder: Embedder) -> list[SpanRef]:
    """All nuggets of these chunks, best first. A chunk without nuggets stands for itself."""
    found = [(c.ref(n.span), n.text) for c in chunks for n in c.nuggets]
    found += [(chunk.ref(), chunk.text) for chunk in chunks if not chunk.nuggets]
    vectors = embedder.embed_documents([text for _, text in found])
    scores = (vectors @ embedder.embed_query(question)).round(6).tolist()
    ranked = sorted(zip(scores, found, strict=True), key=lambda row: (-row[0], row[1][0]))
    return [ref for _, (ref, _) in ranked]


def _n_bytes(entries: Coded) -> int:
    return entries.n_bytes if isinstance(entries, Quantised) else entries.nbytes


def _result(name: str, rows: Sequence[_Row], full_bytes_ratio: float) -> CodecResult:
    ours, raw = ([float(row.losses[key].mean()) for row in rows] for key in (name, RAW))
    our_sum, raw_sum = (sum(float(row.losses[key].sum()) for row in rows) for key in (name, RAW))
    return CodecResult(
        bytes_ratio=round(
            sum(row.n_bytes[name] for row in rows) / sum(row.n_bytes[RAW] for row in rows), 6
        ),
        full_bytes_ratio=round(full_bytes_ratio, 6),
        nll=round(float(np.mean(ours)), 6),
        nll_sum=round(our_sum, 4),
        nll_ratio=round(float(np.mean(ours) / np.mean(raw)), 6),
        nll_sum_ratio=round(our_sum / raw_sum, 6),
        difference=Paired.of([a - b for a, b in zip(ours, raw, strict=True)]),
        first_token=float(np.mean([row.first[name] == row.first[RAW] for row in rows])),
    )
