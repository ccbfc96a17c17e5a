"""Answers as they grow, and what they say of themselves once they are there."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coinrag_integrations.engine import observers
from coinrag_integrations.engine.composer import Composed
from coinrag_integrations.engine.generation import FinishReason, GenerationConfig, generate
from coinrag_integrations.engine.handles import Reason
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.runner import Runner, StaticRunners
from coinrag_integrations.engine.text import StopText, TrimmedText
from coinrag_integrations.engine.timings import Stopwatch, Timings
from coinrag_integrations.types import SpanRef

# Shown, at the end, the tokens of the only answer and what ran.
Keep = Callable[[Sequence[int], Runner], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one answer: taken from a cache, computed online, generated.

    `cached` counts the prompt's head too, which lies in memory and is not read, and the `kept` tokens
    that an earlier turn left.
    """

    cached: int
    online: int
    generated: int
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A text and how it came about. `spans` are the segments used, in order, after merging.

    Of a prompt with handles, `refused` counts those that were read as words, by the reason
    (`engine.handles`).
    """

    text: str
    finish_reason: FinishReason
    spans: tuple[SpanRef, ...]
    recomputed: tuple[SpanRef, ...]
    usage: Usage
    timings: Timings
    refused: Mapping[Reason, int] = field(default_factory=dict)


class _Writer:
    """One answer's text, token by token."""

    def __init__(self, model: LoadedModel, generation: GenerationConfig) -> None:
        self._stop_ids = model.stop_ids
        self._decoder, self._stop = model.tokenizer.decode_stream(), StopText(generation.stop)
        self._trimmed, self.pieces = TrimmedText(), list[str]()
        self.tokens, self.ended = list[int](), False
        self.finish: FinishReason = "length"

    def push(self, token: int) -> str:
        """The text that can be shown now, perhaps none."""
        self.tokens.append(token)
        if token in self._stop_ids:
            return self._end("stop", self._stop.flush())
        piece = self._stop.push(self._decoder.push(token))
        if self._stop.hit:
            return self._end("stop", piece)
        return self._show(piece)

    def flush(self) -> str:
        """The rest, once no more tokens come."""
        return "" if self.ended else self._end("length", self._stop.flush())

    def _end(self, reason: FinishReason, piece: str) -> str:
        self.finish, self.ended = reason, True
        return self._show(piece)

    def _show(self, piece: str) -> str:
        shown = self._trimmed.push(piece)
        if shown:
            self.pieces.append(shown)
        return shown


class AnswerBatch:
    """Answers to several questions, each behind its own prefix, computed together."""

    def __init__(
        self,
        model: LoadedModel,
        composed: Composed,
        questions: Sequence[Sequence[int]],
        generation: GenerationConfig,
        watch: Stopwatch,
        static: StaticRunners | None = None,
        keep: Keep | None = None,
    ) -> None:
        """Nothing is computed before the first piece is asked for."""
        self._model, self._composed, self._questions = model, composed, questions
        self._generation, self._watch = generation, watch
        self._static, self._keep = static, keep
        self._writers = [_Writer(model, generation) for _ in questions]

    def run(self) -> Generator[list[str]]:
        """The next piece of each answer's text, perhaps empty, until all have ended."""
        try:
            yield from self._run()
        finally:
            if any(writer.tokens for writer in self._writers):
                observers.answered(self.answers)

    def _run(self) -> Generator[list[str]]:
        steps = generate(
            self._model,
            self._composed.prefix,
            self._questions,
            self._generation,
            self._watch,
            self._static,
            None if self._keep is None else self._show_rows,
        )
        for tokens in steps:
            yield [
                "" if token is None or writer.ended else writer.push(token)
                for writer, token in zip(self._writers, tokens, strict=True)
            ]
            if all(writer.ended for writer in self._writers):
                return
        yield [writer.flush() for writer in self._writers]

    def _show_rows(self, runner: Runner) -> None:
        assert self._keep is not None
        self._keep(self._writers[0].tokens, runner)

    def answers(self) -> list[Answer]:
        """What has been answered so far. The times are those of the batch."""
        timings = self._watch.timings()
        rows = zip(
            self._writers,
            self._composed.prefix.plans,
            self._composed.loaded,
            self._questions,
            strict=True,
        )
        return [
            Answer(
                text="".join(writer.pieces),
                finish_reason=writer.finish,
                spans=plan.refs,
                recomputed=loaded.recomputed,
                usage=Usage(
                    cached=plan.n_entries,
                    online=plan.n_online + len(question),
                    generated=len(writer.tokens),
                    kept=plan.n_kept,
                ),
                timings=replace(
                    timings,
                    bytes_read=loaded.bytes_read,
                    bytes_in_memory=loaded.bytes_in_memory,
                    n_declined=loaded.n_declined,
                ),
            )
            for writer, plan, loaded, question in rows
        ]


class AnswerStream:
    """Iterates over the text of one answer; `answer` is complete once it has ended.

    The pieces, joined, are the answer's text.
    """

    def __init__(
        self,
        batch: AnswerBatch,
        spans: tuple[SpanRef, ...] | None = None,
        refused: Mapping[Reason, int] | None = None,
    ) -> None:
        """Stream a batch of one.

        `spans` are those of the whole prompt, if part of it was kept; `refused` its handles that were.
        """
        self._batch, self._iterator = batch, batch.run()
        self._spans, self._refused = spans, dict(refused or {})

    def __iter__(self) -> Iterator[str]:
        """The stream itself."""
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        while not (piece := next(self._iterator)[0]):
            pass
        return piece

    def close(self) -> None:
        """Stop generating."""
        self._iterator.close()

    @property
    def answer(self) -> Answer:
        """What has been answered so far."""
        answer = self._batch.answers()[0]
        spans = answer.spans if self._spans is None else self._spans
        return replace(answer, spans=spans, refused=self._refused)
