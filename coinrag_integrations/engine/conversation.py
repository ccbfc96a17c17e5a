"""Prompts that hold handles, and conversations that go on: what is cached of them, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coinrag_integrations.engine.answer import AnswerStream
from coinrag_integrations.engine.asking import Asking
from coinrag_integrations.engine.chat import Prepared, chat_pieces, text_pieces
from coinrag_integrations.engine.generation import GenerationConfig
from coinrag_integrations.engine.handles import Handles, without_handles
from coinrag_integrations.engine.kept import KeptPrefixes, atoms_of
from coinrag_integrations.engine.messages import Message
from coinrag_integrations.engine.plan import Piece, Text, has_slots, head_of, without
from coinrag_integrations.engine.prompt_cache import PromptCache
from coinrag_integrations.engine.runner import Runner
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.types import Chunk, ChunkId, SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Answers prompts of one engine. `chunk` gives a chunk out of the catalog."""

    tokenizer: TextTokenizer
    handles: Handles
    kept: KeptPrefixes
    prompts: PromptCache
    chunk: Callable[[ChunkId], Chunk]
    asking: Asking

    def chat(
        self,
        messages: Sequence[Message],
        generation: GenerationConfig,
        use_kv: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AnswerStream:
        """See `Engine.chat`."""
        resolve = self.handles.resolve if use_kv else without_handles
        prompt = chat_pieces(self.tokenizer, messages, resolve, tools)
        return self._go_on(prompt, generation, use_kv)

    def complete(self, text: str, generation: GenerationConfig, use_kv: bool) -> AnswerStream:
        """See `Engine.complete`."""
        resolve = self.handles.resolve if use_kv else without_handles
        return self._go_on(text_pieces(self.tokenizer, text, resolve), generation, use_kv)

    def _go_on(self, prompt: Prepared, generation: GenerationConfig, use_kv: bool) -> AnswerStream:
        """Behind what is kept of the prompt; and keep what is then there."""
        pieces = self._ending_in_text(prompt.pieces)
        if not use_kv:
            return AnswerStream(self.asking.one(pieces, generation))
        atoms = atoms_of(pieces)

        def keep(generated: Sequence[int], runner: Runner) -> None:
            self.kept.keep_from(runner, (*atoms, *generated))

        # Something has to be computed; and rows before slots are moved, which kept ones are not.
        rows = None if has_slots(pieces) else self.kept.longest(atoms[:-1])
        head = head_of(pieces)
        if rows is not None and rows.shape[3] <= len(head) and head in self.prompts:
            rows = None
        n_kept = 0 if rows is None else rows.shape[3]
        batch = self.asking.one(without(pieces, n_kept), generation, rows, keep)
        spans = tuple(piece for piece in pieces if isinstance(piece, SpanRef))
        return AnswerStream(batch, spans, prompt.refused)

    def _ending_in_text(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces; of a span that nothing stands behind, the tokens of the last entry are computed."""
        *before, last = pieces
        if isinstance(last, Text):
            return [*pieces]
        stop = last.start + (last.n_entries - 1) * last.ratio
        tokens = self.chunk(last.chunk_id).token_ids[stop : last.stop]
        rest = [replace(last, stop=stop)] if stop > last.start else []
        return [*before, *rest, Text(tokens)]
