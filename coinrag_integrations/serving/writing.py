"""Pieces to what a server is sent: token ids, handles and a salt. Knows no transport and no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from coinrag_integrations.engine import Engine
from coinrag_integrations.engine.handles import Handles
from coinrag_integrations.engine.plan import Piece, Text, head_of, without
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.checking import Texts, entry_tokens
from coinrag_integrations.serving.prepared import MAX_HEADS, Heads
from coinrag_integrations.serving.request import MAX_HANDLES, PrefixRequest
from coinrag_integrations.serving.salt import salt_of
from coinrag_integrations.types import Chunk, ChunkId, Scope, SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A prompt for a server: what makes the first `n_entries` of its tokens a composed prefix.

    `text` are the tokens to be computed where they are not: the same, but for slots, which stand in
    `prompt` for several tokens each.
    """

    prompt: tuple[int, ...]
    text: tuple[int, ...]
    refs: tuple[SpanRef, ...] = ()
    n_entries: int = 0
    params: dict[str, Any] | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixWriter:
    """Writes prompts of one scope.

    `has_head` says what was prepared (`prepared.Heads`), `forms` are the digests of what is stored, by
    ratio.
    """

    scope: Scope
    forms: Mapping[int, str]
    handles: Handles
    has_head: Callable[[tuple[int, ...]], bool]
    chunk: Callable[[ChunkId], Chunk]

    @classmethod
    def of(cls, engine: Engine, max_heads: int = MAX_HEADS) -> Self:
        """The writer of an engine's spans, behind the prompt's head and others that are asked for.

        What a server needs for them is written into the store, if it is not there.

        Raises:
            StoreError: the disk refuses.
        """
        return cls(
            scope=engine.scope,
            forms={it: kv.fingerprint.digest for it, kv in engine.forms.stores.items()},
            handles=engine.handles,
            has_head=Heads(engine, max_heads),
            chunk=engine.catalog.chunk,
        )

    @classmethod
    def over(cls, texts: Texts) -> Self:
        """The writer of a scope whose model is not here: behind prepared heads, and no others."""
        return cls(
            scope=texts.scope,
            forms=texts.forms,
            handles=texts.handles,
            has_head=lambda ids: not ids or texts.has_head(ids),
            chunk=texts.chunk,
        )

    def write(self, pieces: Sequence[Piece]) -> Written:
        """The prompt of pieces, the last of them text.

        The text before the first span and the spans that directly follow become the prefix. A server
        goes on behind a prefix and nowhere else, so spans behind later text are written as text; and
        so are all of them behind a head for which there is no room any more.

        Raises:
            ConfigError: the last piece is not text.
            ChunkNotFoundError: a span is of a document that is gone.
        """
        if not pieces or not isinstance(pieces[-1], Text) or not pieces[-1].ids:
            raise ConfigError("the last piece must be text: there is nothing to go on after")
        ids = dict.fromkeys(piece.chunk_id for piece in pieces if isinstance(piece, SpanRef))
        chunks = {chunk_id: self.chunk(chunk_id) for chunk_id in ids}
        text = tuple(token for piece in pieces for token in _tokens(piece, chunks))
        head = head_of(pieces)
        refs = _first_spans(without(pieces, len(head)))
        names = tuple(self.handles.name(ref) for ref in refs)
        if not refs or not all(names) or len(names) > MAX_HANDLES or not self.has_head(head):
            return Written(prompt=text, text=text)
        entries = [it for ref in refs for it in entry_tokens(chunks[ref.chunk_id], ref)]
        asked = PrefixRequest(scope=self.scope, n_head=len(head), handles=names)
        salt = salt_of(
            key=self.handles.key,
            forms=self.forms,
            scope=self.scope,
            head=head,
            refs=refs,
        )
        return Written(
            prompt=(*head, *entries, *text[len(head) + sum(map(len, refs)) :]),
            text=text,
            refs=refs,
            n_entries=len(head) + len(entries),
            params=asked.to_params(),
            salt=salt,
        )

    def ending_in_text(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces; of spans that nothing stands behind, the last one is text."""
        *before, last = pieces
        if isinstance(last, Text):
            return [*before, last]
        return [*before, Text(_tokens(last, {last.chunk_id: self.chunk(last.chunk_id)}))]


def _tokens(piece: Piece, chunks: Mapping[ChunkId, Chunk]) -> tuple[int, ...]:
    """What a server computes of a piece that is not composed."""
    if isinstance(piece, Text):
        return piece.ids
    return chunks[piece.chunk_id].token_ids[piece.start : piece.stop]


def _first_spans(pieces: Sequence[Piece]) -> tuple[SpanRef, ...]:
    """The spans before the first text."""
    refs: list[SpanRef] = []
    for piece in pieces:
        if isinstance(piece, SpanRef):
            refs.append(piece)
        elif piece.ids:
            break
    return tuple(refs)
