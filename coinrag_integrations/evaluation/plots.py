"""What methods cost and give, drawn: F1 against time to first token, and against active tokens.

Needs matplotlib, imported when something is drawn. Every point carries its method's name; the line joins
those that no other beats in both, dotted ones join the numbers of one method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.summary import OURS, MethodSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

BUDGET_MS = 100.0  # the P99 time to first token that the CoinRAG paper allows
_OURS_COLOUR, _COLOUR, _PALE = "#c2410c", "#1e3a5f", "#b8c4d2"
# Where a label may stand beside its point: right and left first, then above, below, further away.
_DIRECTIONS = ((1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1))
_HORIZONTAL: Mapping[int, Literal["left", "right", "center"]]
_HORIZONTAL = {1: "left", -1: "right", 0: "center"}
_VERTICAL: Mapping[int, Literal["bottom", "top", "center"]]
_VERTICAL = {1: "bottom", -1: "top", 0: "center"}
_DISTANCES = (7, 16, 28, 42, 58, 76, 96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One method: what it costs, its F1 in percent, and the F1's interval."""

    name: str
    cost: float
    f1: float
    low: float
    high: float

    @property
    def family(self) -> str:
        """The method without its number."""
        return self.name.partition(":")[0]

    @property
    def is_ours(self) -> bool:
        """Whether it is the method that the others are compared with."""
        return self.family == OURS


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(data: Mapping[str, Mapping[str, MethodSummary]], folder: Path) -> list[Path]:
    """Two plots of each data set, as PNG files in `folder`.

    Raises:
        ConfigError: matplotlib is not installed, or the folder refuses.
    """
    if not can_draw():
        raise ConfigError(
            "plots need matplotlib: pip install 'coinrag-integrations[eval]', or --no-plots"
        )
    drawn = []
    for name, methods in data.items():
        stem = name.replace(" ", "-")
        time, tokens = folder / f"{stem}-f1-ttft.png", folder / f"{stem}-f1-tokens.png"
        n = next(iter(methods.values())).n
        _draw(
            _points(methods, {m: it.ttft_ms.p99 for m, it in methods.items()}),
            f"{name}: F1 against P99 time to first token (n = {n})",
            "P99 time to first token (ms, log scale; further left is faster)",
            time,
            budget=BUDGET_MS,
        )
        _draw(
            _points(methods, {m: it.entries for m, it in methods.items()}),
            f"{name}: F1 against active tokens (n = {n})",
            "active tokens: rows between prompt and question (further left is less to attend to)",
            tokens,
        )
        drawn += [time, tokens]
    return drawn


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats: cheapest first, each better than all cheaper ones."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, -p.f1)):
        if not kept or point.f1 > kept[-1].f1:
            kept.append(point)
    return kept


def _points(methods: Mapping[str, MethodSummary], costs: Mapping[str, float]) -> list[Point]:
    return [
        Point(
            name=name,
            cost=costs[name],
            f1=100 * it.f1,
            low=100 * it.f1_ci[0],
            high=100 * it.f1_ci[1],
        )
        for name, it in methods.items()
    ]


def _draw(
    points: Sequence[Point], title: str, x_label: str, path: Path, budget: float | None = None
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    best = front(points)
    axes.plot([p.cost for p in best], [p.f1 for p in best], color=_PALE, lw=2, zorder=1)
    for family in dict.fromkeys(p.family for p in points):  # a sweep: one method, several numbers
        one = sorted((p for p in points if p.family == family), key=lambda p: p.cost)
        colour = _OURS_COLOUR if one[0].is_ours else _COLOUR
        costs, f1s = [p.cost for p in one], [p.f1 for p in one]
        axes.plot(costs, f1s, color=colour, lw=1, ls=":", alpha=0.6, zorder=2)
        axes.plot(costs, f1s, "o", ms=8 if one[0].is_ours else 6, color=colour, zorder=3)
    for p in points:
        colour = _OURS_COLOUR if p.is_ours else _COLOUR
        axes.plot([p.cost] * 2, [p.low, p.high], color=colour, lw=1, alpha=0.25, zorder=2)
    if budget is not None:
        axes.set_xscale("log")
        axes.axvline(budget, color="#6b7280", lw=1.2, ls="--", zorder=0)
        costs = [*(p.cost for p in points), budget]
        axes.set_xlim(min(costs) / 1.3, max(costs) * 1.5)
        _plain_ticks(axes)
        axes.annotate(
            f"budget {budget:g} ms",
            (budget, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -12),
            textcoords="offset points",
            color="#6b7280",
        )
    else:
        most = max(p.cost for p in points) + 1
        axes.set_xlim(-0.03 * most, 1.2 * most)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(x_label)
    axes.set_ylabel("token F1 (%, with 95 % interval; higher is better)")
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    _label(axes, points)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _plain_ticks(axes: Axes) -> None:
    """Milliseconds at 1, 2 and 5 of each power of ten, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _label(axes: Axes, points: Sequence[Point]) -> None:
    """Each point's name beside it, where it covers neither a point nor another name."""
    figure = axes.figure
    figure.draw_without_rendering()  # type: ignore[union-attr]  # it is a Figure: fixes the layout
    scale = figure.dpi / 72
    centres = axes.transData.transform([(p.cost, p.f1) for p in points])
    taken: list[Any] = [_around(x, y, 5 * scale) for x, y in centres]
    inside = axes.bbox
    for p in sorted(points, key=lambda p: (not p.is_ours, -p.f1)):
        colour = _OURS_COLOUR if p.is_ours else _COLOUR
        label = axes.annotate(
            p.name,
            (p.cost, p.f1),
            textcoords="offset points",
            xytext=(0, 0),
            color=colour,
            fontsize=9,
            fontweight="bold" if p.is_ours else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "alpha": 0.5},
        )
        taken.append(_settle(label, taken, inside))


def _settle(label: Annotation, taken: Sequence[Bbox], inside: Bbox) -> Bbox:
    """Move a label to the first free place around its point; where it then lies, in pixels."""
    box = label.get_window_extent()
    for distance in _DISTANCES:
        for right, up in _DIRECTIONS:
            label.set_horizontalalignment(_HORIZONTAL[right])
            label.set_verticalalignment(_VERTICAL[up])
            label.set_position((distance * right, distance * up))
            # Without its arrow, which would make the box reach to the point.
            box = _text_box(label)
            within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0
            if within and box.y1 <= inside.y1 and not any(box.overlaps(other) for other in taken):
                return box
    return box


def _text_box(label: Annotation) -> Bbox:
    from matplotlib.text import Text

    label.update_positions(label.get_figure().canvas.get_renderer())  # type: ignore[union-attr]
    return Text.get_window_extent(label)


def _around(x: float, y: float, radius: float) -> Bbox:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)
