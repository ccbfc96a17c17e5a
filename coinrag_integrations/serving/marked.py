"""Requests with handles in their text, as stock clients send them: rewritten into requests for prefixes.

Knows bodies of the OpenAI interface, and no transport. Whatever cannot be composed stays what it was, in
words: handles that are not believed are dropped, as everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coinrag_integrations.engine import Message
from coinrag_integrations.engine.chat import Prepared, chat_pieces, text_pieces
from coinrag_integrations.engine.handles import Handles, strip_handles
from coinrag_integrations.engine.plan import head_of
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.engine.tool_calls import map_strings
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.writing import PrefixWriter

logger = logging.getLogger(__name__)

# What means the same in /v1/completions as in /v1/chat/completions, and goes with a prefix.
_CARRIED = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "min_p", "n", "seed", "user", "priority"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words"),
        *("min_tokens", "max_tokens", "skip_special_tokens", "spaces_between_special_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("allowed_token_ids", "response_format", "structured_outputs", "request_id"),
        *("stream", "stream_options"),
    }
)
_PROMPTS = ("messages", "max_completion_tokens"), ("prompt", "logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The same request in two ways.

    `composed` is a body for /v1/completions that asks for `n_entries` of a prefix; None if there cannot
    be one, and `why`. `words` is the request as it came, without handles.
    """

    words: dict[str, Any]
    composed: dict[str, Any] | None = None
    n_entries: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """Rewrites requests to one server.

    `writers` are those of its scopes, `window` is the length of its longest sequence, in tokens.
    """

    tokenizer: TextTokenizer
    writers: tuple[PrefixWriter, ...]
    window: int

    def rewrite(self, body: Mapping[str, Any], *, chat: bool) -> Rewritten:
        """A request to /v1/chat/completions (`chat`) or to /v1/completions.

        Raises:
            StoreError: the catalog cannot be read.
        """
        asked = _PROMPTS[0 if chat else 1]
        words = {**body, asked[0]: map_strings(body.get(asked[0]), strip_handles)}
        if odd := [it for it in body.keys() - _CARRIED - {*asked} if body[it]]:
            logger.info("a request is answered as text, as it has %s", ", ".join(sorted(odd)))
            return Rewritten(words=words, why="fields that do not go with a prefix")
        try:
            writer, prepared = self._read(body, chat)
            written = writer.write(writer.ending_in_text(prepared.pieces))
        except ConfigError as error:
            return Rewritten(words=words, why=str(error))
        if written.params is None:
            logger.warning(
                "a request is answered as text, as its beginning was not prepared: "
                "python -m coinrag_integrations.serving STORE --request FILE"
            )
            return Rewritten(words=words, why="its beginning was not prepared")
        composed = {it: body[it] for it in _CARRIED & body.keys()}
        composed |= {
            "prompt": list(written.prompt),
            "kv_transfer_params": written.params,
            "cache_salt": written.salt,
        }
        if not chat:
            composed["logprobs"] = body.get("logprobs")
        else:  # the other interface stops after 16 tokens unless it is told
            most = body.get("max_completion_tokens") or body.get("max_tokens")
            composed["max_tokens"] = most or max(1, self.window - len(written.prompt))
        return Rewritten(words=words, composed=composed, n_entries=written.n_entries)

    def _read(self, body: Mapping[str, Any], chat: bool) -> tuple[PrefixWriter, Prepared]:
        """The pieces of a prompt, and the writer of the first scope that has written a handle in it.

        Raises:
            ConfigError: nobody has, or the prompt is no text.
        """
        texts = [it.content for it in messages_of(body)] if chat else [_text(body.get("prompt"))]
        for writer in self.writers:
            if any(writer.handles.resolve(text).n_spans for text in texts):
                return writer, read_prompt(self.tokenizer, writer.handles, body)
        raise ConfigError("no handle is believed")


def read_prompt(tokenizer: TextTokenizer, handles: Handles, body: Mapping[str, Any]) -> Prepared:
    """The prompt of a body, for whoever has written these handles: its `messages`, or its `prompt`.

    Raises:
        ConfigError: it has neither as text.
    """
    if "messages" in body:
        return chat_pieces(tokenizer, messages_of(body), handles.resolve)
    return text_pieces(tokenizer, _text(body.get("prompt")), handles.resolve)


def head_of_request(
    tokenizer: TextTokenizer, handles: Handles, body: Mapping[str, Any]
) -> tuple[int, ...]:
    """The tokens before the first span of a request, to be prepared.

    Raises:
        ConfigError: no handle in it is believed, or nothing stands before the first.
    """
    if head := head_of(read_prompt(tokenizer, handles, body).pieces):
        return head
    raise ConfigError("no passage with a handle of this store stands in the request, behind a text")


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The messages of a chat request.

    Raises:
        ConfigError: they are none, or hold calls, images or roles that no plain conversation has.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError("there are no messages")
    return [_message(it) for it in messages]


def _message(value: object) -> Message:
    if not isinstance(value, dict) or value.get("role") not in ("system", "user", "assistant"):
        raise ConfigError("a message is not of the system, the user or the assistant")
    if any(value[key] for key in value.keys() - {"role", "content"}):
        raise ConfigError("a message has more than a role and a content")
    return Message(role=value["role"], content=_text(value.get("content")))


def _text(content: object) -> str:
    """A content, perhaps in parts, which vLLM puts on lines of their own."""
    if isinstance(content, list) and content:
        parts = [it.get("text") if isinstance(it, dict) else None for it in content]
        kinds = {it.get("type") for it in content if isinstance(it, dict)}
        if kinds == {"text"} and all(isinstance(part, str) for part in parts):
            return "\n".join(map(str, parts))
    if not isinstance(content, str):
        raise ConfigError("a prompt is no text")
    return content
