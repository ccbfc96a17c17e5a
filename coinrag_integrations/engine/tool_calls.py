"""Calls of tools as text, in the Hermes form: written for models, and read out of what they answer.

Tools are JSON schemas as OpenAI has them: `{"type": "function", "function": {"name": …, …}}`. Knows
texts, not templates.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coinrag_integrations.engine.handles import strip_handles
from coinrag_integrations.engine.text import StopText, TrimmedText
from coinrag_integrations.errors import ConfigError

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile("</?tool_call>")
_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder(strict=False)  # models break lines inside strings
_ARGUMENTS = frozenset(("arguments", "parameters"))
_DEPTH = 64  # of arguments; frameworks walk through them with a stack of their own
_INSTRUCTIONS = """\
# Tools

You can call tools to answer the user. These are the tools, one JSON schema a line:
<tools>
{tools}
</tools>

To call a tool, answer with its name and its arguments as JSON inside <tool_call></tool_call>:
<tool_call>
{{"name": "the tool's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Call several tools one behind the other. Their results come inside <tool_response></tool_response>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool. `arguments` hold what JSON can; the result of the call names its `id`."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidCall:
    """What was meant as a call and is none: its text from its opening tag on, and what is wrong.

    `name` is that of the tool, if it can be read.
    """

    text: str
    error: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """An answer taken apart: what it says, and what it calls."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    invalid: tuple[InvalidCall, ...] = ()


def tool_names(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of tools.

    Raises:
        ConfigError: something that is no function with a name, or two of one name.
    """
    names = []
    for tool in tools:
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(
                f"{str(tool)!r:.80} is no tool that a local model can call: give a function with a "
                "name, as {'type': 'function', 'function': {'name': …, 'parameters': …}}"
            )
        names.append(name)
    if twice := sorted(name for name, n in Counter(names).items() if n > 1):
        raise ConfigError(
            f"there are several tools of the name {', '.join(twice)}, so that a call could mean any "
            "of them: give each a name of its own"
        )
    return tuple(names)


# -- writing ---------------------------------------------------------------------------------------


def write_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools and how to call them, for a system message. Handles in them are left out."""
    return _INSTRUCTIONS.format(tools="\n".join(map(_dumps, tools)))


def write_call(call: ToolCall) -> str:
    """A call as `parse_calls` reads it. Handles in it are left out."""
    written = _dumps({"name": call.name, "arguments": call.arguments})
    return f"{_OPEN}\n{written}\n{_CLOSE}"


def write_result(content: str) -> str:
    """What a tool has given back."""
    return f"<tool_response>\n{content}\n</tool_response>"


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with `change` made to all its strings and keys; no JSON value becomes its text."""
    match value:
        case Mapping():
            return {change(str(key)): map_strings(it, change) for key, it in value.items()}
        case list() | tuple():
            return [map_strings(it, change) for it in value]
        case None | bool() | int() | float():
            return value
    return change(str(value))


def _dumps(value: Any) -> str:
    return json.dumps(map_strings(value, strip_handles), ensure_ascii=False)


# -- reading ---------------------------------------------------------------------------------------


def parse_calls(text: str, names: Sequence[str]) -> Parsed:
    """Take an answer apart, if tools of some `names` were offered. Never raises because of `text`.

    A call is JSON between tags, the last of which may be missing at the end. An answer that is nothing
    but JSON is one as well, or several, if it calls tools that were offered. "parameters" are
    "arguments", and these may be a string that holds JSON. The text is what stands around the calls.
    """
    if not names:
        return Parsed(text=text)
    if whole := _whole(text, names):
        return Parsed(text="", calls=whole)
    said, calls, invalid, at = list[str](), list[ToolCall](), list[InvalidCall](), 0
    while (begin := text.find(_OPEN, at)) >= 0:
        said.append(text[at:begin])
        found, at = _read(text, begin)
        if isinstance(found, ToolCall):
            calls.append(found)
        else:
            invalid.append(found)
    words = "".join([*said, text[at:]]).strip()
    return Parsed(text=words, calls=tuple(calls), invalid=tuple(invalid))


class CallReader:
    """Shows of a growing answer what is surely part of no call, and reads the calls at its end."""

    def __init__(self, names: Sequence[str]) -> None:
        """Without `names` of tools that were offered, everything is shown."""
        self._names, self._text, self._n_shown = names, "", 0
        self._before, self._trimmed = StopText((_OPEN,)), TrimmedText()

    def push(self, piece: str) -> str:
        """The text that can be shown now, perhaps none."""
        self._text += piece
        if not self._names:
            shown = piece
        elif self._before.hit or self._text.lstrip().startswith(("{", "[")):
            shown = ""
        else:
            shown = self._trimmed.push(self._before.push(piece))
        self._n_shown += len(shown)
        return shown

    def end(self) -> tuple[str, Parsed]:
        """The text that was not shown, and the whole answer taken apart."""
        parsed = parse_calls(self._text, self._names)
        return parsed.text[self._n_shown :], parsed


def _whole(text: str, names: Sequence[str]) -> tuple[ToolCall, ...]:
    """The calls that a text is, if it is nothing else: JSON objects, or a list of them."""
    calls, at = list[ToolCall](), _past_space(text, 0)
    try:
        while at < len(text):
            value, stop = _JSON.raw_decode(text, at)
            for it in value if isinstance(value, list) else [value]:
                calls.append(_call_of(it))
                if calls[-1].name not in names or _ARGUMENTS.isdisjoint(it):
                    return ()
            at = _past_space(text, stop)
    except (ValueError, RecursionError):
        return ()
    return tuple(calls)


def _read(text: str, begin: int) -> tuple[ToolCall | InvalidCall, int]:
    """The call whose opening tag stands at `begin`, and where it has ended."""
    start = _past_space(text, begin + len(_OPEN))
    value, end = None, -1
    try:
        value, stop = _JSON.raw_decode(text, start)
        behind = _past_space(text, stop)
        if behind < len(text) and not _TAG.match(text, behind):
            raise ValueError("there is more text behind the JSON")
        end = _past_close(text, behind)
        return _call_of(value), end
    except (ValueError, RecursionError) as error:
        if end < 0:
            tag = _TAG.search(text, start)
            end = _past_close(text, tag.start()) if tag else len(text)
        name = value.get("name") if isinstance(value, dict) else None
        named = name if isinstance(name, str) and _is_sound(name) else ""
        return InvalidCall(text=text[begin:end].rstrip(), error=str(error), name=named), end


def _call_of(value: Any) -> ToolCall:
    """The call that a JSON value is.

    Raises:
        ValueError: it is none; says why.
    """
    if not isinstance(value, dict):
        raise ValueError("a call is a JSON object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not name.strip():
        raise ValueError("the call does not name a tool")
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("the arguments are no JSON object")
    if not _is_sound([name, arguments]):
        raise ValueError(
            "the call holds half a character, a number that is too large or none, or is nested too deeply"
        )
    return ToolCall(name=name, arguments=arguments or {})


def _is_sound(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a JSON value can be written, sent and walked through by whoever gets it."""
    match value:
        case str():
            return not any("\ud800" <= letter <= "\udfff" for letter in value)
        case int():  # checkpoints hold 64 bits
            return -(2**63) <= value < 2**63
        case float():
            return math.isfinite(value)
        case dict():
            inner = [*value, *value.values()]
        case list():
            inner = value
        case _:
            return True
    return depth > 0 and all(_is_sound(it, depth - 1) for it in inner)


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _past_close(text: str, at: int) -> int:
    return at + len(_CLOSE) if text.startswith(_CLOSE, at) else at
