"""`coinrag eval cost`: what answers cost from end to end, and when a store has paid for itself."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

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
    from collections.abc import Mapping

    from coinrag_integrations.evaluation.cost.measure import Prices, RoadCost
    from coinrag_integrations.evaluation.cost.roads import Road
    from coinrag_integrations.ingest import IngestReport

REPORT, TABLE, PLOT = "cost.json", "cost.md", "cost.png"


def cost(
    data: Annotated[
        str,
        typer.Option("--data", help="A data set: a name in the data folder, or a .jsonl file."),
    ] = "demo",
    data_folder: DataFolder = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="The store holds the passages of so many questions."),
    ] = None,
    n_questions: Annotated[
        int | None, typer.Option("--questions", min=1, help="Ask so many of them; default: all.")
    ] = None,
    roads: Annotated[
        str,
        typer.Option(
            "--roads",
            help="With commas. Without chunk the store keeps only what spans need.",
        ),
    ] = "full,text,chunk,spans",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Questions asked at once, with commas.")
    ] = "1,2,4",
    out: Annotated[
        Path,
        typer.Option("--out", help="Folder of the results and the store, which is used again."),
    ] = Path("coinrag-cost"),
    model: DemoModel = "demo",
    adapter: DemoAdapter = None,
    embedder: EmbedderName = "minilm",
    dtype: Dtype = "auto",
    codec: Annotated[
        str, typer.Option("--codec", help="Keep KV as it is ('none'), as 'int8' or 'int4'.")
    ] = "none",
    n_chunks: Chunks = 5,
    n_nuggets: Nuggets = 10,
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Drop KV files from the system's cache before each turn."),
    ] = False,
    extraction_seconds: Annotated[
        float,
        typer.Option(
            "--extraction-seconds-per-chunk",
            min=0,
            help="Add this to the build for every chunk, as if an LLM had found its nuggets.",
        ),
    ] = 0.0,
    price_hour: Annotated[
        float | None,
        typer.Option("--price-hour", min=0, help="What an hour of the machine costs: count money."),
    ] = None,
    price_gb_month: Annotated[
        float | None,
        typer.Option("--price-gb-month", min=0, help="What a gigabyte on disk costs a month."),
    ] = None,
    days: Annotated[
        float, typer.Option("--days", min=0, help="How long the store is kept, for its rent.")
    ] = 30.0,
    seed: Seed = 0,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the curves.")] = True,
    json: Json = False,
) -> None:
    """What building, keeping and asking a store costs, and after how many questions it has paid.

    Builds a store of the data's passages, and asks it by prefilling text and by reading KV.
    """
    output = Output(as_json=json)
    from coinrag_integrations.engine import EngineConfig, load_model
    from coinrag_integrations.errors import ConfigError
    from coinrag_integrations.evaluation.cost.measure import CostConfig, measure_cost
    from coinrag_integrations.evaluation.cost.report import (
        draw_cost,
        notes,
        pay_offs,
        to_markdown,
    )
    from coinrag_integrations.evaluation.data import read_named
    from coinrag_integrations.evaluation.plots import can_draw
    from coinrag_integrations.evaluation.scoring import scoring_of
    from coinrag_integrations.files import write_text
    from coinrag_integrations.settings import DEMO, load_adapter, make_embedder, resolve_model

    # What costs nothing comes first, so that mistakes show at once.
    scoring = scoring_of(Path(data).stem)
    if scoring.metric != "f1":
        raise ConfigError(
            f"answers to {data} are scored by {scoring.metric}, and costs are compared at equal F1: use "
            "questions with short answers"
        )
    config = CostConfig(
        roads=tuple(_split(roads)),  # type: ignore[arg-type]  # it checks the names
        n_questions=n_questions,
        concurrency=_numbers(concurrency),
        n_chunks=n_chunks,
        n_nuggets=n_nuggets,
        max_new_tokens=scoring.max_new_tokens,
        seed=seed,
        cold=cold,
        extraction_seconds=extraction_seconds,
        prices=_prices(price_hour, price_gb_month, days),
    )
    engine, searcher = EngineConfig(codec=codec), make_embedder(embedder)  # type: ignore[arg-type]
    ((name, examples),) = read_named([data], data_folder, limit).items()
    reader = DEMO if adapter is None and model == DEMO else adapter or ""
    load_adapter(reader)
    with output.console.status("loading the model …"):
        loaded = load_model(resolve_model(model), dtype=dtype)  # type: ignore[arg-type]  # it checks
    asked = examples[:n_questions]
    n_passages = len({document.text for it in examples for document in it.documents})
    n_answers = len(asked) * len(config.roads) * len(config.concurrency)
    with output.counting("building", n_passages) as progress:
        task = progress.task_ids[0]

        def built(it: IngestReport) -> None:
            progress.update(
                task, description=f"building, {it.n_encoded} chunks", completed=it.n_documents
            )

        report = measure_cost(
            examples,
            out,
            loaded,
            searcher,
            config,
            engine=engine,
            adapter=reader,
            on_build=built,
            on_progress=lambda done: progress.update(
                task, description="asking", completed=done, total=n_answers
            ),
        )
    write_text(out / REPORT, json_.dumps({"data": name, **report.to_dict()}, indent=1) + "\n")
    write_text(out / TABLE, to_markdown(report, name))
    written = [REPORT, TABLE]
    for line in notes(report):
        output.say(line)
    for n, by_road in report.levels.items():
        output.say(_table(f"{name}, {n} at once, n = {len(asked)}", by_road))
        for sentence in pay_offs(by_road):
            output.say(f"  {sentence}")
    if plots and can_draw():
        draw_cost(report, name, out / PLOT)
        written.append(PLOT)
    elif plots:
        output.say("no plot: pip install 'coinrag-integrations[eval]' for it")
    output.say(f"in {out}: {', '.join(written)}")
    output.result({"data": name, **report.to_dict()})


def _prices(hour: float | None, gb_month: float | None, days: float) -> Prices | None:
    from coinrag_integrations.errors import ConfigError
    from coinrag_integrations.evaluation.cost.measure import Prices

    if hour is not None:
        return Prices(hour=hour, gb_month=gb_month or 0.0, days=days)
    if gb_month is not None:
        raise ConfigError(
            "--price-gb-month alone cannot be added to seconds: give --price-hour too"
        )
    return None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> tuple[int, ...]:
    from coinrag_integrations.errors import ConfigError

    try:
        return tuple(int(part) for part in _split(text))
    except ValueError:
        raise ConfigError(f"--concurrency {text!r}: give whole numbers, as 1,2,4") from None


def _table(title: str, by_road: Mapping[Road, RoadCost]) -> Table:
    # As much as a terminal of 80 columns shows; cost.md has the rest.
    table = Table(
        Column("road", no_wrap=True),
        *("F1", "to full", "build s", "MB", "s each", "/s", "P50 ms", "P99 ms"),
        title=title,
    )
    for road, it in by_road.items():
        table.add_row(
            road,
            f"{100 * it.f1.mean:.1f}",
            "" if road == "full" else f"{100 * it.to_full.mean:+.1f}{' *' if it.is_worse else ''}",
            f"{it.build_seconds:,.1f}",
            f"{it.disk_bytes / 1e6:,.0f}",
            f"{it.machine_seconds:.3g}",
            f"{it.per_second:.2g}",
            f"{it.ttft_ms.p50:,.0f}",
            f"{it.ttft_ms.p99:,.0f}",
        )
    return table
