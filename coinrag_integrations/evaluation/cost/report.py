"""What answers cost, for people: sentences, Markdown tables, a plot. Measures nothing.

The plot needs matplotlib, imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.cost.measure import CostReport, RoadCost, build_parts
from coinrag_integrations.evaluation.cost.roads import Road
from coinrag_integrations.evaluation.estimate import Guess

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEANINGS: Mapping[Road, str] = {
    "full": "full: text of the chunks, prefilled",
    "text": "text: words of the nuggets, prefilled",
    "chunk": "chunk: KV of whole chunks",
    "spans": "spans: KV of the nuggets",
}
_COLOURS: Mapping[Road, str] = {
    "full": "#111827",
    "text": "#0f766e",
    "chunk": "#3b6fb6",
    "spans": "#c2410c",
}
_AFTER = (1, 100, 10_000, 1_000_000)  # questions
_ROAD_COLUMNS = (
    *("road", "F1 (95 %)", "to full", "build s", "disk", "s a question", "questions/s"),
    *("answer P50", "TTFT P50", "mean", "P99 ms", "read"),
)


def to_markdown(report: CostReport, name: str) -> str:
    """Tables of what was built, and for each concurrency what was asked and when it has paid."""
    lines = [f"# What {name} costs", "", *notes(report), ""]
    lines += ["## Building", "", *_build_table(report), ""]
    for n, roads in report.levels.items():
        lines += [f"## {n} at once", "", *_road_table(roads), ""]
        lines += ["Mean milliseconds of a question:", "", *_parts_table(roads), ""]
        lines += [f"{title(report.unit)} after so many questions:", "", *_after_table(roads), ""]
        lines += [*_bullets(pay_offs(roads)), ""]
    return "\n".join(lines)


def notes(report: CostReport) -> list[str]:
    """What a reader has to know of how this was measured."""
    built, config = report.built, report.config
    said = [
        f"{built.n_documents:,} passages, {built.n_chunks:,} chunks, {built.n_tokens:,} tokens, "
        f"{built.n_nuggets:,} nuggets that hold {built.n_covered_tokens:,} of them; built in "
        f"{duration(built.total_seconds)}" + (" by an earlier run." if report.reused else "."),
        "KV files were dropped from the operating system's cache before each turn: the disk was read."
        if config.cold
        else "KV files may have come from the operating system's cache: a disk that is asked for the "
        "first time is slower.",
    ]
    said.append(
        "A road counts as worse than full if the 95 % interval of the difference in F1 lies below 0: few "
        "questions tell little apart."
    )
    if any(it.n_declined for roads in report.levels.values() for it in roads.values()):
        said.append("Some spans were encoded anew because reading them would have taken longer.")
    if config.extraction_seconds:
        said.append(
            f"{config.extraction_seconds:g} s a chunk were added for finding nuggets: given, not measured."
        )
    if (prices := config.prices) is not None:
        said.append(
            f"Money: {prices.hour:g} an hour of the machine, {prices.gb_month:g} a gigabyte and month, "
            f"kept for {prices.days:g} days."
        )
    return said


def pay_offs(roads: Mapping[Road, RoadCost]) -> list[str]:
    """After how many questions each road has paid for itself, in sentences."""
    return [
        f"{road} {_paid(paid)} against {other}{', at a lower F1' if it.is_worse else ''}."
        for road, it in roads.items()
        for other, paid in it.paid_off.items()
    ]


def questions(paid: Guess) -> str:
    """A number of questions with its range; "never" where there is none."""
    if paid.is_exact:
        return _count(paid.value)
    return f"{_count(paid.value)} ({_count(paid.low)} to {_count(paid.high)})"


def signed_f1(it: RoadCost) -> str:
    """The difference to full prefill, in points."""
    mean, low, high = (100 * x for x in (it.to_full.mean, it.to_full.low, it.to_full.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:,.3g} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def title(unit: str) -> str:
    """What lines count."""
    return "Seconds of the machine" if unit == "s" else "Money"


def _paid(paid: Guess) -> str:
    if math.isinf(paid.low):
        return "never pays"
    if math.isinf(paid.value):
        return f"does not pay (at best after {_count(paid.low)} questions)"
    return f"has paid after {questions(paid)} questions" if paid.high else "pays from the start"


def _count(n: float) -> str:
    return "never" if math.isinf(n) else f"{math.ceil(n):,}"


def _bullets(sentences: Sequence[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def _build_table(report: CostReport) -> list[str]:
    roads = next(iter(report.levels.values()))
    needed = {road: build_parts(road, report.built, report.config) for road in roads}
    parts = list(dict.fromkeys(part for by_part in needed.values() for part in by_part))
    rows = [
        [part, *(f"{needed[road][part]:,.2f}" if part in needed[road] else "" for road in roads)]
        for part in parts
    ]
    rows.append(["together", *(f"{it.build_seconds:,.2f}" for it in roads.values())])
    rows.append(["disk", *(f"{it.disk_bytes / 1e6:,.1f} MB" for it in roads.values())])
    return _table(("seconds", *roads), rows)


def _road_table(roads: Mapping[Road, RoadCost]) -> list[str]:
    rows = []
    for road, it in roads.items():
        f1 = it.f1
        rows.append(
            [
                road,
                f"{100 * f1.mean:.1f} ({100 * f1.low:.1f} to {100 * f1.high:.1f})",
                "" if road == "full" else signed_f1(it) + (" worse" if it.is_worse else ""),
                f"{it.build_seconds:,.1f}",
                f"{it.disk_bytes / 1e6:,.1f} MB",
                f"{it.machine_seconds:.4g}",
                f"{it.per_second:.3g}",
                f"{it.answer_ms.p50:,.1f}",
                *(f"{ms:,.1f}" for ms in (it.ttft_ms.p50, it.ttft_ms.mean, it.ttft_ms.p99)),
                f"{it.bytes_read / 1e6:,.2f} MB" if it.bytes_read else "0",
            ]
        )
    return _table(_ROAD_COLUMNS, rows)


def _parts_table(roads: Mapping[Road, RoadCost]) -> list[str]:
    parts = list(next(iter(roads.values())).parts_ms)
    rows = [[road, *(f"{it.parts_ms[part]:,.1f}" for part in parts)] for road, it in roads.items()]
    return _table(("road", *parts), rows)


def _after_table(roads: Mapping[Road, RoadCost]) -> list[str]:
    rows = [[road, *(_rounded(it.line.at(n)) for n in _AFTER)] for road, it in roads.items()]
    return _table(("road", *(f"{n:,}" for n in _AFTER)), rows)


def _rounded(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 1_000 else f"{amount:.4g}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---", *(["---:"] * (len(columns) - 1))], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def draw_cost(report: CostReport, name: str, path: Path) -> None:
    """What a question costs with its share of the build, by how many are asked; a panel a concurrency.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib: pip install 'coinrag-integrations[eval]', or --no-plots"
        ) from error
    n_panels = len(report.levels)
    figure = Figure(figsize=(6.8 * n_panels + 0.6, 8.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, n_panels, sharex=True, sharey=True, squeeze=False)[0]
    n = next(iter(next(iter(report.levels.values())).values())).n
    what = "seconds of the machine" if report.unit == "s" else "money"
    figure.suptitle(
        f"{name}: {what} a question, its share of the build included\n"
        f"({report.built.n_documents:,} passages, {n} questions measured)",
        fontweight="bold",
    )
    last = _last(report)
    for axes, (at_once, roads) in zip(panels, report.levels.items(), strict=True):
        _draw_panel(axes, roads, last)
        axes.set_title("one question at a time" if at_once == 1 else f"{at_once} questions at once")
    panels[0].set_ylabel(f"{what} a question (log scale; lower is cheaper)")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _last(report: CostReport) -> float:
    """So many questions that every crossing, and what comes behind it, can be seen."""
    ends = [
        paid.value
        for roads in report.levels.values()
        for it in roads.values()
        for paid in it.paid_off.values()
        if math.isfinite(paid.value)
    ]
    return float(max(10 ** math.ceil(math.log10(max([*ends, 1.0])) + 1), 1_000))


def _draw_panel(axes: Axes, roads: Mapping[Road, RoadCost], last: float) -> None:
    from matplotlib.ticker import FuncFormatter

    points = [last ** (i / 200) for i in range(201)]
    for road, it in roads.items():
        axes.plot(
            points,
            [it.line.at(n) / n for n in points],
            color=_COLOURS[road],
            lw=2.4 if road == "spans" else 1.8,
            ls="--" if it.is_worse else "-",
            label=_legend(road, it),
        )
        for other, paid in it.paid_off.items():
            if 1 <= paid.value <= last:
                y = it.line.at(paid.value) / paid.value
                fill = _COLOURS[road] if other == "full" else "white"
                axes.plot(paid.value, y, "o", ms=7, mfc=fill, mec=_COLOURS[road], mew=1.6, zorder=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(1, last)
    axes.xaxis.set_major_formatter(FuncFormatter(_plain_number))
    axes.yaxis.set_major_formatter(FuncFormatter(_plain_number))
    axes.set_xlabel(
        "questions asked of the store (log scale)\n"
        "a full dot: from here cheaper than full; an empty one: cheaper than text"
    )
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the panel, where no curve can be.
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), fontsize=9, frameon=False)


def _legend(road: Road, it: RoadCost) -> str:
    """What a road is, and when it has paid."""
    text = MEANINGS[road] + (" (dashed: F1 lower than full)" if it.is_worse else "")
    paid = [f"{_paid(paid)} against {other}" for other, paid in it.paid_off.items()]
    return "\n".join([text, *paid])


def _plain_number(x: float, _: object = None) -> str:
    return f"{x:,.0f}" if x >= 1 else f"{x:g}"
