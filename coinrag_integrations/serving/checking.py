"""Whether a request may have the prefix that it asks for. Knows texts and tokens, no KV and no vllm.

A handle is believed in front of exactly the tokens that are stored, and a salt only if it is the one
that this prefix has; so whatever a request says, it can only get what its own tokens stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coinrag_integrations.engine.handles import Handles
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.request import PrefixRequest
from coinrag_integrations.serving.salt import is_ours, salt_of
from coinrag_integrations.types import Chunk, ChunkId, Scope, SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A request as the server got it. `odd` says what of it cannot go with a composed prefix."""

    params: object
    prompt: Sequence[int] | None
    salt: str | None
    odd: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A prefix to load: the tokens of its head, then spans, as the prompt shows them."""

    scope: Scope
    head: tuple[int, ...]
    refs: tuple[SpanRef, ...]

    @property
    def n_entries(self) -> int:
        """N: the first tokens of the prompt, which are not computed."""
        return len(self.head) + sum(ref.n_entries for ref in self.refs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The texts of one scope: who may name its spans, and which heads are prepared.

    `forms` are the digests of what is stored of them, by ratio, `tokenizer` is that of the tokenizer that
    they were cut with, and `chunk` gives one of them.
    """

    scope: Scope
    forms: Mapping[int, str]
    handles: Handles
    has_head: Callable[[Sequence[int]], bool]
    tokenizer: str
    chunk: Callable[[ChunkId], Chunk]


def check(request: Incoming, scopes: Mapping[Scope, Texts]) -> Injection | None:
    """The prefix that a request asks for; None if it asks for none.

    Raises:
        ConfigError: it asks for one that it may not have, or that is not what its tokens say.
        StoreError: the catalog cannot be read.
    """
    if not request.params and request.params in (None, {}):
        if is_ours(request.salt):
            raise ConfigError("the salt is that of a composed prefix, but no handles came with it")
        return None
    asked = PrefixRequest.from_params(request.params)
    if request.odd:
        raise ConfigError(f"a composed prefix cannot go with {request.odd}")
    if request.prompt is None:
        raise ConfigError("a composed prefix needs a prompt of token ids")
    if (texts := scopes.get(asked.scope)) is None:
        raise ConfigError(f"scope {asked.scope} is not served here")
    injection = _believed(asked, request.prompt, texts)
    expected = salt_of(
        key=texts.handles.key,
        forms=texts.forms,
        scope=asked.scope,
        head=injection.head,
        refs=injection.refs,
    )
    if request.salt != expected:
        raise ConfigError("cache_salt is not the salt of this prefix")
    return injection


def _believed(asked: PrefixRequest, prompt: Sequence[int], texts: Texts) -> Injection:
    """The head and the spans, each in front of its own tokens, and something behind them."""
    head = tuple(prompt[: asked.n_head])
    if len(head) < asked.n_head:
        raise ConfigError(f"n_head is {asked.n_head}, the prompt has {len(prompt)} tokens")
    if head and not texts.has_head(head):
        raise ConfigError(
            f"the first {len(head)} tokens are no head that was prepared: see serving.prepare"
        )
    refs: list[SpanRef] = []
    at = len(head)
    for number, name in enumerate(asked.handles):
        ref = _named(texts.handles, name, prompt, at)
        if ref is None:
            raise ConfigError(
                f"handle {number} is not believed: it is of another store, or its document is gone, "
                "or other tokens stand in its place"
            )
        refs.append(ref)
        at += ref.n_entries
    if not at:
        raise ConfigError("the prefix is empty: send the request without kv_transfer_params")
    if at >= len(prompt):
        raise ConfigError(f"nothing stands behind the {at} tokens of the prefix: add a question")
    return Injection(scope=asked.scope, head=head, refs=tuple(refs))


def entry_tokens(chunk: Chunk, ref: SpanRef) -> tuple[int, ...]:
    """The token that stands in a prompt for each entry of a span: of a slot, the last of its tokens."""
    last = min(ref.stop, len(chunk)) - 1
    ends = range(ref.start + ref.ratio - 1, last + ref.ratio, ref.ratio)
    return tuple(chunk.token_ids[min(end, last)] for end in ends)


def _named(handles: Handles, name: str, prompt: Sequence[int], at: int) -> SpanRef | None:
    for chunk, ref in handles.named(name):
        if tuple(prompt[at : at + ref.n_entries]) == entry_tokens(chunk, ref):
            return ref
    return None
