"""Examples to what the model computes: composed KV, and the ids of question and answer behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.chunking import CHUNK_TOKENS, chunk_document
from coinrag_integrations.engine.plan import arrange
from coinrag_integrations.engine.prefix import empty_kv
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.evaluation.likelihood import answer_ids
from coinrag_integrations.evaluation.rivals import Kitchen, Task, make_task
from coinrag_integrations.evaluation.rivals.spans import spans
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer, extract_nuggets
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.training.config import ReaderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """kv [L, 2, 1, H, n, D]: composed, of the base model; `ids` are computed behind it.

    The last `n_answer` of `ids` are the answer, with the token that ends it.
    """

    kv: torch.Tensor
    ids: tuple[int, ...]
    n_answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Makes samples as they are served: two-stage retrieval, KV cut out of whole chunks, one prefix."""

    kitchen: Kitchen
    embedder: Embedder
    config: ReaderConfig
    proposer: NuggetProposer

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        embedder: Embedder,
        config: ReaderConfig,
        proposer: NuggetProposer | None = None,
    ) -> Sampler:
        """For a base model; the rules propose nuggets unless something else does."""
        return cls(
            kitchen=Kitchen(model, config.prompt),
            embedder=embedder,
            config=config,
            proposer=proposer or RuleProposer(),
        )

    def sample(self, example: Example, random: Random) -> Sample:
        """Retrieve, encode what was found, compose. By one thread at a time.

        Raises:
            BudgetError: the example does not fit the model's window.
            ConfigError: its answer is empty.
        """
        task = self.retrieve(example)
        if random.random() < self.config.shuffle:
            mixed = random.sample(task.spans, len(task.spans))
            task = replace(task, spans=tuple(arrange(mixed)))
        answer = (*answer_ids(self.kitchen.prompt, example.answers[0]), self._end)
        online = (*task.tail, *answer)
        if self.config.context == "text":
            model = self.kitchen.model
            words = (token for ref in task.spans for token in task.ids_of(ref))
            nothing = empty_kv(model.layout, 0, model.device)
            return Sample(kv=nothing, ids=(*task.head, *words, *online), n_answer=len(answer))
        prefix = spans(self.kitchen, task).prefix
        self.kitchen.forget()
        return Sample(kv=prefix.kv[..., : prefix.n_entries, :], ids=online, n_answer=len(answer))

    def retrieve(self, example: Example) -> Task:
        """The nearest chunks of an example, and the nearest of their nuggets."""
        tokenizer = self.kitchen.model.tokenizer
        chunks = [
            extract_nuggets(chunk, self.proposer)
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

    @property
    def _end(self) -> int:
        """The token that ends an answer."""
        model = self.kitchen.model
        eos = model.tokenizer.hf.eos_token_id
        return int(eos) if eos is not None else min(model.stop_ids)
