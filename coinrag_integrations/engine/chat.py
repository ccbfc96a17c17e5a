"""Messages to pieces: a chat template around words and spans. Knows tokens and handles, not stores.

A template's own control tokens are read as such; everything that somebody wrote is read as ordinary
text, whatever it looks like: contents are put into the rendered text afterwards, and strings in tools
and calls are rendered with marks in them, so that no control token can come of them. Without spans the
tokens are those of `apply_chat_template`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from coinrag_integrations.engine.handles import Reason, Resolved, strip_handles
from coinrag_integrations.engine.messages import Message, alternating, in_words
from coinrag_integrations.engine.plan import Piece, Text, arrange
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.engine.tool_calls import ToolCall, map_strings, parse_calls, tool_names
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.types import SpanRef

# Stands for a message's content while a template is rendered. The wide spaces show whether it trims,
# the quotation mark whether it writes JSON.
_CONTENT = '\u2003\u27ea{}"\u27eb\u2003'
_SLOT = re.compile('(\u2003?)\u27ea(\\d+)(\\\\?)"\u27eb\u2003?')
# Characters that are none, so that no text holds them: inside what is written in tools and calls, and
# around the names of tools and of calls, by which we see that a template shows them.
_INSIDE, _TOOL, _CALL = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = re.compile("[\ufdd0-\ufdd2]")
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string", "description": "?"}}}
_PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "?", "parameters": _PARAMETERS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What to go on after: the last piece is text, unless it is a span that nothing stands behind."""

    pieces: tuple[Piece, ...]
    refused: dict[Reason, int]


def chat_pieces(
    tokenizer: TextTokenizer,
    messages: Sequence[Message],
    resolve: Callable[[str], Resolved],
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prepared:
    """The conversation, and the opening of the model's next turn.

    Where the template takes no system role, or wants turns to alternate, a system message goes in
    front of the user's words, and turns of the same role are joined. Where it does not show `tools`,
    or the calls and results that messages hold, or writes calls in a form that `parse_calls` does not
    read, these are written as text (`messages.in_words`).

    Raises:
        ConfigError: no messages, one that is no text, the model's chat template refuses them, or
            tools that have no names of their own.
    """
    if not messages:
        raise ConfigError("there are no messages: give at least one")
    tool_names(tools)
    rendered, shown = _rendered(tokenizer, messages, tools)
    parts: list[int | str | Resolved] = []
    there, at = set(), 0
    for slot in _SLOT.finditer(rendered):
        parts += _own_words(tokenizer, rendered[at : slot.start()])
        at, number = slot.end(), int(slot[2])
        there.add(number)
        content = shown[number].content
        words = resolve(content if slot[1] else content.strip())
        parts.append(_as_json(words) if slot[3] else words)
    parts += _own_words(tokenizer, rendered[at:])
    if len(shown) - 1 not in there and shown[-1].content:
        raise ConfigError("the model's chat template leaves out the last message")
    return _pieces(tokenizer, parts)


def text_pieces(
    tokenizer: TextTokenizer, text: str, resolve: Callable[[str], Resolved]
) -> Prepared:
    """A text without any template, behind the token that begins every text, if the model has one."""
    begin = tokenizer.split_template(tokenizer.hf.bos_token or "")
    return _pieces(tokenizer, [*begin, resolve(text)])


def _rendered(
    tokenizer: TextTokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> tuple[str, Sequence[Message]]:
    """The rendered text with slots in it, and the turns whose contents belong there.

    They are those of the first form of the conversation of which the template leaves nothing out.
    """
    words = in_words(messages, tools)
    forms: list[tuple[Sequence[Message], Sequence[Mapping[str, Any]]]] = []
    with_tools = tools or any(message.calls or message.role == "tool" for message in messages)
    if not with_tools or _knows_calls(tokenizer, offered=bool(tools)):
        forms += [(messages, tools), (alternating(messages), tools)]
    forms += [(words, ()), (alternating(words), ())]
    refusal: Exception | None = None
    for turns, offered in forms:
        try:
            rendered = _render(tokenizer, turns, offered)
        except (TemplateError, TypeError) as error:
            refusal = error
            continue
        if _shows_tools(tokenizer, rendered, turns, offered):
            return rendered, turns
    raise ConfigError(f"the model's chat template refuses these messages: {refusal}") from refusal


def _render(
    tokenizer: TextTokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> str:
    """Through the chat template, or plainly where there is none, with slots for the contents."""
    turns = [_turn(tokenizer, message, i) for i, message in enumerate(messages)]
    if not tokenizer.hf.chat_template:
        plain = [f"{turn['role']}: {turn['content']}\n" for turn in turns]
        return f"{tokenizer.hf.bos_token or ''}{''.join(plain)}assistant: "
    shown = [_tool(tokenizer, tool) for tool in tools]
    return str(
        tokenizer.hf.apply_chat_template(
            turns, tools=shown or None, tokenize=False, add_generation_prompt=True
        )
    )


def _turn(tokenizer: TextTokenizer, message: Message, number: int) -> dict[str, Any]:
    """A turn as templates take it; arguments are no text yet."""
    content = _CONTENT.format(number) if message.content or not message.calls else ""
    turn: dict[str, Any] = {"role": _guarded(tokenizer, message.role), "content": content}
    if message.calls:
        turn["tool_calls"] = [
            {
                "id": _short(call.id),
                "type": "function",
                "function": {
                    "name": _named(tokenizer, call.name, _CALL),
                    "arguments": _guarded(tokenizer, call.arguments),
                },
            }
            for call in message.calls
        ]
    if message.role == "tool":
        name = _guarded(tokenizer, message.name)
        turn |= {"name": name, "tool_call_id": _short(message.call_id)}
    return turn


def _tool(tokenizer: TextTokenizer, tool: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = _guarded(tokenizer, tool)
    shown["function"]["name"] = _named(tokenizer, tool["function"]["name"], _TOOL)
    return shown


def _shows_tools(
    tokenizer: TextTokenizer,
    rendered: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
) -> bool:
    """Whether the tools, all calls and all results have come out."""
    offered = [tool["function"]["name"] for tool in tools]
    calls = Counter(call.name for message in messages for call in message.calls)
    results = {i for i, message in enumerate(messages) if message.role == "tool"}
    return (
        all(_named(tokenizer, name, _TOOL) in rendered for name in offered)
        and all(rendered.count(_named(tokenizer, it, _CALL)) >= n for it, n in calls.items())
        and results <= {int(slot[2]) for slot in _SLOT.finditer(rendered)}
    )


def _knows_calls(tokenizer: TextTokenizer, *, offered: bool) -> bool:
    """Whether the template shows calls; if tools are offered, also whether in a form that we read."""
    call = ToolCall(name="probe", arguments={"key": "value"})
    turns = [
        Message(role="user", content="?"),
        Message(role="assistant", content="", calls=(call,)),
        Message(role="tool", content="?", name="probe"),
    ]
    tools = [_PROBE] if offered else []
    try:
        rendered = _render(tokenizer, turns, tools)
    except (TemplateError, TypeError):
        return False
    said = [it for it in _own_words(tokenizer, rendered) if isinstance(it, str)]
    read = any(call in parse_calls(it, ["probe"]).calls for it in said)
    return _shows_tools(tokenizer, rendered, turns, tools) and (read or not offered)


def _guarded(tokenizer: TextTokenizer, value: Any) -> Any:
    """A JSON value of somebody's for a template, with marks where control tokens and slots could be."""

    def guard(words: str) -> str:
        words = tokenizer.guard(_MARKS.sub("", strip_handles(words)), _INSIDE)
        return words.replace("\u27ea", f"\u27ea{_INSIDE}")

    return map_strings(value, guard)


def _named(tokenizer: TextTokenizer, name: str, mark: str) -> str:
    return f"{mark}{_guarded(tokenizer, name)}{mark}"


def _short(call_id: str) -> str:
    """An id that every template takes: some want nine letters or digits."""
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _own_words(tokenizer: TextTokenizer, rendered: str) -> list[int | str]:
    """What a template wrote, taken apart, without our marks."""
    parts = tokenizer.split_template(rendered)
    return [_MARKS.sub("", part) if isinstance(part, str) else part for part in parts]


def _as_json(words: Resolved) -> Resolved:
    """Words as they stand inside a JSON string; spans are as they are stored."""
    pieces = [
        json.dumps(it, ensure_ascii=False)[1:-1] if isinstance(it, str) else it
        for it in words.pieces
    ]
    return replace(words, pieces=tuple(pieces))


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
