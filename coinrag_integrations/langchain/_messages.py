"""LangChain messages as turns of the engine, tools as it takes them, and its answers as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from langchain_core.documents import Document as LangDocument
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool

from coinrag_integrations import _adapters
from coinrag_integrations.engine import (
    Answer,
    Message,
    Parsed,
    ToolCall,
    mark,
    strip_handles,
)
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain._convert import text_of
from coinrag_integrations.rag import CoinRAG

_BETWEEN = "\n\n"
# Content blocks that say again what `AIMessage.tool_calls` says.
_CALLS = ("tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "function_call")


# -- to the engine ---------------------------------------------------------------------------------


def openai_tool(tool: Any) -> dict[str, Any]:
    """A tool of any kind that LangChain knows, as the engine takes it."""
    shown = convert_to_openai_tool(tool)
    if shown.get("type") == "function" and "function" not in shown:  # as the Responses API has it
        return {"type": "function", "function": {k: v for k, v in shown.items() if k != "type"}}
    return shown


def offered_tools(tools: Sequence[Any], choice: Any) -> list[dict[str, Any]]:
    """The tools that a call of a model shows.

    Raises:
        ConfigError: the model is to be made to call a tool.
    """
    if choice not in (None, "auto", "none"):
        raise ConfigError(
            f"tool_choice={choice!r}: a local model cannot be made to call a tool. Leave it out, or "
            "give 'auto' or 'none', and ask for the call in the prompt"
        )
    return [] if choice == "none" else [openai_tool(tool) for tool in tools]


def turns_of(
    rag: CoinRAG, messages: Sequence[BaseMessage], documents: Sequence[LangDocument] = ()
) -> list[Message]:
    """The turns of a conversation, with `documents` in front of the user's last words.

    Raises:
        ConfigError: content that is no text.
    """
    called: dict[str | None, str | None] = {}
    turns = []
    for message in messages:
        if isinstance(message, AIMessage):
            calls = (*message.tool_calls, *message.invalid_tool_calls)
            called |= {call["id"]: call["name"] for call in calls}
        turns.append(_turn(rag, message, called))
    if documents and turns:
        asked = [i for i, turn in enumerate(turns) if turn.role == "user"]
        i = asked[-1] if asked else len(turns) - 1
        turns[i] = replace(turns[i], content=_behind(rag, documents, turns[i].content))
    return turns


def _turn(rag: CoinRAG, message: BaseMessage, called: Mapping[str | None, str | None]) -> Message:
    """A turn; `called` has the names of the tools that were called, by the call's id."""
    match message:
        case SystemMessage():
            return Message(role="system", content=_content(rag, message))
        case AIMessage():
            calls = tuple(
                ToolCall(name=call["name"], arguments=call["args"], id=call["id"] or "")
                for call in message.tool_calls
            )
            # What was meant as a call is shown as it was written.
            meant = [call["args"] or "" for call in message.invalid_tool_calls]
            content = "\n".join(it for it in (_content(rag, message), *meant) if it)
            return Message(role="assistant", content=content, calls=calls)
        case ToolMessage():
            return Message(
                role="tool",
                content=_artifact(rag, message.artifact) or _content(rag, message),
                name=message.name or called.get(message.tool_call_id) or "",
                call_id=message.tool_call_id,
            )
        case ChatMessage():
            return Message(role=message.role, content=_content(rag, message))
    return Message(role="user", content=_content(rag, message))


def _content(rag: CoinRAG, message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = []
    for block in message.content:
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") == "text":
            parts.append(str(block["text"]))
        elif isinstance(value := block.get("value"), Mapping) and "coinrag" in value:
            document = LangDocument(value["text"], metadata=dict(value["coinrag"]))
            parts.append(_marked(rag, document))
        elif not (isinstance(message, AIMessage) and block.get("type") in _CALLS):
            raise ConfigError(
                f"the model reads text only: leave content of type {block.get('type')!r} out"
            )
    return "".join(parts)


def _artifact(rag: CoinRAG, artifact: Any) -> str:
    """The documents of a retriever tool, marked; they are dicts once a checkpoint was read back."""
    if not isinstance(artifact, list | tuple) or not artifact:
        return ""
    documents = []
    for it in artifact:
        if isinstance(it, LangDocument):
            documents.append(it)
        elif isinstance(it, Mapping) and isinstance(it.get("page_content"), str):
            documents.append(
                LangDocument(it["page_content"], metadata=dict(it.get("metadata") or {}))
            )
        else:
            return ""
    return _BETWEEN.join(_marked(rag, document) for document in documents)


def _behind(rag: CoinRAG, documents: Sequence[LangDocument], question: str) -> str:
    """A question behind passages, in the store's own words."""
    context = "\n".join(_marked(rag, document) for document in documents)
    before, after = rag.engine.config.prompt.user.split("{context}")
    return f"{before}{context}{after.replace('{question}', question)}"


def _marked(rag: CoinRAG, document: LangDocument) -> str:
    """A document's words behind the handle of the span that its metadata names, if they name one.

    Whether these are still the span's own words is for the engine to see, and to count.
    """
    words = text_of(document)
    if not _adapters.is_span(document.metadata):
        return words
    try:
        return mark(rag.engine.handles.handle(_adapters.ref_of(document.metadata)), words)
    except (TypeError, ValueError):
        return words


# -- from the engine -------------------------------------------------------------------------------


def message_of(model_name: str, answer: Answer, parsed: Parsed) -> AIMessage:
    """A finished answer, taken apart."""
    return AIMessage(
        content=strip_handles(parsed.text),
        tool_calls=[
            tool_call(name=call.name, args=dict(call.arguments), id=_new_id())
            for call in parsed.calls
        ],
        invalid_tool_calls=[
            invalid_tool_call(
                name=call.name or None, args=call.text, id=_new_id(), error=call.error
            )
            for call in parsed.invalid
        ],
        usage_metadata=_usage(answer),
        response_metadata=_said_of(model_name, answer, parsed),
    )


def last_chunk(model_name: str, answer: Answer, parsed: Parsed) -> AIMessageChunk:
    """What can be said once the answer is there; its text has been shown.

    Added to the chunks before it, it gives the same calls as `message_of`. LangChain reads them anew
    out of their JSON; the text of an invalid call begins with a tag, so that it stays one.
    """
    calls = [(call.name, json.dumps(dict(call.arguments))) for call in parsed.calls]
    invalid = [(call.name or None, call.text) for call in parsed.invalid]
    return AIMessageChunk(
        content="",
        tool_call_chunks=[
            tool_call_chunk(name=name, args=args, id=_new_id(), index=i)
            for i, (name, args) in enumerate([*calls, *invalid])
        ],
        usage_metadata=_usage(answer),
        response_metadata=_said_of(model_name, answer, parsed),
        chunk_position="last",
    )


def _new_id() -> str:
    return f"call_{uuid4().hex}"


def _usage(answer: Answer) -> UsageMetadata:
    counts = _adapters.token_counts(answer)
    details: dict[str, int] = {
        "cache_read": answer.usage.cached,
        "coinrag_online": answer.usage.online,
        "coinrag_kept": answer.usage.kept,
    }
    return UsageMetadata(
        input_tokens=counts["prompt_tokens"],
        output_tokens=counts["completion_tokens"],
        total_tokens=counts["total_tokens"],
        input_token_details=InputTokenDetails(**details),  # type: ignore[typeddict-item]
    )


def _said_of(model_name: str, answer: Answer, parsed: Parsed) -> dict[str, Any]:
    return {
        "model_name": model_name,
        "model_provider": "coinrag",
        "finish_reason": "tool_calls" if parsed.calls else answer.finish_reason,
        "coinrag": _adapters.report_of(answer),
    }
