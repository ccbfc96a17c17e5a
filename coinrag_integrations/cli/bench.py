"""`coinrag bench`: measure on this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from coinrag_integrations.cli.demo import open_demo
from coinrag_integrations.cli.options import DemoModel, DemoStore, Json
from coinrag_integrations.cli.output import Output, megabytes

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure on this machine."""


@app.command()
def ttft(
    store: DemoStore = None,
    model: DemoModel = "demo",
    n_questions: Annotated[int, typer.Option("--questions", min=1, help="How many to ask.")] = 40,
    n_chunks: Annotated[int, typer.Option("--n-chunks", min=1)] = 4,
    n_nuggets: Annotated[int, typer.Option("--n-nuggets", min=1)] = 10,
    json: Json = False,
) -> None:
    """Time to first token: full prefill, whole-chunk KV and spans of the same 512-token chunks."""
    output = Output(as_json=json)
    from coinrag_integrations.demo.data import demo_questions
    from coinrag_integrations.evaluation import measure_ttft

    questions = [item.question for item in demo_questions()[:n_questions]]
    n_warmup = 2
    with (
        open_demo(output, store, model) as rag,
        output.counting("measuring", len(questions) + n_warmup) as progress,
    ):
        report = measure_ttft(
            rag,
            questions,
            n_chunks=n_chunks,
            n_nuggets=n_nuggets,
            n_warmup=n_warmup,
            on_progress=lambda done: progress.update(progress.task_ids[0], completed=done),
        )
    table = Table(
        "method", "P50 ms", "mean ms", "P99 ms", "entries", "read", title=f"TTFT, n = {report.n}"
    )
    for name, method in report.methods.items():
        t = method.ttft_ms
        table.add_row(
            name,
            f"{t.p50:.1f}",
            f"{t.mean:.1f}",
            f"{t.p99:.1f}",
            f"{method.entries:.0f}",
            megabytes(method.bytes_read),
        )
    floor = report.floor_ms
    table.add_row("floor", f"{floor.p50:.1f}", f"{floor.mean:.1f}", f"{floor.p99:.1f}", "", "")
    output.say(table)
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in report.spans_breakdown_ms.items())
    output.say(
        f"spans: {parts} ms; {report.speedup['p50']} times faster than full prefill at P50, "
        f"{report.speedup['p99']} at P99"
    )
    output.result(report.to_dict())
