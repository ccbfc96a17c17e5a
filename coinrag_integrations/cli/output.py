"""What commands print: human text, progress, and with `--json` one object as stdout's last line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:
    from coinrag_integrations.engine.forms import ChunkForms
    from coinrag_integrations.ingest import IngestReport, OnProgress


class Output:
    """Where a command's words go."""

    def __init__(self, *, as_json: bool) -> None:
        """Human text goes to stderr when stdout is for the object.

        Texts are printed as they are: documents, answers and `pip install 'x[y]'` have brackets, too.
        """
        self.as_json = as_json
        self.console = Console(
            stderr=as_json, highlight=False, soft_wrap=True, markup=False, emoji=False
        )

    def say(self, *parts: Any, style: str | None = None, end: str = "\n") -> None:
        """A line, or anything rich can draw, for people."""
        self.console.print(*parts, style=style, end=end)

    def result(self, value: dict[str, Any]) -> None:
        """The command's object, for programs; nothing without `--json`."""
        if self.as_json:
            sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
            sys.stdout.flush()

    @contextmanager
    def ingesting(self, total: int | None = None) -> Iterator[OnProgress]:
        """A progress line over an ingestion: give what it yields to `CoinRAG.add`."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("documents · {task.fields[detail]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("building", total=total, detail="")

            def show(report: IngestReport) -> None:
                detail = f"{report.n_encoded} chunks encoded"
                progress.update(task, completed=report.n_documents, detail=detail)

            yield show

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Progress]:
        """A bar of `total` steps; advance its only task."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=self.console, transient=True) as progress:
            progress.add_task(what, total=total)
            yield progress


def stored_bytes(forms: ChunkForms) -> tuple[int, dict[int, int]]:
    """Bytes of all local chunk files, and of those that hold slots, by ratio."""
    of_slots = {ratio: store.n_bytes() for ratio, store in forms.stores.items() if ratio > 1}
    return forms.n_bytes(), of_slots


def stored(n_bytes: int, of_slots: Mapping[int, int]) -> str:
    """What chunk files take, for people."""
    shares = [f"{megabytes(n)} of them {kind(ratio)}" for ratio, n in of_slots.items()]
    return ", ".join([megabytes(n_bytes), *shares])


def kind(ratio: int) -> str:
    """What chunk files hold, for people."""
    return "tokens' entries" if ratio == 1 else f"slots of {ratio} tokens"


def megabytes(n_bytes: float) -> str:
    """A size for people."""
    return f"{n_bytes / 1e6:,.1f} MB"
