"""Answers out of a folder of results, each with its evidence and its class. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.errors.classes import Case, Finding, Reading, count_errors
from coinrag_integrations.evaluation.errors.evidence import read_evidence
from coinrag_integrations.evaluation.results import RESULTS, Measured, read_results
from coinrag_integrations.evaluation.rivals import parse_method

_FIRST = ("spans", "full")  # then the others by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A question as one search answered it: what was found, and every method's answer."""

    case: Case
    answers: tuple[tuple[Measured, Finding], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """Judged answers of one setting.

    `n_others` other settings have results in the same folder; `n_without` questions have no evidence
    and are left out.
    """

    settings: str
    n_others: int
    n_without: int
    questions: tuple[Judged, ...]

    @property
    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """How often each class is there, by data set and method."""
        return count_errors(
            (answer.data, answer.method, finding.error)
            for answer, finding in sorted(
                (both for question in self.questions for both in question.answers),
                key=lambda both: _order(both[0].method),
            )
        )


def judge(folder: Path, methods: Sequence[str] = (), data: Sequence[str] = ()) -> ErrorReport:
    """Judge the answers in a folder of results: of these methods and data sets, or of all.

    Of several settings, those that were measured last are taken.

    Raises:
        ConfigError: no results, none of a method or data set that is asked for, or none with evidence.
    """
    there = list(read_results(folder / RESULTS))
    if not there:
        raise ConfigError(f"there are no results in {folder}: run coinrag eval --out {folder}")
    for kind, asked, known in (
        ("method", methods, {answer.method for answer in there}),
        ("data set", data, {answer.data for answer in there}),
    ):
        if unknown := [name for name in asked if name not in known]:
            raise ConfigError(
                f"there are no results of the {kind} {unknown[0]!r} in {folder}, only of: "
                f"{', '.join(sorted(known))}"
            )
    wanted = [
        answer
        for answer in there
        if (not methods or answer.method in methods) and (not data or answer.data in data)
    ]
    if not wanted:
        raise ConfigError(f"no data set in {folder} was answered by these methods: name others")
    settings = wanted[-1].settings
    answers: dict[tuple[str, str, str], dict[str, Measured]] = {}
    for answer in wanted:
        if answer.settings == settings:
            key = answer.data, answer.example, parse_method(answer.method).search
            answers.setdefault(key, {})[answer.method] = answer
    cases = {
        row.key: Case.of(row)
        for row in read_evidence(folder)
        if row.settings == settings and row.key in answers
    }
    if not cases:
        raise ConfigError(
            f"the results in {folder} are without evidence (an older version wrote them): run the same "
            "coinrag eval again, which adds it and measures nothing anew"
        )
    return ErrorReport(
        settings=settings,
        n_others=len({answer.settings for answer in wanted}) - 1,
        n_without=len(answers.keys() - cases.keys()),
        questions=tuple(
            Judged(case=cases[key], answers=tuple(_judged(cases[key], by_method)))
            for key, by_method in answers.items()
            if key in cases
        ),
    )


def reading_of(method: str) -> Reading:
    """What a method reads: "spans:5" the five nearest nuggets."""
    it = parse_method(method)
    return Reading(what=it.reads, n_nuggets=it.n_nuggets)


def _judged(case: Case, by_method: dict[str, Measured]) -> list[tuple[Measured, Finding]]:
    return [
        (by_method[name], case.explain(by_method[name].answer, reading_of(name)))
        for name in sorted(by_method, key=_order)
    ]


def _order(method: str) -> tuple[int, str]:
    return (_FIRST.index(method) if method in _FIRST else len(_FIRST), method)
