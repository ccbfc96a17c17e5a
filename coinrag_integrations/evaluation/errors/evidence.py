"""What a search found for each question, in a file beside the results. Knows no model.

`evidence.jsonl` holds texts, not tokens: who looks at it needs neither the model nor the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.evaluation.lines import LinesFile, read_lines
from coinrag_integrations.types import Chunk, SpanRef

if TYPE_CHECKING:
    from coinrag_integrations.evaluation.rivals import Search, Task

EVIDENCE = "evidence.jsonl"


class ShownNugget(NamedTuple):
    """The characters `[start, stop)` of a chunk, and what became of them.

    `rank` counts from 1 among the nuggets that stage two looked at, None for all others; `is_loaded`
    says whether the search's spans cover it.
    """

    start: int
    stop: int
    rank: int | None
    is_loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownChunk:
    """A chunk as retrieval saw it; one that has no nuggets is a nugget itself.

    `rank` counts from 1 among the chunks that stage one found, None for all others; `is_supporting` is
    None where nobody has said which documents help.
    """

    document_id: str
    text: str
    is_supporting: bool | None
    rank: int | None
    nuggets: tuple[ShownNugget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All chunks of an example in their documents' order, and what one search made of them.

    `settings`, `data` and `example` name it as they name its measurements.
    """

    settings: str
    data: str
    example: str
    search: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[ShownChunk, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is the evidence of, within some settings."""
        return self.data, self.example, self.search


def evidence_of(
    example: Example,
    chunks: Sequence[Chunk],
    task: Task,
    *,
    settings: str,
    data: str,
    digest: str,
    search: Search,
) -> Evidence:
    """What `search` found: `task`, among `chunks`, which are all of the example's."""
    chunk_ranks = {chunk.chunk_id: rank for rank, chunk in enumerate(task.chunks, 1)}
    nugget_ranks = {ref: rank for rank, ref in enumerate(task.ranked, 1)}
    loaded = {(ref.chunk_id, i) for ref in task.spans for i in range(ref.start, ref.stop)}

    def shown(ref: SpanRef, start: int, stop: int) -> ShownNugget:
        covered = all((ref.chunk_id, i) in loaded for i in range(ref.start, ref.stop))
        return ShownNugget(start, stop, nugget_ranks.get(ref), covered)

    return Evidence(
        settings=settings,
        data=data,
        example=digest,
        search=search,
        question=example.question,
        answers=example.answers,
        chunks=tuple(
            ShownChunk(
                document_id=chunk.document_id,
                text=chunk.text,
                is_supporting=chunk.document_id in example.supporting
                if example.supporting
                else None,
                rank=chunk_ranks.get(chunk.chunk_id),
                nuggets=tuple(
                    shown(chunk.ref(n.span), n.char_start, n.char_stop) for n in chunk.nuggets
                )
                or (shown(chunk.ref(), 0, len(chunk.text)),),
            )
            for chunk in chunks
        ),
    )


def read_evidence(folder: Path) -> Iterator[Evidence]:
    """All evidence in a folder of results, in the order in which it was written.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    return read_lines(folder / EVIDENCE, _evidence, "evidence")


class EvidenceFile:
    """Evidence of one setting in a folder of results, whose file may hold that of others too."""

    def __init__(self, folder: Path, settings: str) -> None:
        """See what is there. A last line that was not finished is dropped, also from the file.

        Raises:
            ConfigError: the file cannot be read or written, or holds something else.
        """
        self._found = {row.key for row in read_evidence(folder) if row.settings == settings}
        self._file = LinesFile(folder / EVIDENCE)

    def __contains__(self, key: object) -> bool:
        """Whether there is evidence of something."""
        return key in self._found

    def add(self, row: Evidence) -> None:
        """Note evidence; it is in the file when this returns."""
        self._file.add(asdict(row))
        self._found.add(row.key)

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self._file.__exit__()


def _evidence(value: Any) -> Evidence:
    names = ("settings", "data", "example", "search", "question")
    return Evidence(
        **{name: _of(value[name], str, name) for name in names},
        answers=tuple(_of(answer, str, "an answer") for answer in value["answers"]),
        chunks=tuple(_chunk(chunk) for chunk in value["chunks"]),
    )


def _chunk(value: Any) -> ShownChunk:
    text = _of(value["text"], str, "text")
    nuggets = tuple(
        ShownNugget(
            start=_of(start, int, "a nugget's start"),
            stop=_of(stop, int, "a nugget's stop"),
            rank=_of(rank, int | None, "a nugget's rank"),
            is_loaded=_of(is_loaded, bool, "is_loaded"),
        )
        for start, stop, rank, is_loaded in value["nuggets"]
    )
    for nugget in nuggets:
        if not 0 <= nugget.start < nugget.stop <= len(text):
            raise ValueError(f"a nugget lies outside its chunk: {nugget.start} to {nugget.stop}")
    return ShownChunk(
        document_id=_of(value["document_id"], str, "document_id"),
        text=text,
        is_supporting=_of(value["is_supporting"], bool | None, "is_supporting"),
        rank=_of(value["rank"], int | None, "rank"),
        nuggets=nuggets,
    )


def _of(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.80}")
    return value
