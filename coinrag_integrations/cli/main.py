"""Assemble the command, and turn errors into one line and an exit code."""

from __future__ import annotations

import logging
import os
import sys

import typer

from coinrag_integrations import __version__
from coinrag_integrations.cli import (
    ask,
    bench,
    build,
    demo,
    doctor,
    evaluate,
    inspect,
    look_after,
    migrate,
    plan,
    train,
)
from coinrag_integrations.cli.output import Output
from coinrag_integrations.errors import CoinRAGError

_INTERRUPTED = 130

app = typer.Typer(
    name="coinrag",
    help="Answer questions over documents from cached KV of the spans that matter.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(demo.demo)
app.command()(plan.plan)
app.command()(build.build)
app.command()(migrate.migrate)
app.command()(ask.ask)
app.command(name="inspect")(inspect.inspect)
app.command()(look_after.verify)
app.command()(look_after.gc)
app.command()(look_after.convert)
app.command()(look_after.delete)
app.command()(look_after.limit)
app.command()(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.add_typer(evaluate.app, name="eval")


@app.callback(invoke_without_command=True)
def options(
    version: bool = typer.Option(False, "--version", is_eager=True, help="Print the version."),
) -> None:
    """Answer questions over documents from cached KV of the spans that matter."""
    if version:
        typer.echo(f"coinrag {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    output = Output(as_json="--json" in sys.argv[1:])
    try:
        app()
    except CoinRAGError as error:
        output.say("error:", style="red", end=" ")
        output.say(str(error))
        output.result({"error": {"type": type(error).__name__, "message": str(error)}})
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:  # typer turns Ctrl-C into this exit
            output.say("interrupted; what is finished is kept: run the command again to continue")
            output.result({"error": {"type": "KeyboardInterrupt", "message": "interrupted"}})
        raise
