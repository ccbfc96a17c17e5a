"""An answer as it grows, and what it says of itself once it is there."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from coinrag_integrations.engine.generation import FinishReason, GenerationConfig, generate
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.text import StopText, TrimmedText
from coinrag_integrations.engine.timings import Stopwatch, Timings
from coinrag_integrations.types import SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer: taken from the cache, computed online, generated.

    `cached` counts the prompt's head too, which lies in memory and is not read.
    """

    cached: int
    online: int
    generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A text and how it came about. `spans` are the segments used, in order, after merging."""

    text: str
    finish_reason: FinishReason
    spans: tuple[SpanRef, ...]
    recomputed: tuple[SpanRef, ...]
    usage: Usage
    timings: Timings


class AnswerStream:
    """Iterates over the text of an answer; `answer` is complete once it has ended.

    The pieces, joined, are the answer's text.
    """

    def __init__(
        self,
        model: LoadedModel,
        prefix: Prefix,
        online: Sequence[int],
        generation: GenerationConfig,
        watch: Stopwatch,
        recomputed: tuple[SpanRef, ...],
    ) -> None:
        """Nothing is computed before the first piece is asked for."""
        self._model, self._prefix, self._online = model, prefix, online
        self._generation, self._watch, self._recomputed = generation, watch, recomputed
        self._pieces: list[str] = []
        self._trimmed = TrimmedText()
        self._n_generated = 0
        self._finish: FinishReason = "length"
        self._iterator = self._run()

    def __iter__(self) -> Iterator[str]:
        """The stream itself."""
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        return next(self._iterator)

    def close(self) -> None:
        """Stop generating."""
        self._iterator.close()

    @property
    def answer(self) -> Answer:
        """What has been answered so far."""
        return Answer(
            text="".join(self._pieces),
            finish_reason=self._finish,
            spans=tuple(segment.ref for segment in self._prefix.plan.segments),
            recomputed=self._recomputed,
            usage=Usage(
                cached=self._prefix.n_entries,
                online=len(self._online),
                generated=self._n_generated,
            ),
            timings=self._watch.timings(),
        )

    def _run(self) -> Generator[str]:
        text, stop = self._model.tokenizer.decode_stream(), StopText(self._generation.stop)
        tokens = generate(self._model, self._prefix, self._online, self._generation, self._watch)
        for token in tokens:
            self._n_generated += 1
            if token in self._model.stop_ids:
                self._finish = "stop"
                break
            yield from self._show(stop.push(text.push(token)))
            if stop.hit:
                self._finish = "stop"
                return
        yield from self._show(stop.flush())

    def _show(self, piece: str) -> Iterator[str]:
        if shown := self._trimmed.push(piece):
            self._pieces.append(shown)
            yield shown
