"""Answers of /v1/completions, as /v1/chat/completions gives them."""

from __future__ import annotations

from typing import Any


def chat_answer(said: dict[str, Any]) -> dict[str, Any]:
    """A whole answer."""
    choices = [
        _choice(it, message={"role": "assistant", "content": it["text"]}) for it in said["choices"]
    ]
    return _named(said, "chat.completion", choices)


def chat_event(said: dict[str, Any], begun: set[int]) -> dict[str, Any]:
    """A piece of an answer. `begun` are the choices that have had one; what is new goes in."""
    choices = []
    for it in said.get("choices", ()):
        delta = {"content": it["text"]}
        if it["index"] not in begun:
            begun.add(it["index"])
            delta = {"role": "assistant", **delta}
        choices.append(_choice(it, delta=delta))
    return _named(said, "chat.completion.chunk", choices)


def _named(said: dict[str, Any], kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    name = str(said.get("id", "")).replace("cmpl-", "chatcmpl-", 1)
    return {**said, "id": name, "object": kind, "choices": choices}


def _choice(said: dict[str, Any], **words: Any) -> dict[str, Any]:
    kept = {it: said.get(it) for it in ("index", "finish_reason", "stop_reason")}
    return {**kept, **words, "logprobs": None}
