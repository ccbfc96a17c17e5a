"""Text to token ids with exact character ranges. Knows tokenizers, not models.

Two ways of reading text never mix: `encode` treats it as somebody's words, so a typed `<|im_end|>`
stays eleven ordinary characters; `encode_template` lets control tokens through, for our own prompt.
Tokens that were added without being called special, but look like markup (`<tool_call>`, `[INST]`), are
control tokens too: models were trained to obey them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import tokenizers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from coinrag_integrations.errors import ConfigError, UnsupportedModelError

_MARKUP = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids of a text, and the character range of every token."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


class TextTokenizer:
    """A frozen copy of a tokenizer: no padding, no truncation, safe to share between threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Copy the fast tokenizer behind `tokenizer`.

        Raises:
            UnsupportedModelError: there is none, so character ranges are not to be had.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModelError(
                f"{type(tokenizer).__name__} gives no character ranges: convert it to a fast "
                "tokenizer (tokenizer.json)"
            )
        self.hf = tokenizer
        definition = tokenizer.backend_tokenizer.to_str()
        self._words = _frozen(definition, encode_special_tokens=True)
        self._template = _frozen(definition, encode_special_tokens=False)
        added = self._template.get_added_tokens_decoder()
        self._controls = {t.content: (i, t) for i, t in added.items() if _is_control(t)}
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        first, last = ({re.escape(it[i]) for it in self._controls} for i in (0, -1))
        edges = f"(?<=[{''.join(first)}])|(?=[{''.join(last)}])" if self._controls else "(?!)"
        self._edges = re.compile(edges)
        self.digest = hashlib.sha256(self._template.to_str().encode()).hexdigest()

    def __reduce__(self) -> tuple[type[TextTokenizer], tuple[PreTrainedTokenizerBase]]:
        """Pickled as the tokenizer it is a copy of."""
        return (TextTokenizer, (self.hf,))

    def encode(self, text: str) -> Encoding:
        """Tokens of somebody's words; control tokens are read as ordinary text.

        Raises:
            ConfigError: the text holds half a character.
        """
        try:
            encoding = self._words.encode(text, add_special_tokens=False)
        except TypeError as error:
            raise ConfigError(
                "a text has an unpaired surrogate (half a character of two), which is no text: "
                f"{text!r:.80}"
            ) from error
        return Encoding(tuple(encoding.ids), tuple(encoding.offsets))

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Token ids of our own prompt text, control tokens included."""
        return tuple(self._template.encode(text, add_special_tokens=False).ids)

    def split_template(self, text: str) -> list[int | str]:
        """Our own prompt text taken apart: the ids of control tokens, and the words between them."""
        parts: list[int | str] = []
        at = 0
        for found in self._control.finditer(text):
            token_id, token = self._controls[found.group()]
            words = text[at : found.start()]
            parts += [words.rstrip() if token.lstrip else words, token_id]
            at = found.end()
            if token.rstrip:
                at = len(text) - len(text[at:].lstrip())
        return [part for part in (*parts, text[at:]) if part != ""]

    def guard(self, words: str, mark: str) -> str:
        """Somebody's words with `mark` behind what may begin a control token, and before what may end one.

        Then they hold none in our own prompt text either, nor do they complete one that is cut in two.
        """
        return self._edges.sub(mark, words)

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """The text of generated tokens, without control tokens."""
        return self._template.decode(list(ids), skip_special_tokens=True)

    def decode_stream(self) -> TokenStream:
        """A decoder for one growing answer."""
        return TokenStream(self._template)


class TokenStream:
    """Turns generated tokens into text as they come, never half a character."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Start an empty answer."""
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, perhaps none."""
        return self._stream.step(self._tokenizer, token_id) or ""


def _frozen(definition: str, *, encode_special_tokens: bool) -> tokenizers.Tokenizer:
    copy = tokenizers.Tokenizer.from_str(definition)
    copy.no_padding()
    copy.no_truncation()
    if encode_special_tokens:
        added = copy.get_added_tokens_decoder().values()
        markup = [token for token in added if _is_control(token) and not token.special]
        for token in markup:
            token.special = True
        copy.add_special_tokens(markup)
    copy.encode_special_tokens = encode_special_tokens
    return copy


def _is_control(token: tokenizers.AddedToken) -> bool:
    return token.special or bool(_MARKUP.fullmatch(token.content))
