"""Questions with known answers and the documents to answer them from. Knows no model.

A file holds one JSON object a line: `question`, `answers` (the first is the target), `passages` (each
with `text`, and perhaps `title` and `is_supporting`). Other fields are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coinrag_integrations.demo.data import demo_documents, demo_questions
from coinrag_integrations.errors import ConfigError, DocumentError
from coinrag_integrations.types import Document

_LONGBENCH = "longbench:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question, its accepted answers, and documents; `supporting` are the ids of those that help.

    `supporting` is empty where nobody has said which ones do.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    supporting: frozenset[str]

    def chosen(self, n_documents: int) -> tuple[Document, ...]:
        """At most so many documents in their own order: the supporting ones before any other."""
        ranked = sorted(self.documents, key=lambda d: d.document_id not in self.supporting)
        kept = {document.document_id for document in ranked[:n_documents]}
        return tuple(document for document in self.documents if document.document_id in kept)


def read_examples(paths: Sequence[str | Path], limit: int | None = None) -> tuple[Example, ...]:
    """The examples of some files, one of each file in turn, at most `limit` of them.

    Raises:
        ConfigError: no files.
        DocumentError: a file cannot be read, or a line of it is no example.
    """
    if not paths:
        raise ConfigError("no files of questions: give at least one .jsonl file")
    files = [_lines(Path(path)) for path in paths]
    found: list[Example] = []
    while files and (limit is None or len(found) < limit):
        file = files.pop(0)
        if (example := next(file, None)) is not None:
            found.append(example)
            files.append(file)
    return tuple(found)


def read_named(
    names: Sequence[str], folder: Path | None = None, limit: int | None = None
) -> dict[str, tuple[Example, ...]]:
    """The first `limit` examples of each data set, by its name.

    A data set is "demo", the path of a .jsonl file, the name of one in `folder` (or in its folder "eval")
    without the ending, or one of LongBench's as "longbench:hotpotqa" (then called longbench-hotpotqa).

    Raises:
        ConfigError: no names, two of one name, a name that is not there or without a folder.
        DocumentError: a file cannot be read or fetched, or a line of it is no example.
    """
    # It makes examples, so it knows this module.
    from coinrag_integrations.evaluation.longbench import read_longbench

    if not names:
        raise ConfigError("no data: name a data set, a .jsonl file, or 'demo'")
    found: dict[str, tuple[Example, ...]] = {}
    for name in names:
        if name == "demo":
            title, examples = name, demo_examples(limit)
        elif name.startswith(_LONGBENCH):
            title = name.replace(":", "-")  # plots are called so, on every file system
            examples = read_longbench(name.removeprefix(_LONGBENCH), limit)
        else:
            path = find_data(name, folder)
            title, examples = path.stem, read_examples([path], limit)
        if title in found:
            raise ConfigError(f"two data sets are called {title!r}: name each once")
        found[title] = examples
    return found


def find_data(name: str, folder: Path | None) -> Path:
    """The file of a data set: see `read_named`.

    Raises:
        ConfigError: it is not there.
    """
    path = Path(name)
    if path.suffix or len(path.parts) != 1:
        return path
    if folder is None:
        raise ConfigError(
            f"there is no folder to look for the data set {name!r} in: give --data-folder or set "
            "COINRAG_DATA, or give the path of a .jsonl file"
        )
    places = (folder, folder / "eval")
    for place in places:
        if (place / f"{name}.jsonl").is_file():
            return place / f"{name}.jsonl"
    there = sorted({path.stem for place in places for path in place.glob("*.jsonl")})
    raise ConfigError(
        f"there is no data set {name!r} in {folder}, only: {', '.join(there) or 'none at all'}"
    )


def demo_examples(limit: int | None = None) -> tuple[Example, ...]:
    """The demo's questions, each with its supporting articles and others that stand beside them."""
    documents = demo_documents()
    n_others = 3
    examples = []
    for number, item in enumerate(demo_questions()[:limit]):
        supporting = frozenset(item.supporting)
        others = [d.document_id for d in documents if d.document_id not in supporting]
        first = number * n_others % len(others)
        wanted = supporting | set((others + others)[first : first + n_others])
        examples.append(
            Example(
                question=item.question,
                answers=item.answers,
                documents=tuple(d for d in documents if d.document_id in wanted),
                supporting=supporting,
            )
        )
    return tuple(examples)


def _lines(path: Path) -> Iterator[Example]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _example(json.loads(line), f"{path.stem}/{number}")
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{path} is not UTF-8 ({error.reason}): convert it") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DocumentError(
            f"{path}, line {number}, is no question ({type(error).__name__}: {error}): each line must "
            "be a JSON object with question, answers and passages"
        ) from error


def _example(row: Mapping[str, Any], name: str) -> Example:
    question, answers, passages = row["question"], row["answers"], row["passages"]
    if not isinstance(answers, list) or not isinstance(passages, list):
        raise TypeError("answers and passages must be lists")
    if not isinstance(question, str) or not question.strip():
        raise ValueError("the question is empty")
    if not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise ValueError("there is no answer, or one that is empty")
    documents = [_document(passage, f"{name}/{i}") for i, passage in enumerate(passages)]
    if not documents:
        raise ValueError("there is no passage")
    return Example(
        question=question,
        answers=tuple(answers),
        documents=tuple(documents),
        supporting=frozenset(
            document.document_id
            for document, passage in zip(documents, passages, strict=True)
            if passage.get("is_supporting")
        ),
    )


def _document(passage: Mapping[str, Any], name: str) -> Document:
    title, text = passage.get("title") or "", passage["text"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError("a passage is empty")
    return Document(document_id=name, text=f"{title}\n\n{text}" if title else text)
