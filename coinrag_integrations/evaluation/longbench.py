"""LongBench's English data sets as examples, read through `datasets`. Knows no model and no metric.

Their `data.zip` holds `data/<name>.jsonl`; a line has the question (`input`), the `context`, `answers`.
It comes from a local copy, out of the hub's cache, or from the hub, once. `datasets` reads lines as text:
its JSON reader would make timestamps of answers such as "1999-01-01".

The contexts of `triviaqa` and `samsum` are solved examples, with what to answer from in the question:
there is nothing to retrieve, and they are refused. So are Chinese, classification, counting and code.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from zipfile import BadZipFile
from zlib import error as ZlibError

from coinrag_integrations.errors import ConfigError, DocumentError
from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.types import Document

REPOSITORY, ARCHIVE = "zai-org/LongBench", "data.zip"
SOURCE = "COINRAG_LONGBENCH"  # an environment variable: a local copy of the archive or its folder
_HUB_SECONDS = 5.0
_OF_ARTICLES = ("hotpotqa", "2wikimqa", "musique")  # passages, each headed by its title
_OF_PASSAGES = (*_OF_ARTICLES, "multi_news")
_OF_ONE_TEXT = ("qasper", "narrativeqa", "multifieldqa_en", "gov_report", "qmsum")
NAMES = (*_OF_PASSAGES, *_OF_ONE_TEXT)
_FEW_SHOT = ("triviaqa", "samsum", "trec")
# Their lines have no question.
_INSTRUCTIONS = {
    "gov_report": "Summarise the report on one page.",
    "multi_news": "Summarise what the news reports say on one page.",
}
_HEADING = re.compile(r"^Passage (\d+):\s*", re.MULTILINE)
_LINE_END = re.compile(r"\s*\n\s*")


def read_longbench(
    name: str, limit: int | None = None, source: str | Path | None = None
) -> tuple[Example, ...]:
    """The first `limit` examples of one of `NAMES`; nobody says which documents support them.

    `source` is the archive, or a folder with it or with the files of it; otherwise what the environment
    variable COINRAG_LONGBENCH names, otherwise the hub's cache or the hub.

    Raises:
        ConfigError: no such data set, one that is not made for retrieval, or `datasets` is not installed.
        DocumentError: the hub cannot be reached, or what is there is not LongBench's.
    """
    if name not in NAMES:
        why = "has few-shot examples for a context" if name in _FEW_SHOT else "is not read here"
        raise ConfigError(f"LongBench's {name!r} {why}: use one of {', '.join(NAMES)}")
    if find_spec("datasets") is None:
        raise ConfigError(
            "LongBench is read through datasets: pip install 'coinrag-integrations[eval]'"
        )
    source = source or os.environ.get(SOURCE)
    file = _file(name, Path(source) if source else _fetched())
    examples = []
    for number, line in enumerate(islice(_lines(file), limit), 1):
        try:
            examples.append(_example(name, line, f"longbench-{name}/{number}"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DocumentError(
                f"{file}, line {number}, is not LongBench's ({type(error).__name__}: {error}): each line "
                "must be a JSON object with input, context and answers"
            ) from error
    if not examples:
        raise DocumentError(f"{file} holds no questions: is it the whole file?")
    return tuple(examples)


def split_passages(context: str) -> list[str]:
    """The texts behind the headings "Passage 1:", "Passage 2:" and so on; without any, the whole text.

    The numbers say nothing but the order, so that they would only keep passages from being found again. A
    heading out of turn is text.
    """
    texts, start, number = [], 0, 1
    for heading in _HEADING.finditer(context):
        if int(heading[1]) == number:
            texts.append(context[start : heading.start()])
            start = heading.end()
            number += 1
    texts.append(context[start:])
    return [text.strip() for text in texts if text.strip()]


def _example(name: str, line: str, title: str) -> Example:
    row = json.loads(line)
    question = _INSTRUCTIONS.get(name) or row["input"].strip()
    answers = tuple(answer for answer in row["answers"] if answer.strip())
    if not question or not answers:
        raise ValueError("the question or all answers are empty")
    context = row["context"]
    texts = split_passages(context) if name in _OF_PASSAGES else [context.strip()]
    if name in _OF_ARTICLES:  # a blank line behind the title, as in all our data
        texts = [_LINE_END.sub("\n\n", text, count=1) for text in texts]
    if not any(texts):
        raise ValueError("the context is empty")
    return Example(
        question=question,
        answers=answers,
        documents=tuple(
            Document(document_id=f"{title}/{i}", text=text) for i, text in enumerate(texts)
        ),
        supporting=frozenset(),
    )


def _lines(file: str) -> Iterator[str]:
    from datasets import load_dataset

    # Inside an archive only the name of the member is a pattern.
    pattern = file if file.startswith("zip://") else glob.escape(file)
    try:
        # Streamed: a limit reads no more than it needs, and nothing is copied to a cache.
        for row in load_dataset("text", data_files=pattern, split="train", streaming=True):
            if row["text"].strip():
                yield row["text"]
    except FileNotFoundError as error:
        raise DocumentError(f"{file} is not there: is it LongBench's {ARCHIVE}?") from error
    except UnicodeDecodeError as error:
        raise DocumentError(f"{file} is not UTF-8 ({error.reason}): fetch it again") from error
    except (OSError, EOFError, BadZipFile, ZlibError, RuntimeError) as error:
        raise DocumentError(f"cannot read {file} ({error}): fetch it again") from error


def _file(name: str, source: Path) -> str:
    """What `datasets` calls the lines of a data set."""
    if source.is_dir():
        for file in (source / "data" / f"{name}.jsonl", source / f"{name}.jsonl"):
            if file.is_file():
                return file.as_posix()
        source = source / ARCHIVE
    if not source.is_file():
        raise DocumentError(
            f"there is no {source}: give LongBench's {ARCHIVE}, or a folder with it or {name}.jsonl"
        )
    return f"zip://data/{name}.jsonl::{source.absolute().as_posix()}"


def _fetched() -> Path:
    """The archive in the hub's cache, fetched (114 MB) where it is not there yet."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library

    cached = try_to_load_from_cache(REPOSITORY, ARCHIVE, repo_type="dataset")
    if isinstance(cached, str):
        return Path(cached)
    try:
        # Without retries; hf_hub_download waits half a minute before it gives up.
        url = hf_hub_url(REPOSITORY, ARCHIVE, repo_type="dataset")
        get_hf_file_metadata(url, timeout=_HUB_SECONDS)
        return Path(hf_hub_download(REPOSITORY, ARCHIVE, repo_type="dataset"))
    except (OSError, HTTPError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DocumentError(
            f"LongBench cannot be fetched from the hub ({reason}): put {ARCHIVE} of its data set "
            f"{REPOSITORY} somewhere, and name that in the environment variable {SOURCE}"
        ) from error
