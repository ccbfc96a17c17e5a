"""An engine that really reads, computes and keeps, and says what a test puts into its mouth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coinrag_integrations.engine import Answer, AnswerStream, Engine, Message


class Saying:
    """A stream of an answer to `turns`. With `text`, that comes in pieces instead of its own."""

    def __init__(
        self, inner: AnswerStream, turns: Sequence[Message], tools: Any, text: str | None
    ) -> None:
        self.inner, self.turns, self.tools, self._text = inner, turns, tools, text
        self._pieces = inner if text is None else self._said(text)

    def _said(self, text: str) -> Iterator[str]:
        for _ in self.inner:
            pass
        yield from (text[i : i + 5] for i in range(0, len(text), 5))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        self.inner.close()

    @property
    def answer(self) -> Answer:
        answer = self.inner.answer
        return answer if self._text is None else replace(answer, text=self._text)


def say(monkeypatch: pytest.MonkeyPatch, engine: Engine, *texts: str | None) -> list[Saying]:
    """Have the next answers of `engine.chat` say `texts`; those behind them speak for themselves.

    Gives the streams of all answers, as they are begun.
    """
    streams: list[Saying] = []
    chat = engine.chat

    def saying(turns: Sequence[Message], *args: Any, **options: Any) -> Saying:
        text = texts[len(streams)] if len(streams) < len(texts) else None
        begun = chat(turns, *args, **options)
        streams.append(Saying(begun, turns, options["tools"], text))
        return streams[-1]

    monkeypatch.setattr(engine, "chat", saying)
    return streams
