"""An answer with the spans it rests on, as it grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from coinrag_integrations.engine import Answer, AnswerStream
from coinrag_integrations.engine.handles import Reason
from coinrag_integrations.types import ScoredSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer and the retrieved spans it rests on, best first."""

    answer: Answer
    spans: tuple[ScoredSpan, ...]

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text


class ReplyStream:
    """Iterates over the text of a reply; `reply` is complete once it has ended."""

    def __init__(
        self,
        stream: AnswerStream,
        spans: Sequence[ScoredSpan],
        retrieve_ms: float,
        refused: Mapping[Reason, int] | None = None,
    ) -> None:
        """Nothing is generated before the first piece is asked for."""
        self._stream, self._spans, self._retrieve_ms = stream, tuple(spans), retrieve_ms
        self._refused = dict(refused or {})

    def __iter__(self) -> Iterator[str]:
        """The stream itself."""
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        return next(self._stream)

    def close(self) -> None:
        """Stop generating."""
        self._stream.close()

    @property
    def reply(self) -> Reply:
        """What has been answered so far."""
        answer = self._stream.answer
        timings = replace(answer.timings, retrieve_ms=self._retrieve_ms)
        answer = replace(answer, timings=timings, refused=self._refused)
        return Reply(answer=answer, spans=self._spans)
