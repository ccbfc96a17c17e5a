"""Events of our own: what was composed for an answer, before its first token is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.base.event import BaseEvent

from coinrag_integrations.engine import AnswerStream
from coinrag_integrations.reply import ReplyStream
from coinrag_integrations.serving.client import ServedStream

dispatcher = get_dispatcher(__name__)

_Stream = TypeVar("_Stream", bound=AnswerStream | ReplyStream | ServedStream)


class KVComposeStartEvent(BaseEvent):
    """Spans are about to be loaded and put behind each other."""

    @classmethod
    def class_name(cls) -> str:
        """The name under which the event is serialised."""
        return "KVComposeStartEvent"


class KVComposeEndEvent(BaseEvent):
    """They lie there.

    Of the prompt's tokens, `n_cached` were taken from a cache (`n_kept` of these from an earlier
    turn) and `n_online` remain to be computed. `n_spans` were asked for, `n_misses` of them had to be
    encoded again, `n_refused` handles were read as words.
    """

    n_spans: int
    n_misses: int
    n_refused: int
    n_cached: int
    n_kept: int
    n_online: int
    bytes_read: int
    load_ms: float
    compose_ms: float

    @classmethod
    def class_name(cls) -> str:
        """The name under which the event is serialised."""
        return "KVComposeEndEvent"


def composing(compose: Callable[[], _Stream]) -> _Stream:
    """What `compose` returns, with the events around it."""
    dispatcher.event(KVComposeStartEvent())
    stream = compose()
    own = (AnswerStream, ServedStream)
    answer = stream.answer if isinstance(stream, own) else stream.reply.answer
    dispatcher.event(
        KVComposeEndEvent(
            n_spans=len(answer.spans),
            n_misses=len(answer.recomputed),
            n_refused=sum(answer.refused.values()),
            n_cached=answer.usage.cached,
            n_kept=answer.usage.kept,
            n_online=answer.usage.online,
            bytes_read=answer.timings.bytes_read,
            load_ms=answer.timings.load_ms,
            compose_ms=answer.timings.compose_ms,
        )
    )
    return stream
