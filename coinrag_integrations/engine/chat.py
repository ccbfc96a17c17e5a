"""Messages to pieces: a chat template around words and spans. Knows tokens and handles, not stores.

A template's own control tokens are read as such; everything that somebody wrote is read as ordinary
text, whatever it looks like. Without spans the tokens are those of `apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from coinrag_integrations.engine.handles import Reason, Resolved
from coinrag_integrations.engine.plan import Piece, Text, arrange
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.types import SpanRef

# Stands for a message's content while a template is rendered. The wide spaces show whether it trims.
_CONTENT = "\u2003\u27ea{}\u27eb\u2003"
_SLOT = re.compile("(\u2003?\u27ea\\d+\u27eb\u2003?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. `content` may hold handles; `role` is what the model's template knows."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What to go on after: the last piece is text, unless it is a span that nothing stands behind."""

    pieces: tuple[Piece, ...]
    refused: dict[Reason, int]


def chat_pieces(
    tokenizer: TextTokenizer, messages: Sequence[Message], resolve: Callable[[str], Resolved]
) -> Prepared:
    """The conversation, and the opening of the model's next turn.

    Where the template takes no system role, or wants turns to alternate, a system message goes in
    front of the user's words, and turns of the same role are joined.

    Raises:
        ConfigError: no messages, one that is no text, or the model's chat template refuses them.
    """
    if not messages:
        raise ConfigError("there are no messages: give at least one")
    shown = list(messages)
    try:
        rendered = _render(tokenizer, shown)
    except TemplateError:
        shown = _alternating(shown)
        try:
            rendered = _render(tokenizer, shown)
        except TemplateError as error:
            raise ConfigError(
                f"the model's chat template refuses these messages: {error}"
            ) from error
    parts: list[int | str | Resolved] = []
    there = set()
    for part in _SLOT.split(rendered):
        if _SLOT.fullmatch(part):
            number = int(part.strip("\u2003\u27ea\u27eb"))
            there.add(number)
            content = shown[number].content
            parts.append(resolve(content if part[0] == "\u2003" else content.strip()))
        else:
            parts += tokenizer.split_template(part)
    if len(shown) - 1 not in there:
        raise ConfigError("the model's chat template leaves out the last message")
    return _pieces(tokenizer, parts)


def text_pieces(
    tokenizer: TextTokenizer, text: str, resolve: Callable[[str], Resolved]
) -> Prepared:
    """A text without any template, behind the token that begins every text, if the model has one."""
    begin = tokenizer.split_template(tokenizer.hf.bos_token or "")
    return _pieces(tokenizer, [*begin, resolve(text)])


def _render(tokenizer: TextTokenizer, messages: Sequence[Message]) -> str:
    """Through the chat template, or plainly where there is none, with slots for the contents."""
    slots = [
        {"role": message.role, "content": _CONTENT.format(i)} for i, message in enumerate(messages)
    ]
    if not tokenizer.hf.chat_template:
        turns = [f"{slot['role']}: {slot['content']}\n" for slot in slots]
        return f"{tokenizer.hf.bos_token or ''}{''.join(turns)}assistant: "
    return str(tokenizer.hf.apply_chat_template(slots, tokenize=False, add_generation_prompt=True))


def _alternating(messages: Sequence[Message]) -> list[Message]:
    """The same words without a system role, and without two turns of one role in a row."""
    turns: list[Message] = []
    for message in messages:
        role = "user" if message.role == "system" else message.role
        if turns and turns[-1].role == role:
            joined = f"{turns[-1].content}\n\n{message.content}"
            turns[-1] = Message(role=role, content=joined)
        else:
            turns.append(Message(role=role, content=message.content))
    return turns


def _pieces(tokenizer: TextTokenizer, parts: Sequence[int | str | Resolved]) -> Prepared:
    """Words that touch are tokenised together; spans that touch are put in the store's order."""
    refused: dict[Reason, int] = {}
    flat: list[int | str | SpanRef] = []
    for part in parts:
        if isinstance(part, Resolved):
            flat += part.pieces
            for reason, n in part.refused.items():
                refused[reason] = refused.get(reason, 0) + n
        else:
            flat.append(part)
    pieces: list[Piece] = []
    ids: list[int] = []
    for run in _runs(flat):
        if isinstance(run, int):
            ids.append(run)
        elif isinstance(run, str):
            ids += tokenizer.encode(run).ids
        else:
            pieces += [Text(tuple(ids)), *arrange(run)] if ids else arrange(run)
            ids = []
    if ids or not pieces:
        pieces.append(Text(tuple(ids)))
    return Prepared(pieces=tuple(pieces), refused=refused)


def _runs(parts: Sequence[int | str | SpanRef]) -> Iterator[int | str | list[SpanRef]]:
    """Neighbouring words as one text, neighbouring spans as one list."""
    words, spans = "", list[SpanRef]()
    for part in parts:
        if spans and not isinstance(part, SpanRef):
            yield spans
            spans = []
        if words and not isinstance(part, str):
            yield words
            words = ""
        if isinstance(part, SpanRef):
            spans.append(part)
        elif isinstance(part, str):
            words += part
        else:
            yield part
    if spans:
        yield spans
    if words:
        yield words
