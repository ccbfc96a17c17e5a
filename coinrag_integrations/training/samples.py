"""Examples to what the model computes: composed KV, and the ids of question and answer behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.chunking import CHUNK_TOKENS, chunk_document
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import Kernels, choose_kernels
from coinrag_integrations.engine.plan import Text, arrange, plan_prefix
from coinrag_integrations.engine.prefix import empty_kv
from coinrag_integrations.engine.prompt import Prompt, build_prompt
from coinrag_integrations.evaluation.codecs import nearest_spans
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.evaluation.likelihood import answer_ids
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer, extract_nuggets
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.types import Chunk, ChunkId, SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """kv [L, 2, 1, H, n, D]: composed, of the base model; `ids` are computed behind it.

    The last `n_answer` of `ids` are the answer, with the token that ends it.
    """

    kv: torch.Tensor
    ids: tuple[int, ...]
    n_answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kitchen:
    """Makes samples as they are served: two-stage retrieval, KV cut out of whole chunks, one prefix.

    `head` [P, L, 2, H, D] are the entries of the prompt's head.
    """

    model: LoadedModel
    embedder: Embedder
    config: ReaderConfig
    kernels: Kernels
    prompt: Prompt
    head: torch.Tensor
    proposer: NuggetProposer

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        embedder: Embedder,
        config: ReaderConfig,
        proposer: NuggetProposer | None = None,
    ) -> Kitchen:
        """For a base model; the rules propose nuggets unless something else does."""
        prompt = build_prompt(model.tokenizer, config.prompt)
        return cls(
            model=model,
            embedder=embedder,
            config=config,
            kernels=choose_kernels("auto", model.device),
            prompt=prompt,
            head=encode(model, [prompt.head])[0].contiguous(),
            proposer=proposer or RuleProposer(),
        )

    def sample(self, example: Example, random: Random) -> Sample:
        """Retrieve, encode what was found, compose.

        Raises:
            BudgetError: the example does not fit the model's window.
            ConfigError: its answer is empty.
        """
        chunks, refs = self.retrieve(example)
        if random.random() < self.config.shuffle:
            random.shuffle(refs)
        answer = (*answer_ids(self.prompt, example.answers[0]), self._end)
        online = (*self.prompt.tail(example.question), *answer)
        if self.config.context == "text":
            by_id = {chunk.chunk_id: chunk for chunk in chunks}
            found = [by_id[r.chunk_id].token_ids[r.start : r.stop] for r in arrange(refs)]
            ids = (*self.prompt.head, *(token for part in found for token in part), *online)
            nothing = empty_kv(self.model.layout, 0, self.model.device)
            return Sample(kv=nothing, ids=ids, n_answer=len(answer))
        return Sample(kv=self._compose(chunks, refs), ids=online, n_answer=len(answer))

    def retrieve(self, example: Example) -> tuple[list[Chunk], list[SpanRef]]:
        """The nearest chunks of an example, and the nearest of their nuggets, best first."""
        tokenizer, n_chunks = self.model.tokenizer, self.config.n_chunks
        chunks = [c for d in example.documents for c in chunk_document(d, tokenizer, CHUNK_TOKENS)]
        vectors = self.embedder.embed_documents([chunk.text for chunk in chunks])
        scores = vectors @ self.embedder.embed_query(example.question)
        nearest = [chunks[i] for i in np.argsort(-scores, kind="stable")[:n_chunks]]
        found = [extract_nuggets(chunk, self.proposer) for chunk in nearest]
        refs = nearest_spans(example.question, found, self.embedder, self.config.n_nuggets)
        return found, refs

    @property
    def _end(self) -> int:
        """The token that ends an answer."""
        eos = self.model.tokenizer.hf.eos_token_id
        return int(eos) if eos is not None else min(self.model.stop_ids)

    def _compose(self, chunks: Sequence[Chunk], refs: Sequence[SpanRef]) -> torch.Tensor:
        plan = plan_prefix([Text(self.prompt.head), *arrange(refs)], max_entries=self.model.window)
        wanted = dict.fromkeys(ref.chunk_id for ref in refs)
        read = [chunk for chunk in chunks if chunk.chunk_id in wanted]
        encoded = encode(self.model, [chunk.token_ids for chunk in read])
        entries: dict[ChunkId, torch.Tensor] = {
            chunk.chunk_id: kv for chunk, kv in zip(read, encoded, strict=True)
        }
        device = self.model.device
        kv = empty_kv(self.model.layout, plan.n_entries, device)
        rotation = self.model.rope.rotation(plan.positions(), device)
        rows = torch.arange(plan.n_entries, device=device)
        head = slice(0, len(plan.head))
        self.kernels.place(self.head, rotation[head], kv, rows[head])
        for segment in plan.segments:
            ref, to = segment.ref, slice(segment.row, segment.row + len(segment.ref))
            part = entries[ref.chunk_id][ref.start : ref.stop].contiguous()
            self.kernels.place(part, rotation[to], kv, rows[to])
        return kv
