"""Judged answers as one HTML file that needs nothing else. Knows no model.

Passages, questions and answers are anybody's text: the template escapes all values, and the page's policy
allows its own script and style and nothing from elsewhere.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources
from itertools import pairwise
from urllib.parse import urlencode

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from coinrag_integrations.evaluation.errors.classes import ERRORS, Finding
from coinrag_integrations.evaluation.errors.evidence import ShownChunk
from coinrag_integrations.evaluation.errors.judged import ErrorReport, Judged
from coinrag_integrations.evaluation.errors.words import Range, is_within
from coinrag_integrations.evaluation.results import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Characters of a chunk that are marked alike; `title` says in words what `style` shows."""

    text: str
    style: str
    title: str
    is_gold: bool


def render_page(report: ErrorReport) -> str:
    """The page: counts, a filter, and every question with its answers and passages."""
    style, script = _file("page.css"), _file("page.js")
    counts = report.counts
    methods = dict.fromkeys(method for by_method in counts.values() for method in by_method)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["spaced"] = lambda name: name.replace("_", " ")
    return environment.from_string(_file("page.html")).render(
        report=report,
        tables=[_table(data, by_method) for data, by_method in counts.items()],
        meanings=ERRORS,
        filters={"data": list(counts), "method": list(methods), "class": list(ERRORS)},
        questions=map(_question, report.questions),
        style=Markup(style),
        script=Markup(script),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
    )


def parts_of(
    chunk: ShownChunk, gold: Sequence[Range], said: Mapping[Range, Sequence[str]]
) -> list[Part]:
    """A chunk's text cut where a nugget or a gold answer begins or ends.

    `said` are the ranges that hold what methods said instead, with the names of these.
    """
    nuggets = [(n.start, n.stop) for n in chunk.nuggets]
    cuts = {0, len(chunk.text), *(at for pair in (*nuggets, *gold) for at in pair)}
    parts = []
    for start, stop in pairwise(sorted(cuts)):
        here = (start, stop)
        is_gold = is_within(here, gold)
        style, title = _nuggets_at(chunk, gold, said, here)
        if is_gold:
            title = [*title, "gold answer"] if title else ["gold answer, in no nugget"]
        parts.append(
            Part(
                text=chunk.text[start:stop],
                style=" ".join(style),
                title="; ".join(title),
                is_gold=is_gold,
            )
        )
    return parts


def _nuggets_at(
    chunk: ShownChunk, gold: Sequence[Range], said: Mapping[Range, Sequence[str]], here: Range
) -> tuple[list[str], list[str]]:
    """Style and words for a part that lies in some nuggets, or in none."""
    around = [n for n in chunk.nuggets if is_within(here, [(n.start, n.stop)])]
    if not around:
        return [], []
    loaded = [n for n in around if n.is_loaded]
    shown = loaded or around
    ranks = ", ".join(str(n.rank) for n in shown if n.rank is not None)
    title = [f"nugget{' ' + ranks if ranks else ''}, {'loaded' if loaded else 'left'}"]
    style = ["loaded" if loaded else "left"]
    if any(is_within(found, [(n.start, n.stop)]) for found in gold for n in shown):
        style.append("holds")
        title.append("holds a gold answer")
    ranges = [(n.start, n.stop) for n in around]
    methods = sorted({m for one, names in said.items() if one in ranges for m in names})
    if methods:
        style.append("said")
        title.append(f"holds what was said by {', '.join(methods)}")
    if any(n.start == here[0] for n in shown):
        style.append("first")
    return style, title


def _table(data: str, methods: Mapping[str, Mapping[str, int]]) -> dict[str, object]:
    return {
        "data": data,
        "methods": list(methods),
        "rows": [
            {
                "error": error,
                "cells": [
                    {
                        "n": counts[error],
                        "link": urlencode({"data": data, "method": method, "class": error}),
                    }
                    for method, counts in methods.items()
                ],
            }
            for error in ERRORS
        ],
    }


def _question(judged: Judged) -> dict[str, object]:
    evidence = judged.case.evidence
    chunks = [_chunk(judged, i) for i in range(len(evidence.chunks))]
    found = [i for i, chunk in enumerate(evidence.chunks) if chunk.rank is not None]
    rest = [i for i, chunk in enumerate(evidence.chunks) if chunk.rank is None]
    notes = [
        f", {n} {what}"
        for n, what in (
            (sum(bool(evidence.chunks[i].is_supporting) for i in rest), "supporting"),
            (sum(bool(judged.case.gold[i]) for i in rest), "with a gold answer"),
        )
        if n
    ]
    return {
        "data": evidence.data,
        "search": evidence.search,
        "question": evidence.question,
        "golds": evidence.answers,
        "answers": [_answer(answer, finding) for answer, finding in judged.answers],
        "found": [chunks[i] for i in sorted(found, key=lambda i: evidence.chunks[i].rank or 0)],
        "rest": [chunks[i] for i in rest],
        "rest_note": "".join(notes),
    }


def _answer(answer: Measured, finding: Finding) -> dict[str, object]:
    return {
        "method": answer.method,
        "answer": answer.answer,
        "f1": answer.f1,
        "nll": answer.nll,
        "error": finding.error,
        "note": finding.note,
    }


def _chunk(judged: Judged, i: int) -> dict[str, object]:
    chunk, gold = judged.case.evidence.chunks[i], judged.case.gold[i]
    said: dict[Range, list[str]] = {}
    for answer, finding in judged.answers:
        for piece in finding.said:
            if piece.chunk == i:
                said.setdefault((piece.start, piece.stop), []).append(answer.method)
    n_loaded = sum(nugget.is_loaded for nugget in chunk.nuggets)
    badges = [f"{n_loaded} of {len(chunk.nuggets)} nuggets loaded"]
    if chunk.is_supporting:
        badges.append("supporting")
    if gold:
        badges.append("gold answer")
    whole = said.get((0, len(chunk.text)))
    if whole:
        badges.append(f"holds what was said by {', '.join(whole)}")
    return {
        "rank": chunk.rank,
        "document_id": chunk.document_id,
        "badges": badges,
        "parts": parts_of(chunk, gold, said),
    }


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
