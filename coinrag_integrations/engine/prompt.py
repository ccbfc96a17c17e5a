"""The prompt around the cached context: what comes before it, and what the question adds.

The head (system prompt and the opening of the user's turn) is the same for every question, so its
KV is computed once. The tail holds the question and opens the answer; it is computed online.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from jinja2 import TemplateError

from coinrag_integrations.engine.fingerprint import canonical_digest
from coinrag_integrations.engine.plan import Piece, Text, arrange
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.types import SpanRef

_CONTEXT, _QUESTION = "\u27eacontext\u27eb", "\u27eaquestion\u27eb"  # ⟪…⟫: never in a template


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """The words of the prompt. `user` holds `{context}` and then `{question}`, once each.

    `answer` opens the model's turn: small models then answer instead of repeating the question.
    """

    system: str = "You answer questions from the given passages with a short phrase."
    user: str = "Passages:\n{context}\n\nQuestion: {question}\nShort answer:"
    answer: str = ""

    def __post_init__(self) -> None:
        """Refuse a template without its two slots in order."""
        parts = self.user.split("{context}")
        if len(parts) != 2 or parts[1].count("{question}") != 1 or "{question}" in parts[0]:
            raise ConfigError(
                "the prompt's user text needs {context} and after it {question}, once each: "
                f"got {self.user!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A template in the model's own tokens. `head` comes before the context."""

    head: tuple[int, ...]
    before_question: tuple[int, ...]
    after_question: tuple[int, ...]
    tokenizer: TextTokenizer

    def tail(self, question: str) -> tuple[int, ...]:
        """The tokens to compute online. Control tokens typed in `question` stay plain text.

        Raises:
            ConfigError: as for `check_question`.
        """
        check_question(question)
        words = self.tokenizer.encode(question.strip()).ids
        return (*self.before_question, *words, *self.after_question)

    def around(self, question: str, context: Sequence[SpanRef | str]) -> list[Piece]:
        """The whole prompt: head, context, and the question with what follows.

        Raises:
            ConfigError: as for `check_question`.
        """
        return [Text(self.head), *self.context(context), Text(self.tail(question))]

    def context(self, context: Sequence[SpanRef | str]) -> list[Piece]:
        """Spans in the store's order, and texts, with blank lines around these, where they stand."""
        pieces: list[Piece] = []
        for is_text, run in groupby(context, key=lambda it: isinstance(it, str)):
            if not is_text:
                pieces += arrange([it for it in run if isinstance(it, SpanRef)])
                continue
            words = "".join(f"\n\n{it.strip()}" for it in run if isinstance(it, str))
            pieces.append(Text(self.tokenizer.encode(words + "\n\n").ids))
        return pieces

    @property
    def digest(self) -> str:
        """Hash of the head, for stores whose chunks were encoded after it."""
        return canonical_digest({"head": self.head})


def check_question(question: str) -> None:
    """Refuse what cannot be asked.

    Raises:
        ConfigError: the question is empty, or holds half a character.
    """
    if not question.strip():
        raise ConfigError("the question is empty: ask something")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the question has an unpaired surrogate at character {error.start}, which is no text"
        ) from error


def build_prompt(tokenizer: TextTokenizer, template: PromptTemplate) -> Prompt:
    """Render the template through the model's chat template, or as plain text if it has none.

    Raises:
        ConfigError: the chat template refuses the prompt, or changes the user's text.
    """
    user = template.user.replace("{context}", _CONTEXT).replace("{question}", _QUESTION)
    if tokenizer.hf.chat_template:
        rendered = _render(tokenizer, template.system, user)
    else:
        rendered = f"{tokenizer.hf.bos_token or ''}{template.system}\n\n{user}"
    head, found, rest = rendered.partition(_CONTEXT)
    before, found_question, after = rest.partition(_QUESTION)
    if not (found and found_question):
        raise ConfigError("the model's chat template does not keep the user's text unchanged")
    return Prompt(
        head=tokenizer.encode_template(head),
        before_question=tokenizer.encode_template(before),
        after_question=tokenizer.encode_template(after + template.answer),
        tokenizer=tokenizer,
    )


def _render(tokenizer: TextTokenizer, system: str, user: str) -> str:
    """Through the chat template; where it takes no system role, in front of the user's text."""
    try:
        return _apply(tokenizer, {"system": system, "user": user})
    except TemplateError:
        pass
    try:
        return _apply(tokenizer, {"user": f"{system}\n\n{user}"})
    except TemplateError as error:
        raise ConfigError(f"the model's chat template refuses our prompt: {error}") from error


def _apply(tokenizer: TextTokenizer, turns: dict[str, str]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns.items()]
    rendered = tokenizer.hf.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return str(rendered)
