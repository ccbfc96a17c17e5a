"""Examples to what the model computes: composed KV, and the ids of question and answer behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.c2kv import Blocks
from coinrag_integrations.engine.chunking import CHUNK_TOKENS, chunk_document
from coinrag_integrations.engine.plan import arrange
from coinrag_integrations.engine.prefix import empty_kv
from coinrag_integrations.errors import BudgetError
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.evaluation.likelihood import answer_ids
from coinrag_integrations.evaluation.rivals import Composed, Kitchen, Task, make_task
from coinrag_integrations.evaluation.rivals.kitchen import Cached, plan_pieces
from coinrag_integrations.evaluation.rivals.links import kvlink
from coinrag_integrations.evaluation.rivals.spans import spans
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer, extract_nuggets
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.training.kept import KeptEntries
from coinrag_integrations.types import SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What entries are cut from, where the weights that encode are trained too.

    Each of `sequences` is encoded alone; a slice is a sequence's number and a half-open range in it.
    """

    sequences: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[int, int, int], ...]

    def __len__(self) -> int:
        """Entries."""
        return sum(stop - start for _, start, stop in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Chunks whose slots are made by what is trained, behind the prompt's head.

    `head` [P, L, 2, H, D] and of each of `chunks` its `entries` [T, L, 2, H, D] are the base model's.
    There is a slot for every `ratio` tokens. Rows, first the head's, are turned to positions `turns`.
    """

    head: torch.Tensor
    chunks: tuple[tuple[int, ...], ...]
    entries: tuple[torch.Tensor, ...]
    ratio: int
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """kv [L, 2, 1, H, N, D]: composed, of the base model (or its source); `ids` are computed behind it.

    `rows` and `at` are the positions of the N entries and of the ids. The last `n_answer` of `ids` are
    the answer, with the token that ends it.
    """

    kv: torch.Tensor | Source | Slots
    ids: tuple[int, ...]
    n_answer: int
    rows: tuple[int, ...]
    at: tuple[int, ...]

    @property
    def is_plain(self) -> bool:
        """Whether everything stands behind each other, entries before ids."""
        return (*self.rows, *self.at) == tuple(range(len(self)))

    def __len__(self) -> int:
        """Entries and ids."""
        return len(self.rows) + len(self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Makes samples as they are served: two-stage retrieval, KV cut out of whole chunks, one prefix."""

    kitchen: Kitchen
    embedder: Embedder
    config: ReaderConfig
    proposer: NuggetProposer
    kept: KeptEntries | None = None

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        embedder: Embedder,
        config: ReaderConfig,
        proposer: NuggetProposer | None = None,
        *,
        reader: LoadedModel | None = None,
        kept: KeptEntries | None = None,
    ) -> Sampler:
        """For a base model; the rules propose nuggets unless something else does.

        `reader` is what is trained, where it has link tokens. Slots are made of entries that are `kept`.
        """
        return cls(
            kitchen=Kitchen(model, config.prompt, reader=reader),
            embedder=embedder,
            config=config,
            proposer=proposer or RuleProposer(),
            kept=kept,
        )

    def sample(self, example: Example, random: Random) -> Sample:
        """Retrieve, encode what was found unless its encoder is trained, compose. By one thread at a time.

        Raises:
            BudgetError: the example does not fit the model's window, or `max_tokens`.
            ConfigError: its answer is empty.
        """
        task, in_slots = self.retrieve(example), self.config.kind == "c2kv"
        if in_slots:  # any number of the nearest
            task = replace(task, chunks=task.chunks[: random.randint(1, self.config.n_chunks)])
        if random.random() < self.config.shuffle:
            task = _shuffled(task, random)
        answer = (*answer_ids(self.kitchen.prompt, example.answers[0]), self._end)
        if in_slots:
            return self._slots(task, answer, random.choice(self.config.ratios))
        return self._fitting(self._sample(task, answer))

    def retrieve(self, example: Example) -> Task:
        """The nearest chunks of an example, and the nearest of their nuggets (slots need none)."""
        tokenizer = self.kitchen.model.tokenizer
        whole = self.config.kind == "c2kv"
        chunks = [
            chunk if whole else extract_nuggets(chunk, self.proposer)
            for document in example.documents
            for chunk in chunk_document(document, tokenizer, CHUNK_TOKENS)
        ]
        return make_task(
            example.question,
            chunks,
            self.kitchen.prompt,
            self.embedder,
            n_chunks=self.config.n_chunks,
            n_nuggets=self.config.n_nuggets,
        )

    def _sample(self, task: Task, answer: Sequence[int]) -> Sample:
        online = (*task.tail, *answer)
        if self.config.context == "text":
            model = self.kitchen.model
            words = (token for ref in task.spans for token in task.ids_of(ref))
            nothing = empty_kv(model.layout, 0, model.device)
            return _packed(nothing, 0, (*task.head, *words, *online), len(answer))
        whole = self.config.context == "chunks"
        if self.config.kind == "full":
            refs = [chunk.ref() for chunk in task.chunks] if whole else task.spans
            source = _source(task, refs)
            return _packed(source, len(source), online, len(answer))
        compose = kvlink if self.kitchen.links else _chunks
        composed = compose(self.kitchen, task) if whole else spans(self.kitchen, task)
        self.kitchen.forget()
        prefix = composed.prefix
        (plan,) = prefix.plans
        ids = (*plan.online_ids, *online)
        behind = range(plan.n_rows, plan.n_rows + len(online))
        return Sample(
            kv=prefix.kv[..., : prefix.n_entries, :],
            ids=ids,
            n_answer=len(answer),
            rows=tuple(plan.positions().tolist()),
            at=(*plan.online_positions().tolist(), *behind),
        )

    def _slots(self, task: Task, answer: Sequence[int], ratio: int) -> Sample:
        """Laid out as it is served; the slots themselves are made where they are learnt."""
        kitchen, blocks = self.kitchen, Blocks(ratio=ratio)
        known = {} if self.kept is None else self.kept.read(task.chunks)
        entries = tuple(
            known[it.chunk_id] if it.chunk_id in known else kitchen.entries(it)
            for it in task.chunks
        )
        if self.kept is not None:
            pairs = zip(task.chunks, entries, strict=True)
            self.kept.keep((it, kv) for it, kv in pairs if it.chunk_id not in known)
        kitchen.forget()
        pieces = []
        for chunk, own in zip(task.chunks, entries, strict=True):
            at = blocks.positions(len(chunk))
            pieces.append(Cached.fewer(chunk, own[at], at))
        plan, turns = plan_pieces(task.head, pieces, "packed")
        ids = (*task.tail, *answer)
        sample = Sample(
            kv=Slots(
                head=kitchen.head,
                chunks=tuple(chunk.token_ids for chunk in task.chunks),
                entries=entries,
                ratio=ratio,
                turns=tuple(turns.tolist()),
            ),
            ids=ids,
            n_answer=len(answer),
            rows=tuple(plan.positions().tolist()),
            at=tuple(range(plan.n_rows, plan.n_rows + len(ids))),
        )
        return self._fitting(sample, plan.length + len(ids))

    def _fitting(self, sample: Sample, n_tokens: int | None = None) -> Sample:
        """The sample, if the tokens that it stands for (None: its own) fit."""
        n_tokens = len(sample) if n_tokens is None else n_tokens
        most = min(self.kitchen.model.window, self.config.max_tokens or self.kitchen.model.window)
        if n_tokens > most:
            raise BudgetError(f"{n_tokens} tokens of an example exceed {most}: raise max_tokens")
        return sample

    @property
    def _end(self) -> int:
        """The token that ends an answer."""
        model = self.kitchen.model
        eos = model.tokenizer.hf.eos_token_id
        return int(eos) if eos is not None else min(model.stop_ids)


def _chunks(kitchen: Kitchen, task: Task) -> Composed:
    return kvlink(kitchen, task, links=0)


def _packed(
    kv: torch.Tensor | Source, n_entries: int, ids: tuple[int, ...], n_answer: int
) -> Sample:
    """Ids right behind entries."""
    rows, at = range(n_entries), range(n_entries, n_entries + len(ids))
    return Sample(kv=kv, ids=ids, n_answer=n_answer, rows=tuple(rows), at=tuple(at))


def _shuffled(task: Task, random: Random) -> Task:
    """Spans, and chunks, in another order."""
    mixed = random.sample(task.spans, len(task.spans))
    chunks = random.sample(task.chunks, len(task.chunks))
    return replace(task, spans=tuple(arrange(mixed)), chunks=tuple(chunks))


def _source(task: Task, refs: Sequence[SpanRef]) -> Source:
    """The prompt's head, and spans of the chunks that they lie in."""
    numbers = {chunk_id: i for i, chunk_id in enumerate(dict.fromkeys(r.chunk_id for r in refs), 1)}
    by_id = {chunk.chunk_id: chunk.token_ids for chunk in task.chunks}
    return Source(
        sequences=(task.head, *(by_id[chunk_id] for chunk_id in numbers)),
        slices=(
            (0, 0, len(task.head)),
            *((numbers[ref.chunk_id], ref.start, ref.stop) for ref in refs),
        ),
    )
