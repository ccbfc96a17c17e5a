"""Turns of a conversation, and the same conversation for templates that know less. Knows no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coinrag_integrations.engine.tool_calls import ToolCall, write_call, write_result, write_tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn. `content` may hold handles; `role` is what the model's template knows.

    A model's turn may hold `calls`. What a tool gave back has the role "tool", the tool's name in
    `name`, and in `call_id` the id of the call that it answers.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    name: str = ""
    call_id: str = ""


def alternating(messages: Sequence[Message]) -> list[Message]:
    """The same words without a system role, and without two turns of one role in a row."""
    turns: list[Message] = []
    for message in messages:
        role = "user" if message.role == "system" else message.role
        if turns and turns[-1].role == role != "tool":
            joined = "\n\n".join(it for it in (turns[-1].content, message.content) if it)
            calls = turns[-1].calls + message.calls
            turns[-1] = replace(turns[-1], content=joined, calls=calls)
        else:
            turns.append(replace(message, role=role))
    return turns


def in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[Message]:
    """The same conversation for a template without tools: they, calls and results are text.

    Tools stand in the system message, what they gave back in turns of the user.
    """
    turns: list[Message] = []
    answering = False
    for message in messages:
        if message.role == "tool":
            result = write_result(message.content)
            if answering:
                turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n{result}")
            else:
                turns.append(Message(role="user", content=result))
        elif message.calls:
            words = [message.content] if message.content else []
            content = "\n".join([*words, *map(write_call, message.calls)])
            turns.append(Message(role=message.role, content=content))
        else:
            turns.append(message)
        answering = message.role == "tool"
    if not tools:
        return turns
    told = write_tools(tools)
    if turns and turns[0].role == "system":
        turns[0] = replace(turns[0], content=f"{turns[0].content}\n\n{told}")
        return turns
    return [Message(role="system", content=told), *turns]
