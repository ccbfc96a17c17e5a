"""`coinrag train`: adapters for what reads cached KV."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from coinrag_integrations.cli.options import DemoModel, Json
from coinrag_integrations.cli.output import Output

app = typer.Typer(help="Train adapters.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Train adapters."""


@app.command()
def reader(
    data: Annotated[list[Path], typer.Argument(help="Files of questions (.jsonl).")],
    output_folder: Annotated[
        Path, typer.Option("--output", help="Where the adapter goes; a run begun there goes on.")
    ],
    model: DemoModel = "demo",
    embedder: Annotated[
        str, typer.Option(help="'minilm', 'bge-m3', or 'bge-m3:<folder>'.")
    ] = "minilm",
    context: Annotated[
        str, typer.Option(help="Read composed 'spans', or the same tokens as 'text'.")
    ] = "spans",
    n_examples: Annotated[int, typer.Option("--examples", min=1)] = 3200,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="End after so long; the learning rate knows.")
    ] = None,
    rank: Annotated[int, typer.Option(min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(min=0)] = 4e-4,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Train a reader adapter: LoRA on what is computed online, behind KV that stays as it is.

    Stores need not be built anew for an adapter, and one that is interrupted goes on when run again.
    """
    output = Output(as_json=json)
    from coinrag_integrations.engine import load_model
    from coinrag_integrations.evaluation.data import read_examples
    from coinrag_integrations.settings import make_embedder, resolve_model
    from coinrag_integrations.training import ReaderConfig, TrainingReport, train_reader

    config = ReaderConfig(
        context=context,  # type: ignore[arg-type]  # it checks the name
        n_examples=n_examples,
        rank=rank,
        alpha=2 * rank,
        learning_rate=learning_rate,
        seed=seed,
    )
    examples = read_examples(data)
    with output.console.status("loading the model …"):
        loaded = replace(load_model(resolve_model(model)), name=model)
    with output.counting("steps", config.n_steps) as progress:

        def show(report: TrainingReport) -> None:
            held = report.held_out.get(report.best_step)
            progress.update(
                progress.task_ids[0],
                completed=report.step,
                description=f"loss {report.loss:.3f}, held out {held:.3f}" if held else "steps",
            )

        report = train_reader(
            loaded,
            examples,
            make_embedder(embedder),
            output_folder,
            config,
            data=[path.name for path in data],
            max_seconds=None if minutes is None else 60 * minutes,
            on_progress=show,
        )
    first, best = report.held_out[0], report.held_out[report.best_step]
    output.say(
        f"{report.step} steps over {report.n_examples} examples in {report.seconds / 60:.1f} min; "
        f"held out: {first:.3f} to {best:.3f} nats a token. Adapter: {output_folder}"
    )
    output.result({**asdict(report), "output": str(output_folder)})
