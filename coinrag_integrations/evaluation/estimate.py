"""What a store would cost: arithmetic over what was counted and measured. Runs nothing.

Numbers are `Guess`es. What was counted is exact; what rests on a sample has a range of two standard
errors to either side, and ranges are carried through sums and products as they are, which makes them
rather too wide than too narrow. Seconds are those of this machine, as busy as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store.codec import CODECS, Codec, CodecName, chunk_bytes
from coinrag_integrations.evaluation.survey import Found, Survey, draw_questions
from coinrag_integrations.retrieval import RetrievalConfig
from coinrag_integrations.retrieval.config import Form
from coinrag_integrations.types import ChunkId, Span

Pairs = tuple[tuple[float, float], ...]
_DRAWS = 200
_OF_SLOTS: tuple[Form, ...] = ("c2kv", "hybrid", "slots", "background")
_ROW_BYTES = 256  # what HNSW keeps of a row in memory besides its vector: links, ids


@dataclass(frozen=True, slots=True)
class Guess:
    """A number, and the range in which it is expected: a point where it was counted."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Guess:
        """A number that was counted."""
        return cls(value, value, value)

    def __add__(self, other: Guess) -> Guess:
        """The sum."""
        return Guess(self.value + other.value, self.low + other.low, self.high + other.high)

    def times(self, other: Guess | float) -> Guess:
        """The product of two numbers that are not negative."""
        by = other if isinstance(other, Guess) else Guess.exact(other)
        return Guess(self.value * by.value, self.low * by.low, self.high * by.high)

    @property
    def is_exact(self) -> bool:
        """Whether it was counted."""
        return self.low == self.high


_LONGER_RUN = Guess(1.0, 1.0, 1.25)  # memory: allocators keep more than was needed at any moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Bytes of something that was filled with `n` items, and how many more each further one takes."""

    n: float
    n_bytes: float
    per_item: float

    def at(self, n: Guess) -> Guess:
        """Bytes with so many items. Beyond what was tried, a fifth more or less."""
        more = Guess(*(max(x - self.n, 0.0) * self.per_item for x in (n.value, n.low, n.high)))
        if n.value < self.n:
            return Guess.exact(self.n_bytes * n.value / self.n)
        return Guess.exact(self.n_bytes) + more.times(Guess(1.0, 0.8, 1.2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a trial on this machine took. Pairs are (how much, what it took).

    `encode`: tokens and seconds of each batch in all forms, written while the next one is computed;
    `headers`, by ratio: 1 and the bytes of a chunk file besides entries and checksums; `embed_chunks`,
    `embed_nuggets`: texts and seconds; `put_index`: rows and seconds, `put_catalog`: documents and
    seconds. `catalog` grows with tokens, `index` with rows of `vector_bytes` each. `ram_bytes` is the
    peak of the process, which had loaded all that a build loads, `gpu_bytes` that of the GPU's memory.
    `full_ms` and `spans_ms`: 1 and the TTFT of each question, behind `context_tokens` tokens of chunks
    or behind spans of them.
    """

    encode: Pairs
    headers: Mapping[int, Pairs]
    embed_chunks: Pairs
    embed_nuggets: Pairs
    put_index: Pairs
    put_catalog: Pairs
    catalog: Growth
    index: Growth
    vector_bytes: int
    ram_bytes: int
    gpu_bytes: int | None
    full_ms: Pairs
    spans_ms: Pairs
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one question reads in a form, whose slots, if it has any, stand for `ratio` tokens.

    `entries` lie in the prefix. `n_bytes`, by codec, come from the store; chunks of which it does not
    keep all that is read, `encoded` of them, are encoded again instead.
    """

    form: Form
    ratio: int | None
    entries: Guess
    n_bytes: dict[CodecName, Guess]
    encoded: Guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a store would hold, take and give.

    `kv_bytes`, and `slot_bytes` for each ratio, are by codec, of which `codec` is the chosen one.
    `build` is seconds by part; "encode" includes writing the files, which goes on beside it. `readings`
    are of every form, spans first. `full_ms` and `spans_ms` are TTFT behind `context_tokens` tokens of
    chunks prefilled anew, and behind spans of such chunks, typically `question_entries` entries.
    """

    codec: CodecName
    n_documents: int
    chunks: Guess
    tokens: Guess
    nuggets: Guess
    covered_tokens: Guess
    kv_bytes: dict[CodecName, Guess]
    slot_bytes: dict[int, dict[CodecName, Guess]]
    catalog_bytes: Guess
    index_bytes: Guess
    ram_bytes: Guess
    gpu_bytes: int | None
    build: dict[str, Guess]
    readings: tuple[Reading, ...]
    context_tokens: int
    full_ms: Guess
    spans_ms: Guess

    @property
    def covered_share(self) -> Guess:
        """The share of the tokens whose KV is stored."""
        covered, tokens = self.covered_tokens, self.tokens.value
        return Guess(*(min(x / tokens, 1.0) for x in (covered.value, covered.low, covered.high)))

    @property
    def disk_bytes(self) -> Guess:
        """KV files, slots', catalog and index together."""
        of_slots = (by_codec[self.codec] for by_codec in self.slot_bytes.values())
        kv_bytes = sum(of_slots, self.kv_bytes[self.codec])
        return kv_bytes + self.catalog_bytes + self.index_bytes

    @property
    def question_entries(self) -> Guess:
        """Entries of the spans for a question."""
        return self.readings[0].entries

    @property
    def question_bytes(self) -> dict[CodecName, Guess]:
        """Bytes read for a question's spans, by codec."""
        return self.readings[0].n_bytes

    @property
    def build_seconds(self) -> Guess:
        """All parts of building together."""
        return sum(self.build.values(), Guess.exact(0.0))

    @property
    def saved_ms(self) -> Guess:
        """How much earlier a question's first token comes; negative if it comes later."""
        full, spans = self.full_ms, self.spans_ms
        return Guess(full.value - spans.value, full.low - spans.high, full.high - spans.low)

    @property
    def break_even_questions(self) -> Guess | None:
        """After how many questions building has paid off; None: never. The range may have no end."""
        even = break_even(self.build_seconds.times(1e3), self.saved_ms)
        return even if even.value < math.inf else None

    def per_day(self, n_questions: float) -> dict[str, Any]:
        """What so many questions a day read and save, and after how many days building has paid off."""
        even = self.break_even_questions
        return {
            "questions": n_questions,
            "bytes_read": self.question_bytes[self.codec].value * n_questions,
            "seconds_saved": self.saved_ms.value * n_questions / 1e3,
            "break_even_days": even.value / n_questions if even and n_questions else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: totals too; a range without end is None."""
        even = self.break_even_questions
        totals: dict[str, Any] = {
            "covered_share": asdict(self.covered_share),
            "disk_bytes": asdict(self.disk_bytes),
            "question_entries": asdict(self.question_entries),
            "question_bytes": {name: asdict(n) for name, n in self.question_bytes.items()},
            "build_seconds": asdict(self.build_seconds),
            "saved_ms": asdict(self.saved_ms),
            "break_even_questions": None if even is None else asdict(even),
        }
        if even is not None and even.high == math.inf:
            totals["break_even_questions"] |= {"high": None}
        return asdict(self) | totals


def break_even(cost: Guess, saved: Guess) -> Guess:
    """After how many questions that save `saved` each, `cost` has been paid: infinite means never."""

    def after(cost: float, saved: float) -> float:
        return max(cost, 0.0) / saved if saved > 0 else math.inf

    return Guess(
        after(cost.value, saved.value), after(cost.low, saved.high), after(cost.high, saved.low)
    )


def extrapolate(pairs: Pairs, total: Guess, n_units: float = math.inf) -> Guess:
    """The sum of y over all units, from some of them: pairs (x, y), `total` the sum of all x.

    y is taken to grow with x. From all `n_units` units the sum is exact; from a single one of many it
    may be half or twice as much.
    """
    n, sum_x, sum_y = len(pairs), sum(x for x, _ in pairs), sum(y for _, y in pairs)
    if n >= n_units and total.is_exact:
        return Guess.exact(sum_y)
    if not sum_x or not sum_y:
        return Guess.exact(0.0)
    if n == 1:
        return total.times(Guess(sum_y / sum_x, sum_y / sum_x / 2, sum_y / sum_x * 2))
    ratio = sum_y / sum_x
    spread = sum((y - ratio * x) ** 2 for x, y in pairs) / (n - 1)
    error = math.sqrt(spread * n * max(1 - n / n_units, 0.0)) / sum_x
    return total.times(Guess(ratio, max(ratio - 2 * error, 0.0), ratio + 2 * error))


def estimate(
    counted: Survey,
    costs: Costs,
    layout: KVLayout,
    codec: CodecName = "none",
    retrieval: RetrievalConfig | None = None,
    c2kv: Sequence[int] = (),
) -> Estimate:
    """What a store of the surveyed documents, with slots of the ratios `c2kv`, would cost."""
    retrieval = retrieval or RetrievalConfig()
    texts, sample = counted.texts, counted.chunks
    characters = Guess.exact(counted.n_characters)

    def of_texts(values: Sequence[float]) -> Guess:
        pairs = tuple((t.n_characters, y) for t, y in zip(texts, values, strict=True))
        return extrapolate(pairs, characters, counted.n_documents)

    tokens = of_texts([sum(text.chunk_tokens) for text in texts])
    chunks = of_texts([len(text.chunk_tokens) for text in texts])

    def of_chunks(values: Sequence[float]) -> Guess:
        pairs = tuple((len(c), y) for c, y in zip(sample, values, strict=True))
        return extrapolate(pairs, tokens, chunks.value)

    n_entries = [sum(map(len, ranges)) for ranges in counted.covered]
    nuggets = of_chunks([len(chunk.nuggets) for chunk in sample])
    codecs = {name: Codec(name, layout) for name in CODECS}

    def of_files(ratio: int, n_entries: Sequence[int]) -> dict[CodecName, Guess]:
        headers = extrapolate(costs.headers[ratio], chunks, chunks.value)
        return {
            name: of_chunks([chunk_bytes(one, n) for n in n_entries]) + headers
            for name, one in codecs.items()
        }

    rows = chunks + nuggets
    n_read = Guess.exact(counted.read_seconds)
    drawn = draw_questions(sample, retrieval, _DRAWS)
    covered = dict(zip((chunk.chunk_id for chunk in sample), counted.covered, strict=True))
    forms: list[tuple[Form, int | None]] = [
        ("spans", None),
        ("chunks", None),
        *product(_OF_SLOTS, c2kv),
    ]
    return Estimate(
        codec=codec,
        n_documents=counted.n_documents,
        chunks=chunks,
        tokens=tokens,
        nuggets=nuggets,
        covered_tokens=of_chunks(n_entries),
        kv_bytes=of_files(1, n_entries),
        slot_bytes={
            k: of_files(k, [Codec(codec, layout, k).entries(len(it)) for it in sample])
            for k in c2kv
        },
        catalog_bytes=costs.catalog.at(tokens),
        index_bytes=costs.index.at(rows),
        ram_bytes=Guess.exact(costs.ram_bytes).times(_LONGER_RUN)
        + rows.times(costs.vector_bytes + _ROW_BYTES),
        gpu_bytes=costs.gpu_bytes,
        build={
            "read": n_read + _scaled(counted.cut_seconds, tokens, _n_tokens(counted)),
            "nuggets": _scaled(counted.nugget_seconds, tokens, sum(map(len, sample))),
            "encode": extrapolate(costs.encode, tokens),
            "catalog": extrapolate(costs.put_catalog, Guess.exact(counted.n_documents)),
            "embed": extrapolate(costs.embed_chunks, chunks)
            + extrapolate(costs.embed_nuggets, nuggets),
            "index": extrapolate(costs.put_index, rows),
        },
        readings=tuple(
            _reading(form, ratio, retrieval.n_raw, drawn, covered, codecs) for form, ratio in forms
        ),
        context_tokens=costs.context_tokens,
        full_ms=extrapolate(costs.full_ms, Guess.exact(1)),
        spans_ms=extrapolate(costs.spans_ms, Guess.exact(1)),
    )


def _reading(
    form: Form,
    ratio: int | None,
    n_raw: int,
    drawn: Sequence[Found],
    covered: Mapping[ChunkId, Sequence[Span]],
    codecs: Mapping[CodecName, Codec],
) -> Reading:
    """What questions read in a form; `covered` are the ranges whose entries are stored."""
    entries, encoded, stored = [], [], []
    for found in drawn:
        refs = found.refs(form, ratio or 1, n_raw)
        missing = {
            ref.chunk_id
            for ref in refs
            if ref.ratio == 1
            and codecs["none"].rows(covered[ref.chunk_id], Span(ref.start, ref.stop)) is None
        }
        entries.append(sum(ref.n_entries for ref in refs))
        encoded.append(len(missing))
        stored.append([it.n_entries for it in refs if it.ratio > 1 or it.chunk_id not in missing])
    return Reading(
        form=form,
        ratio=ratio,
        entries=_typical(entries),
        n_bytes={
            name: _typical([sum(map(one.n_bytes, sizes)) for sizes in stored])
            for name, one in codecs.items()
        },
        encoded=_typical(encoded),
    )


def _n_tokens(counted: Survey) -> int:
    return sum(sum(text.chunk_tokens) for text in counted.texts)


def _scaled(seconds: float, total: Guess, n: float) -> Guess:
    """Seconds for `total`, from those for `n`."""
    return total.times(seconds / n)


def _typical(values: Sequence[float]) -> Guess:
    """The mean of what questions need, and the range of nine in ten of them."""
    ranked = sorted(values)
    last = len(ranked) - 1
    return Guess(sum(ranked) / len(ranked), ranked[round(0.05 * last)], ranked[round(0.95 * last)])
