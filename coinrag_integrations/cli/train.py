"""`coinrag train`: what reads cached KV."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coinrag_integrations.cli.options import DemoModel, Json, parse_ratios
from coinrag_integrations.cli.output import Output

if TYPE_CHECKING:
    from coinrag_integrations.training import ReaderConfig, TrainingReport

app = typer.Typer(help="Train what reads cached KV.", no_args_is_help=True)

Data = Annotated[list[Path], typer.Argument(help="Files of questions (.jsonl).")]
Folder = Annotated[
    Path, typer.Option("--output", help="Where the result goes; a run begun there goes on.")
]
EmbedderName = Annotated[
    str, typer.Option("--embedder", help="'minilm', 'bge-m3', or 'bge-m3:<folder>'.")
]
Minutes = Annotated[
    float | None,
    typer.Option("--minutes", min=0, help="End after so long; the learning rate knows."),
]
AtOnce = Annotated[
    int, typer.Option("--at-once", min=1, help="Examples in one pass: memory, and speed on a GPU.")
]


@app.callback()
def _group() -> None:
    """Train what reads cached KV."""


@app.command()
def reader(
    data: Data,
    output_folder: Folder,
    model: DemoModel = "demo",
    embedder: EmbedderName = "minilm",
    context: Annotated[
        str,
        typer.Option(
            help="Read composed 'spans' or whole 'chunks', or the spans' tokens as 'text'."
        ),
    ] = "spans",
    n_examples: Annotated[int, typer.Option("--examples", min=1)] = 3200,
    minutes: Minutes = None,
    rank: Annotated[int, typer.Option(min=1)] = 16,
    learning_rate: Annotated[float, typer.Option(min=0)] = 4e-4,
    at_once: AtOnce = 4,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Train a reader adapter: LoRA on what is computed online, behind KV that stays as it is.

    Stores need not be built anew for an adapter, and one that is interrupted goes on when run again.
    """
    from coinrag_integrations.training import ReaderConfig

    config = ReaderConfig(
        context=context,  # type: ignore[arg-type]  # it checks the name
        n_examples=n_examples,
        rank=rank,
        alpha=2 * rank,
        learning_rate=learning_rate,
        at_once=at_once,
        seed=seed,
    )
    _train(Output(as_json=json), data, output_folder, model, embedder, config, minutes)


@app.command("model")
def whole_model(
    data: Data,
    output_folder: Folder,
    model: DemoModel = "demo",
    embedder: EmbedderName = "minilm",
    n_examples: Annotated[
        int | None, typer.Option("--examples", min=1, help="Default: each one once.")
    ] = None,
    minutes: Minutes = None,
    learning_rate: Annotated[float, typer.Option(min=0)] = 5e-6,
    batch: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Leave longer examples out.")] = 1024,
    through_cache: Annotated[
        bool, typer.Option(help="Let gradients flow through what was encoded.")
    ] = True,
    at_once: AtOnce = 1,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Train all weights of a model, those that encode too. The defaults are CoinRAG's own recipe.

    The result is a model: open a store with it; what another model has cached is not its own.
    """
    from coinrag_integrations.training import ReaderConfig

    config = replace(
        ReaderConfig.paper_recipe(),
        learning_rate=learning_rate,
        batch=batch,
        max_tokens=max_tokens,
        through_cache=through_cache,
        at_once=at_once,
        seed=seed,
    )
    if n_examples is None:
        from coinrag_integrations.evaluation.data import read_examples

        n_examples = max(len(read_examples(data)) - config.n_held_out, batch)
    config = replace(config, n_examples=n_examples)
    _train(Output(as_json=json), data, output_folder, model, embedder, config, minutes)


@app.command()
def links(
    data: Data,
    output_folder: Folder,
    model: DemoModel = "demo",
    embedder: EmbedderName = "minilm",
    adapter: Annotated[
        str | None, typer.Option(help="A reader adapter's folder that they stand beside.")
    ] = None,
    n_links: Annotated[int, typer.Option("--links", min=1, help="Tokens behind each chunk.")] = 5,
    n_examples: Annotated[int, typer.Option("--examples", min=1)] = 3200,
    minutes: Minutes = None,
    learning_rate: Annotated[float, typer.Option(min=0)] = 5e-3,
    at_once: AtOnce = 4,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Train link tokens (KVLink): embeddings behind each cached chunk, the model stays as it is."""
    from coinrag_integrations.training import ReaderConfig

    config = replace(
        ReaderConfig.link_recipe(n_links, n_examples),
        learning_rate=learning_rate,
        at_once=at_once,
        seed=seed,
    )
    output = Output(as_json=json)
    _train(output, data, output_folder, model, embedder, config, minutes, adapter)


@app.command()
def c2kv(
    data: Data,
    output_folder: Folder,
    model: DemoModel = "demo",
    embedder: EmbedderName = "minilm",
    adapter: Annotated[
        str | None,
        typer.Option(help="The folder of the reader of slots; '' for none. The demo has one."),
    ] = None,
    ratios: Annotated[
        str, typer.Option(help="Tokens that a slot stands for; several with commas: 4,8.")
    ] = "4",
    ce: Annotated[float, typer.Option(min=0, help="Weight of the answer's cross-entropy.")] = 1.0,
    kl: Annotated[
        float, typer.Option(min=0, help="Weight of what the reader says behind whole chunks.")
    ] = 1.0,
    kl_question: Annotated[
        float, typer.Option(min=0, help="The same for the words of the question.")
    ] = 2.0,
    reconstruction: Annotated[
        float, typer.Option(min=0, help="Weight of saying a chunk again behind its slots.")
    ] = 0.0,
    init: Annotated[
        str,
        typer.Option(help="Slots begin as the 'last' token of their block, its 'mean', or 'eos'."),
    ] = "last",
    overlap: Annotated[
        int, typer.Option(min=0, help="Tokens before its block that a slot sees too.")
    ] = 0,
    start: Annotated[
        str | None, typer.Option(help="An extractor's folder to begin with; 'demo': the demo's.")
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Keep the KV of chunks in a folder: for other passes and trainings."),
    ] = None,
    n_examples: Annotated[int, typer.Option("--examples", min=1)] = 3200,
    minutes: Minutes = None,
    rank: Annotated[int, typer.Option(min=1)] = 32,
    copies: Annotated[
        bool,
        typer.Option("--copies", help="Copy the projections whole, as the paper, for no --rank."),
    ] = False,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Default: 1e-3, of --copies 5e-5.")
    ] = None,
    at_once: AtOnce = 4,
    seed: int = 0,
    json: Json = False,
) -> None:
    """Train C2KV's extractor: slots for chunks, for a model and a reader that stay as they are."""
    from coinrag_integrations.settings import DEMO
    from coinrag_integrations.training import ReaderConfig

    recipe = ReaderConfig.slot_recipe(parse_ratios("--ratios", ratios), n_examples, copies=copies)
    config = replace(
        recipe,
        ce=ce,
        kl=kl,
        kl_question=kl_question,
        reconstruction=reconstruction,
        overlap=overlap,
        init=init,  # type: ignore[arg-type]  # it checks the name
        rank=rank,
        alpha=2 * rank,
        learning_rate=recipe.learning_rate if learning_rate is None else learning_rate,
        at_once=at_once,
        seed=seed,
    )
    if adapter is None and model == DEMO:
        adapter = DEMO
    output = Output(as_json=json)
    _train(output, data, output_folder, model, embedder, config, minutes, adapter, cache, start)


def _train(
    output: Output,
    data: list[Path],
    folder: Path,
    model: str,
    embedder: str,
    config: ReaderConfig,
    minutes: float | None,
    adapter: str | None = None,
    cache: Path | None = None,
    start: str | None = None,
) -> None:
    from coinrag_integrations.engine import load_model
    from coinrag_integrations.engine.adapter import with_adapter
    from coinrag_integrations.evaluation.data import read_examples
    from coinrag_integrations.settings import (
        load_adapter,
        make_embedder,
        read_extractor,
        resolve_model,
    )
    from coinrag_integrations.training import train_reader

    examples = read_examples(data)
    with output.console.status("loading the model …"):
        loaded = replace(load_model(resolve_model(model)), name=model)
        adapted = load_adapter(adapter)
        reads = None if adapted is None else with_adapter(loaded, adapted)
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
            folder,
            config,
            data=[path.name for path in data],
            reader=reads,
            cache=cache,
            start=None if start is None else read_extractor(start, loaded),
            max_seconds=None if minutes is None else 60 * minutes,
            on_progress=show,
        )
    first, best = report.held_out[0], report.held_out[report.best_step]
    output.say(
        f"{report.step} steps over {report.n_examples} examples in {report.seconds / 60:.1f} min; "
        f"held out: {first:.3f} to {best:.3f} nats a token. Result: {folder}"
    )
    output.result({**asdict(report), "output": str(folder)})
