"""Measurements summed up: by data set and method, as JSON and as a Markdown table. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coinrag_integrations.evaluation.results import Measured
from coinrag_integrations.evaluation.statistics import Estimate, bootstrap, paired_bootstrap
from coinrag_integrations.evaluation.ttft import Spread

REFERENCE = "full"
_COLUMNS = (
    *("method", "F1 (95 %)", "to full", "NLL", "empty", "active tokens", "read"),
    *("TTFT P50", "mean", "P99 ms"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSummary:
    """One method on one data set.

    `f1` from 0 to 1 with its bootstrap interval; `nll` the mean over questions of nats a token of the
    first gold answer; `empty` counts questions without an answer; `entries` are the mean rows between
    prompt and question that the answer sees (active tokens).
    """

    n: int
    f1: float
    f1_ci: tuple[float, float]
    nll: float
    empty: int
    entries: float
    bytes_read: float
    ttft_ms: Spread

    @classmethod
    def of(cls, rows: Sequence[Measured], seed: int = 0) -> MethodSummary:
        """Of at least one measurement."""
        f1 = bootstrap([row.f1 for row in rows], seed)
        return cls(
            n=len(rows),
            f1=round(f1.mean, 6),
            f1_ci=(round(f1.low, 6), round(f1.high, 6)),
            nll=round(float(np.mean([row.nll for row in rows])), 6),
            empty=sum(row.is_empty for row in rows),
            entries=round(float(np.mean([row.n_context for row in rows])), 2),
            bytes_read=round(float(np.mean([row.bytes_read for row in rows])), 1),
            ttft_ms=Spread.of([row.ttft_ms for row in rows]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All methods on all data sets; `paired` is F1 minus the reference's, question by question."""

    data: Mapping[str, Mapping[str, MethodSummary]]
    reference: str | None
    paired: Mapping[str, Mapping[str, Estimate]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "data": {
                name: {method: asdict(summary) for method, summary in methods.items()}
                for name, methods in self.data.items()
            },
            "reference": self.reference,
            "paired_f1": {
                name: {
                    method: {"mean": round(d.mean, 6), "ci": [round(d.low, 6), round(d.high, 6)]}
                    for method, d in methods.items()
                }
                for name, methods in self.paired.items()
            },
        }

    def to_markdown(self) -> str:
        """A table for each data set."""
        return "\n".join(self._table(name) for name in self.data)

    def _table(self, name: str) -> str:
        methods = self.data[name]
        n = next(iter(methods.values())).n
        lines = [f"## {name}, n = {n}", "", _line(_COLUMNS), "|---|" + "---:|" * 9]
        for method, it in methods.items():
            difference = self.paired.get(name, {}).get(method)
            low, high = it.f1_ci
            lines.append(
                _line(
                    (
                        method,
                        f"{100 * it.f1:.1f} ({100 * low:.1f} to {100 * high:.1f})",
                        _signed(difference) if difference else "",
                        f"{it.nll:.3f}",
                        str(it.empty),
                        f"{it.entries:,.0f}",
                        f"{it.bytes_read / 1e6:,.1f} MB" if it.bytes_read else "0",
                        *(f"{ms:,.1f}" for ms in (it.ttft_ms.p50, it.ttft_ms.mean, it.ttft_ms.p99)),
                    )
                )
            )
        return "\n".join([*lines, ""])


def summarise(results: Mapping[str, Mapping[str, Sequence[Measured]]], seed: int = 0) -> Summary:
    """What `compare` measured; differences are to full prefill, if that was measured."""
    methods = {method for by_method in results.values() for method in by_method}
    reference = REFERENCE if REFERENCE in methods else None
    return Summary(
        data={
            name: {method: MethodSummary.of(rows, seed) for method, rows in by_method.items()}
            for name, by_method in results.items()
        },
        reference=reference,
        paired={
            name: {
                method: paired_bootstrap(
                    [row.f1 for row in rows], [row.f1 for row in by_method[reference]], seed
                )
                for method, rows in by_method.items()
                if method != reference
            }
            for name, by_method in results.items()
        }
        if reference
        else {},
    )


def _signed(difference: Estimate) -> str:
    mean, low, high = (100 * x for x in (difference.mean, difference.low, difference.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
