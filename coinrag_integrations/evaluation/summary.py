"""Measurements summed up: by data set and method, as JSON and as Markdown tables. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import numpy as np

from coinrag_integrations.evaluation.results import Measured
from coinrag_integrations.evaluation.statistics import Estimate, bootstrap, paired_bootstrap
from coinrag_integrations.evaluation.ttft import Spread

REFERENCE, OURS = "full", "spans"
POOLED = "(all)"  # no data set's name
_COLUMNS = (
    *("method", "F1 (95 %)", "to full", "NLL", "empty", "active tokens", "read"),
    *("TTFT P50", "mean", "P99 ms"),
)
Rows = Sequence[Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSummary:
    """One method on one data set.

    `f1` from 0 to 1 with its bootstrap interval; `nll` the mean over questions of nats a token of the
    first gold answer; `empty` counts questions without an answer; `entries` are the mean rows between
    prompt and question that the answer sees (active tokens). `rouge_l` is there for summaries only.
    """

    n: int
    f1: float
    f1_ci: tuple[float, float]
    nll: float
    empty: int
    entries: float
    bytes_read: float
    ttft_ms: Spread
    rouge_l: float | None = None

    @classmethod
    def of(cls, rows: Rows, seed: int = 0) -> MethodSummary:
        """Of at least one measurement."""
        f1 = bootstrap([row.f1 for row in rows], seed)
        rouge = [row.rouge_l for row in rows if row.rouge_l is not None]
        return cls(
            n=len(rows),
            f1=round(f1.mean, 6),
            f1_ci=(round(f1.low, 6), round(f1.high, 6)),
            nll=round(float(np.mean([row.nll for row in rows])), 6),
            empty=sum(row.is_empty for row in rows),
            entries=round(float(np.mean([row.n_context for row in rows])), 2),
            bytes_read=round(float(np.mean([row.bytes_read for row in rows])), 1),
            ttft_ms=Spread.of([row.ttft_ms for row in rows]),
            rouge_l=round(float(np.mean(rouge)), 6) if rouge else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = asdict(self)
        if self.rouge_l is None:
            del values["rouge_l"]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much higher one method is than another, question by question: F1, and nats a token."""

    f1: Estimate
    nll: Estimate

    @classmethod
    def of(cls, ours: Rows, theirs: Rows, seed: int = 0) -> Difference:
        """Of measurements of the same questions in order."""
        return cls(
            f1=paired_bootstrap([row.f1 for row in ours], [row.f1 for row in theirs], seed),
            nll=paired_bootstrap([row.nll for row in ours], [row.nll for row in theirs], seed),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All methods on all data sets, and on all of them together if there are several (`pooled`).

    `to_reference` is each method minus the reference, `ours` the one that is `compared` minus each; empty
    if one of them was not measured. What was pooled stands there under the name "(all)".
    """

    data: Mapping[str, Mapping[str, MethodSummary]]
    pooled: Mapping[str, MethodSummary]
    reference: str | None
    to_reference: Mapping[str, Mapping[str, Difference]]
    compared: str
    ours: Mapping[str, Mapping[str, Difference]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "data": {
                name: {method: summary.to_dict() for method, summary in methods.items()}
                for name, methods in self.data.items()
            },
            "pooled": {method: summary.to_dict() for method, summary in self.pooled.items()},
            "reference": self.reference,
            "paired_f1": _plain(self.to_reference, "f1"),
            "paired_nll": _plain(self.to_reference, "nll"),
            f"{self.compared}_minus": {
                "f1": _plain(self.ours, "f1"),
                "nll": _plain(self.ours, "nll"),
            },
        }

    @property
    def tables(self) -> dict[str, Mapping[str, MethodSummary]]:
        """By data set, and then all of them, by their title."""
        together = f"all {len(self.data)} data sets"
        return {**self.data, **({together: self.pooled} if self.pooled else {})}

    def to_markdown(self) -> str:
        """A table for each data set, and one that says how sure we are of being better or worse."""
        pairs = (*self.data, POOLED) if self.pooled else tuple(self.data)
        tables = [
            self._table(title, methods, name)
            for (title, methods), name in zip(self.tables.items(), pairs, strict=True)
        ]
        return "\n".join((*tables, *self._differences()))

    def _table(self, title: str, methods: Mapping[str, MethodSummary], name: str) -> str:
        n = next(iter(methods.values())).n
        has_rouge = any(it.rouge_l is not None for it in methods.values())
        columns = (*_COLUMNS, "ROUGE-L") if has_rouge else _COLUMNS
        lines = [f"## {title}, n = {n}", "", *_header(columns)]
        for method, it in methods.items():
            difference = self.to_reference.get(name, {}).get(method)
            low, high = it.f1_ci
            cells = [
                method,
                f"{100 * it.f1:.1f} ({100 * low:.1f} to {100 * high:.1f})",
                _signed(difference.f1, 100) if difference else "",
                f"{it.nll:.3f}",
                str(it.empty),
                f"{it.entries:,.0f}",
                f"{it.bytes_read / 1e6:,.1f} MB" if it.bytes_read else "0",
                *(f"{ms:,.1f}" for ms in (it.ttft_ms.p50, it.ttft_ms.mean, it.ttft_ms.p99)),
            ]
            if has_rouge:
                cells.append("" if it.rouge_l is None else f"{100 * it.rouge_l:.1f}")
            lines.append(_line(cells))
        return "\n".join([*lines, ""])

    def _differences(self) -> list[str]:
        if not self.ours:
            return []
        lines = [
            f"## {self.compared} minus each method, question by question (95 %)",
            "",
            "F1: above 0 is better. NLL, nats a token of the gold answer: below 0 is better. "
            "In bold what the interval sets apart from 0.",
        ]
        for value, factor, digits in (("f1", 100, 1), ("nll", 1, 3)):
            columns = (value.upper(), *self.ours)
            lines += ["", *_header(columns)]
            for method in next(iter(self.ours.values())):
                cells = [
                    _signed(getattr(by_method[method], value), factor, digits, bold=True)
                    for by_method in self.ours.values()
                ]
                lines.append(_line((method, *cells)))
        return [*lines, ""]


def summarise(
    results: Mapping[str, Mapping[str, Rows]], seed: int = 0, compared: str = OURS
) -> Summary:
    """What `compare` measured; differences are to full prefill, and of `compared`, if these were."""
    methods = {method: None for by_method in results.values() for method in by_method}
    pooled = {
        method: [*chain.from_iterable(by_method[method] for by_method in results.values())]
        for method in (methods if len(results) > 1 else ())
    }
    everything = {**results, **({POOLED: pooled} if pooled else {})}
    return Summary(
        data={name: _summaries(by_method, seed) for name, by_method in results.items()},
        pooled=_summaries(pooled, seed),
        reference=REFERENCE if REFERENCE in methods else None,
        to_reference={
            name: {
                method: Difference.of(rows, by_method[REFERENCE], seed)
                for method, rows in by_method.items()
                if method != REFERENCE
            }
            for name, by_method in everything.items()
            if REFERENCE in methods
        },
        compared=compared,
        ours={
            name: {
                method: Difference.of(by_method[compared], rows, seed)
                for method, rows in by_method.items()
                if method != compared
            }
            for name, by_method in everything.items()
            if compared in methods and len(methods) > 1
        },
    )


def _summaries(by_method: Mapping[str, Rows], seed: int) -> dict[str, MethodSummary]:
    return {method: MethodSummary.of(rows, seed) for method, rows in by_method.items()}


def _plain(found: Mapping[str, Mapping[str, Difference]], value: str) -> dict[str, Any]:
    def of(difference: Difference) -> dict[str, Any]:
        it: Estimate = getattr(difference, value)
        return {"mean": round(it.mean, 6), "ci": [round(it.low, 6), round(it.high, 6)]}

    return {
        name: {method: of(difference) for method, difference in by_method.items()}
        for name, by_method in found.items()
    }


def _signed(it: Estimate, factor: float, digits: int = 1, *, bold: bool = False) -> str:
    mean, low, high = (f"{factor * x:+.{digits}f}" for x in (it.mean, it.low, it.high))
    mark = "**" if bold and it.low < it.high and (it.low > 0 or it.high < 0) else ""
    return f"{mark}{mean}{mark} ({low} to {high})"


def _header(columns: Sequence[str]) -> list[str]:
    return [_line(columns), "|---|" + "---:|" * (len(columns) - 1)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
