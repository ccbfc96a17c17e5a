"""The engine: owns a model, a store and a composer, and answers from spans."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from coinrag_integrations.engine import gate
from coinrag_integrations.engine.adapter import Adapter, with_adapter
from coinrag_integrations.engine.answer import Answer, AnswerStream
from coinrag_integrations.engine.asking import Asking
from coinrag_integrations.engine.c2kv.extraction import SlotEncoder
from coinrag_integrations.engine.c2kv.extractor import Extractor
from coinrag_integrations.engine.chunking import chunk_document
from coinrag_integrations.engine.composer import Composer
from coinrag_integrations.engine.config import EngineConfig
from coinrag_integrations.engine.conversation import Conversations
from coinrag_integrations.engine.cost import CostModel
from coinrag_integrations.engine.encoder import Encoder, encode
from coinrag_integrations.engine.fingerprint import Fingerprint
from coinrag_integrations.engine.forms import ChunkForms, Forms
from coinrag_integrations.engine.generation import GenerationConfig
from coinrag_integrations.engine.handles import Handles, owner_of
from coinrag_integrations.engine.kept import KeptPrefixes
from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.engine.messages import Message
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.plan import (
    Piece,
    PrefixPlan,
    Text,
    arrange,
)
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.prompt import build_prompt
from coinrag_integrations.engine.prompt_cache import PromptCache
from coinrag_integrations.engine.repair import repairs_of
from coinrag_integrations.engine.runner import StaticRunners
from coinrag_integrations.engine.source import Source
from coinrag_integrations.engine.store import (
    Disk,
    Limits,
    Remote,
    open_scope,
    scope_folder,
    variants,
)
from coinrag_integrations.engine.store.disk import KV
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.upload import Uploader
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.types import Chunk, ChunkId, Document, Scope, Span, SpanRef

logger = logging.getLogger(__name__)


class Engine:
    """Encodes chunks into a store and answers questions from spans of them.

    Not tied to any database or framework: spans come as `SpanRef`s, best first.
    """

    def __init__(
        self,
        model: LoadedModel,
        folder: str | Path,
        config: EngineConfig | None = None,
        *,
        scope: Scope | None = None,
        limits: Limits | None = None,
        remote: Remote | None = None,
        adapter: Adapter | None = None,
        extractor: Extractor | None = None,
        add_fingerprint: bool = False,
    ) -> None:
        """Open the store in `folder` (created if needed) for `model`.

        Only what belongs to `scope` can be seen. `limits` bound the bytes of the whole folder. KV goes
        to `remote` as well, and is read from there when the folder has it no more.
        `adapter` reads what is cached: chunks are encoded by `model` alone, answers computed with it.
        `extractor` makes the slots that `config.c2kv` asks for (None: untrained ones).
        `add_fingerprint` lets KV of another encoding stand beside what is there.

        Raises:
            ModelError: the adapter, or the extractor, belongs to another model.
            ConfigError: CUDA graphs without a GPU, or kernels that cannot run here.
            UnsupportedModelError: the model does not pass the correctness gate.
            FingerprintMismatchError: the store was built differently.
            StoreError: the folder cannot be used.
        """
        self.model = model
        self.config = config or EngineConfig()
        execution = self.config.execution
        if execution == "graph" and model.device.type != "cuda":
            raise ConfigError(
                f"execution='graph' needs a GPU, the model is on {model.device}: use 'eager'"
            )
        self.reader = model if adapter is None else with_adapter(model, adapter)
        self.static = None if execution == "eager" else StaticRunners(self.reader, execution)
        self.kernels = choose_kernels(self.config.kernels, model.device)
        self.gate = gate.check(model, self.kernels.place)
        self.prompt = build_prompt(model.tokenizer, self.config.prompt)
        # Entries [P, L, 2, H, D] of what stands before the first span: mostly the prompt's head.
        self._prompts = PromptCache(encode=lambda ids: encode(model, [ids])[0].cpu().contiguous())
        self._prompts.get(self.prompt.head)
        self.scope = scope or Scope()
        self.disk = Disk(Path(folder), limits)
        self.folder = scope_folder(Path(folder), self.scope)
        self.remote, self.cost = remote, CostModel()
        after = self.prompt.head if self.config.context == "after_prompt" else ()
        encoder = Encoder(
            model=model, after=after, prompts=self._prompts, kernels=self.kernels, cost=self.cost
        )
        slots = SlotEncoder.of(model, extractor) if self.config.c2kv else None
        self.catalog, self.store = open_scope(
            self.disk,
            self.scope,
            model.layout,
            self.fingerprint,
            add_fingerprint=add_fingerprint,
            quantise=self.kernels.quantise,
            memory_bytes=self.config.memory_bytes,
            remote=remote,
        )
        beside = {
            ratio: self.store.beside(self.fingerprint.of_slots(slots.extractor.digest, ratio))
            for ratio in self.config.c2kv
            if slots is not None
        }
        self.forms = ChunkForms(
            encoder=encoder,
            slots=slots,
            stores={1: self.store, **beside},
            coverage=self.config.coverage,
            batch_tokens=self.config.batch_tokens,
        )
        repairs = repairs_of(
            self.forms, self.catalog, self.disk, self.scope, remote, self.config.chunk_tokens
        )
        self._chunk = repairs[1].chunk
        self._kept = KeptPrefixes(max_bytes=self.config.kept_bytes)
        budget = self.config.max_entries
        self._asking = Asking(
            model=self.reader,
            composer=Composer(
                layout=model.layout,
                rope=model.rope,
                kernels=self.kernels,
                device=model.device,
                sources={
                    ratio: Source(
                        store=it.store,
                        cost=it.cost,
                        recompute=it.recompute if self.config.on_miss == "recompute" else None,
                        decline=it.decline if self.config.load == "auto" else None,
                    )
                    for ratio, it in repairs.items()
                },
                prompts=self._prompts,
                uploader=Uploader.of(model.device),
            ),
            static=self.static,
            max_entries=model.window if budget is None else min(budget, model.window),
        )
        logger.info("kernels: %s (%s)", self.kernels.name, self.kernels.reason)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Everything that the bytes of this engine's chunks depend on."""
        after = self.config.context == "after_prompt"
        context = f"after_prompt:{self.prompt.digest}" if after else "alone"
        return self.model.fingerprint(context, self.config.codec)

    @cached_property
    def handles(self) -> Handles:
        """Writes and reads the handles of this engine's spans."""
        owners = {
            ratio: owner_of(self.scope, store.fingerprint.digest)
            for ratio, store in self.forms.stores.items()
        }
        return Handles(key=self.catalog.secret(), owners=owners, find=self.catalog.find)

    # -- encoding ------------------------------------------------------------------------------

    def chunk(self, document: Document) -> tuple[Chunk, ...]:
        """Cut a document into chunks by the model's own tokenizer."""
        return chunk_document(document, self.model.tokenizer, self.config.chunk_tokens, self.scope)

    def encode(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Forms]]:
        """Each chunk in all forms: by ratio its kv [T, L, 2, H, D] (1), or slots. A batch at a time.

        Raises:
            BudgetError: a chunk does not fit the model's window.
        """
        return self.forms.encode(chunks)

    def store_chunk(self, chunk: Chunk, forms: Forms, *, anew: bool = False) -> None:
        """Write what the coverage asks for of each form that `encode` made, unless it is there."""
        self.forms.store(chunk, forms, anew=anew)

    def covered(self, chunk: Chunk) -> list[Span]:
        """The token ranges to store: the nuggets' union, or everything if there are none."""
        return self.forms.covered(chunk)

    def is_stored(self, chunk: Chunk) -> bool:
        """Whether the store holds, readable and in all forms, every token that the coverage asks for.

        Raises:
            RemoteError: the remote storage cannot be reached.
        """
        return all(self.forms.is_stored(chunk, ratio) for ratio in self.forms.stores)

    def remove_chunk(self, chunk_id: ChunkId) -> None:
        """Remove a chunk's KV of every fingerprint, also from memory. For the one writing process.

        Raises:
            StoreError: the disk, or the remote storage, refuses.
        """
        for store in self.forms.stores.values():
            store.forget(chunk_id)
        self._kept.forget()
        variants.delete_everywhere(self.folder / KV, chunk_id, self.remote, self.scope)

    # -- answering -----------------------------------------------------------------------------

    def plan(self, refs: Sequence[SpanRef]) -> PrefixPlan:
        """Where the prompt's entries and the spans' will lie.

        Raises:
            BudgetError: more entries than the budget or the model's window allows.
        """
        return self.plan_pieces([Text(self.prompt.head), *arrange(refs)])

    def plan_pieces(self, pieces: Sequence[Piece], n_kept: int = 0) -> PrefixPlan:
        """Where spans and the text around them will lie, in the order given, behind `n_kept` rows.

        Raises:
            BudgetError: more rows than the budget or the model's window allows.
        """
        return self._asking.plan(pieces, n_kept)

    def compose(
        self, refs: Sequence[SpanRef], watch: Stopwatch | None = None, *, room: int = 0
    ) -> tuple[Prefix, tuple[SpanRef, ...]]:
        """The prefix of the prompt's head and these spans, and the spans recomputed on the way."""
        watch = watch or Stopwatch(self.model.device)
        composed = self._asking.compose([self.plan(refs)], watch, room)
        return composed.prefix, composed.loaded[0].recomputed

    def answer(
        self, question: str, refs: Sequence[SpanRef], generation: GenerationConfig | None = None
    ) -> Answer:
        """Answer from cached spans, best first. Only the question's tokens are computed."""
        return _finish(self.stream(question, refs, generation))

    def answer_batch(
        self,
        questions: Sequence[tuple[str, Sequence[SpanRef]]],
        generation: GenerationConfig | None = None,
    ) -> list[Answer]:
        """Answer several questions at once, each from its own spans.

        The answers are those that each question would get alone. Their timings are the batch's.

        Raises:
            BudgetError: spans, question and answer do not fit.
        """
        watch = Stopwatch(self.model.device)
        requests = [(self.plan(refs), self.prompt.tail(question)) for question, refs in questions]
        if not requests:
            return []
        batch = self._asking.several(requests, generation or GenerationConfig(), watch)
        for _ in batch.run():
            pass
        return batch.answers()

    def stream(
        self,
        question: str,
        context: Sequence[SpanRef | str],
        generation: GenerationConfig | None = None,
    ) -> AnswerStream:
        """Like `answer`, a piece of text at a time. Passages that are in no store come as texts.

        Raises:
            BudgetError: context, question and answer do not fit.
        """
        return self.stream_pieces(self.prompt.around(question, context), generation)

    def stream_pieces(
        self, pieces: Sequence[Piece], generation: GenerationConfig | None = None
    ) -> AnswerStream:
        """Go on after spans and text in any order, the last of them text.

        The spans come from the store, text before the first span from the prompt cache (keyed by its
        token ids); all other text is computed in one pass, wherever it stands, each token seeing
        exactly what stands before it. Without any span this is a plain forward pass.

        Raises:
            ConfigError: the last piece is not text.
            BudgetError: pieces and answer do not fit.
        """
        return AnswerStream(self._asking.one(pieces, generation or GenerationConfig()))

    def chat(
        self,
        messages: Sequence[Message],
        generation: GenerationConfig | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        use_kv: bool = True,
    ) -> AnswerStream:
        """Go on after a conversation, through the model's chat template.

        Handles in the messages that can be believed become the spans they stand for. What this
        conversation has in common with an earlier one, from its beginning, is not computed again. With
        `use_kv=False` handles are left out, and everything is computed. The model is told of `tools`
        (`engine.tool_calls`, which also reads its calls), in the template's own form if it has one.

        Raises:
            ConfigError: no messages, the template refuses them, or tools without names of their own.
            BudgetError: messages and answer do not fit.
        """
        generation = generation or GenerationConfig()
        return self._conversations.chat(messages, generation, use_kv, tools)

    def complete(
        self, text: str, generation: GenerationConfig | None = None, *, use_kv: bool = True
    ) -> AnswerStream:
        """Go on after a text, without a template. Otherwise like `chat`.

        Raises:
            BudgetError: text and answer do not fit.
        """
        return self._conversations.complete(text, generation or GenerationConfig(), use_kv)

    def stream_full(
        self,
        question: str,
        chunk_ids: Sequence[ChunkId],
        generation: GenerationConfig | None = None,
    ) -> AnswerStream:
        """Answer by prefilling prompt, chunks and question anew: the baseline, no cache at all.

        Raises:
            ChunkNotFoundError, CorruptChunkError: a chunk is not in the catalog, or damaged there.
            BudgetError: the model's window is too small.
        """
        context = [Text(self._chunk(chunk_id).token_ids) for chunk_id in chunk_ids]
        pieces: list[Piece] = [Text(self.prompt.head), *context, Text(self.prompt.tail(question))]
        return self.stream_pieces(pieces, generation)

    # -- life ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the store and the catalog; the model stays."""
        self.forms.close()
        self.catalog.close()

    def __enter__(self) -> Self:
        """The engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    @cached_property
    def _conversations(self) -> Conversations:
        return Conversations(
            tokenizer=self.model.tokenizer,
            handles=self.handles,
            kept=self._kept,
            prompts=self._prompts,
            chunk=self._chunk,
            asking=self._asking,
        )


def _finish(stream: AnswerStream) -> Answer:
    for _ in stream:
        pass
    return stream.answer
