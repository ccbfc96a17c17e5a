"""`coinrag eval errors`: why answers are wrong, as a page."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from coinrag_integrations.cli.options import Json
from coinrag_integrations.cli.output import Output
from coinrag_integrations.errors import ConfigError

PAGE = "errors.html"
# Two lines, so that the table has room in a terminal of 80 columns.
_HEADS = {
    "not_verbatim": "not\nverb.",
    "never_extracted": "not\nextr.",
    "bridge_missing": "no\nbridge",
    "distracted": "dis-\ntracted",
    "misread": "mis-\nread",
    "ungrounded": "un-\ngrounded",
}


def errors(
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = Path(
        "coinrag-eval"
    ),
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", help="Methods, with commas between them; default: all there."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", help="Data sets, by their names in the results; default: all there."
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", help=f"Where the page goes; default: {PAGE} in --out.")
    ] = None,
    open_: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Show it in a browser; default: at a terminal."),
    ] = None,
    json: Json = False,
) -> None:
    """Where answers come from and why they are wrong: one class for each, and a page to look at."""
    output = Output(as_json=json)
    from coinrag_integrations.evaluation.errors.judged import judge
    from coinrag_integrations.evaluation.errors.page import render_page
    from coinrag_integrations.files import write_text

    report = judge(out, _split(methods), _split(data))
    path = page or out / PAGE
    try:
        write_text(path, render_page(report))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}: give --page") from error
    counts = report.counts
    for name, by_method in counts.items():
        output.say(_table(name, by_method))
    if report.n_others:
        output.say(f"{report.n_others} other settings have results there: the latest are shown")
    if report.n_without:
        output.say(
            f"{report.n_without} questions have no evidence: run the same coinrag eval again to add it"
        )
    output.say(f"page: {path}")
    is_seen = sys.stdout.isatty() and not json
    if is_seen if open_ is None else open_:
        webbrowser.open(path.resolve().as_uri())
    output.result(
        {
            "page": str(path),
            "settings": report.settings,
            "n_others": report.n_others,
            "n_without": report.n_without,
            "data": counts,
        }
    )


def _split(names: list[str] | None) -> list[str]:
    return [name.strip() for part in names or () for name in part.split(",") if name.strip()]


def _table(name: str, by_method: Mapping[str, Mapping[str, int]]) -> Table:
    classes = list(next(iter(by_method.values())))
    table = Table(
        Column("method", no_wrap=True),
        *(Column(_HEADS.get(error, error), justify="right") for error in classes),
        title=f"{name}: answers by class",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for method, counts in by_method.items():
        table.add_row(method, *(str(counts[error]) for error in classes))
    return table
