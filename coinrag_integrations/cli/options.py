"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")]
Store = Annotated[Path, typer.Option("--store", help="The store's folder.")]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Local folder, hub name, or 'demo'. Default: what the store has."),
]
DemoStore = Annotated[
    Path | None,
    typer.Option(
        "--store", help="Where the demo's store is or will be; default: the user's cache."
    ),
]
DemoModel = Annotated[str, typer.Option("--model", help="Local folder, hub name, or 'demo'.")]
Chunks = Annotated[int, typer.Option("--n-chunks", min=1, help="Chunks found by stage one.")]
Nuggets = Annotated[int, typer.Option("--n-nuggets", min=1, help="Nuggets found by stage two.")]
