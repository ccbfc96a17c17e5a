"""`coinrag eval`: rival methods on the same questions."""

from __future__ import annotations

import json as json_
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from coinrag_integrations.cli.eval_cost import cost
from coinrag_integrations.cli.eval_errors import errors
from coinrag_integrations.cli.options import (
    Chunks,
    DataFolder,
    DemoAdapter,
    DemoModel,
    Dtype,
    EmbedderName,
    Json,
    Nuggets,
    Seed,
)
from coinrag_integrations.cli.output import Output

if TYPE_CHECKING:
    from coinrag_integrations.evaluation.summary import MethodSummary

REPORT, TABLE = "report.json", "report.md"

app = typer.Typer(help="Compare methods on questions with known answers.")
app.command()(cost)
app.command()(errors)


@app.callback(invoke_without_command=True)
def evaluate(
    context: typer.Context,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            help="Methods, with commas between them (repeatable), as full,spans,cacheblend:0.3; "
            "default: all.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Data sets: names in the data folder, .jsonl files, longbench:NAME (repeatable); "
            "default: the demo's.",
        ),
    ] = None,
    data_folder: DataFolder = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="So many questions of each data set.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the results; an interrupted run goes on there.")
    ] = Path("coinrag-eval"),
    model: DemoModel = "demo",
    adapter: DemoAdapter = None,
    links: Annotated[
        Path | None,
        typer.Option("--links", help="Trained link tokens for kvlink: their folder."),
    ] = None,
    c2kv: Annotated[
        str | None,
        typer.Option(
            "--c2kv",
            help="What makes slots for c2kv and hybrid: an extractor's folder; '' for an untrained one. "
            "The demo has one.",
        ),
    ] = None,
    compared: Annotated[
        str, typer.Option("--compared", help="The method that is told apart from all others.")
    ] = "spans",
    embedder: EmbedderName = "minilm",
    dtype: Dtype = "auto",
    n_chunks: Chunks = 5,
    n_nuggets: Nuggets = 10,
    seed: Seed = 0,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw F1 against time and tokens.")
    ] = True,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Each method with a number also with several others."),
    ] = False,
    ablations: Annotated[
        bool,
        typer.Option(
            "--ablations",
            help="Also spans encoded alone, found in one stage, not aligned, read without the adapter.",
        ),
    ] = False,
    reranker: Annotated[
        str | None,
        typer.Option(
            "--reranker",
            help="Also spans that a cross-encoder chose: its hub name or folder (needs the extra bge).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """F1, likelihood, time to first token, active tokens and bytes of rival methods."""
    if context.invoked_subcommand is not None:
        return
    output = Output(as_json=json)
    from coinrag_integrations.demo.model import DEMO_EXTRACTOR
    from coinrag_integrations.engine import load_model
    from coinrag_integrations.engine.adapter import with_adapter
    from coinrag_integrations.engine.c2kv import Extractor
    from coinrag_integrations.engine.links import load_links
    from coinrag_integrations.evaluation.compare import CompareConfig, compare
    from coinrag_integrations.evaluation.data import read_named
    from coinrag_integrations.evaluation.plots import can_draw, draw
    from coinrag_integrations.evaluation.results import RESULTS
    from coinrag_integrations.evaluation.rivals import (
        ABLATIONS,
        METHODS,
        RERANKED,
        parse_method,
        swept,
    )
    from coinrag_integrations.evaluation.summary import summarise
    from coinrag_integrations.files import write_text
    from coinrag_integrations.retrieval import CrossEncoder
    from coinrag_integrations.settings import DEMO, load_adapter, make_embedder, resolve_model

    config = CompareConfig(n_chunks=n_chunks, n_nuggets=n_nuggets, seed=seed)
    chosen = _split(methods) or list(METHODS)
    if sweep:
        chosen = swept(chosen)
    more = ("isolated", *ABLATIONS) if ablations else ()
    more += (RERANKED.name,) if reranker is not None else ()
    chosen += [name for name in more if name not in chosen]
    for name in chosen:
        parse_method(name)  # before anything takes time
    examples = read_named(_split(data) or ["demo"], data_folder, limit)
    with output.console.status("loading the model …"):
        loaded = load_model(resolve_model(model), dtype=dtype)  # type: ignore[arg-type]  # it checks
        reader = None
        adapted = load_adapter(DEMO if adapter is None and model == DEMO else adapter)
        if adapted is not None:
            reader = with_adapter(loaded, adapted)
        if links is not None:
            reader = load_links(links, reader or loaded)
        if c2kv is None and model == DEMO:
            c2kv = str(DEMO_EXTRACTOR)
        extractor = Extractor.load(c2kv, loaded) if c2kv else None
    total = len(chosen) * sum(map(len, examples.values()))
    with output.counting("measuring", total) as progress:
        results = compare(
            loaded,
            examples,
            chosen,
            make_embedder(embedder),
            out,
            config,
            reader=reader,
            extractor=extractor,
            reranker=None if reranker is None else CrossEncoder(reranker),
            on_progress=lambda done: progress.update(progress.task_ids[0], completed=done),
        )
    summary = summarise(results, seed, compared)
    write_text(out / REPORT, json_.dumps(summary.to_dict(), indent=1) + "\n")
    write_text(out / TABLE, summary.to_markdown())
    for name, by_method in summary.tables.items():
        output.say(_table(name, by_method))
    written = [RESULTS, REPORT, TABLE]
    if plots and can_draw():
        written += [path.name for path in draw(summary.tables, out)]
    elif plots:
        output.say("no plots: pip install 'coinrag-integrations[eval]' for them")
    output.say(f"in {out}: {', '.join(written)}")
    output.result(summary.to_dict())


def _split(names: list[str] | None) -> list[str]:
    """Names from options that may hold several, with commas between them."""
    return [name.strip() for part in names or () for name in part.split(",") if name.strip()]


def _table(name: str, by_method: Mapping[str, MethodSummary]) -> Table:
    # As much as a terminal of 80 columns shows; report.md has the rest.
    table = Table(
        Column("method", no_wrap=True),
        *("F1", "95 %", "NLL", "tokens", "MB", "P50 ms", "P99 ms"),
        title=f"{name}, n = {next(iter(by_method.values())).n}",
    )
    for method, it in by_method.items():
        low, high = it.f1_ci
        table.add_row(
            method,
            f"{100 * it.f1:.1f}",
            f"{100 * low:.0f}-{100 * high:.0f}",
            f"{it.nll:.2f}",
            f"{it.entries:,.0f}",
            f"{it.bytes_read / 1e6:.1f}",
            f"{it.ttft_ms.p50:.0f}",
            f"{it.ttft_ms.p99:.0f}",
        )
    return table
