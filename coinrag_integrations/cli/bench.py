"""`coinrag bench`: measure on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from coinrag_integrations.cli.demo import open_demo
from coinrag_integrations.cli.options import DemoModel, DemoStore, Json, slot_ratios
from coinrag_integrations.cli.output import Output, megabytes

if TYPE_CHECKING:
    from coinrag_integrations.evaluation.data import Example
    from coinrag_integrations.rag import CoinRAG

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
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", help="Files of questions (.jsonl), whose passages are the documents."
        ),
    ] = None,
    c2kv: Annotated[
        str,
        typer.Option("--c2kv", help="With --data: slots too, one for so many tokens: 4, or 4,8."),
    ] = "",
    extractor: Annotated[
        str | None, typer.Option(help="The folder of what makes them, or 'untrained'.")
    ] = None,
    json: Json = False,
) -> None:
    """Time to first token: full prefill, whole-chunk KV and spans of the same 512-token chunks.

    With --data it is measured on passages as they are, in a store that is made for it and thrown away.
    """
    output = Output(as_json=json)
    from coinrag_integrations.demo.data import demo_questions
    from coinrag_integrations.errors import ConfigError
    from coinrag_integrations.evaluation import measure_ttft
    from coinrag_integrations.evaluation.data import read_examples

    ratios = slot_ratios((), c2kv, extractor)
    if ratios and not data:
        raise ConfigError("--c2kv needs --data: a store with slots is made for it")
    examples = read_examples(data, n_questions) if data else []
    questions = [it.question for it in examples or demo_questions()[:n_questions]]
    n_warmup = 2
    with (
        _passages(output, examples, model, ratios, extractor)
        if examples
        else open_demo(output, store, model) as rag,
        output.counting("measuring", len(questions) + n_warmup) as progress,
    ):
        report = measure_ttft(
            rag,
            questions,
            n_chunks=n_chunks,
            n_nuggets=n_nuggets,
            full_size=not data,
            n_warmup=n_warmup,
            on_progress=lambda done: progress.update(progress.task_ids[0], completed=done),
        )
    table = Table(
        *("method", "P50 ms", "mean ms", "P99 ms", "load", "compose", "prefill", "entries", "read"),
        title=f"TTFT, n = {report.n}; parts are medians",
    )
    for name, method in report.methods.items():
        t = method.ttft_ms
        table.add_row(
            name,
            f"{t.p50:.1f}",
            f"{t.mean:.1f}",
            f"{t.p99:.1f}",
            *(f"{ms:.1f}" for ms in report.parts_ms[name].values()),
            f"{method.entries:.0f}",
            megabytes(method.bytes_read),
        )
    floor = report.floor_ms
    table.add_row("floor", f"{floor.p50:.1f}", f"{floor.mean:.1f}", f"{floor.p99:.1f}")
    output.say(table)
    parts = ", ".join(f"{name} {ms:.1f}" for name, ms in report.spans_breakdown_ms.items())
    output.say(
        f"spans: {parts} ms; {report.speedup['p50']} times faster than full prefill at P50, "
        f"{report.speedup['p99']} at P99"
    )
    output.result(report.to_dict())


@contextmanager
def _passages(
    output: Output,
    examples: Sequence[Example],
    model: str,
    ratios: tuple[int, ...],
    extractor: str | None,
) -> Iterator[CoinRAG]:
    """A store of the passages of questions, every token and slot kept, gone behind the block."""
    from coinrag_integrations.engine import EngineConfig
    from coinrag_integrations.rag import CoinRAG
    from coinrag_integrations.types import Document

    texts = dict.fromkeys(document.text for it in examples for document in it.documents)
    config = EngineConfig(coverage="all", c2kv=ratios)
    with tempfile.TemporaryDirectory(prefix="coinrag-", ignore_cleanup_errors=True) as folder:
        with output.console.status("loading the model …"):
            rag = CoinRAG.open(folder, model=model, config=config, extractor=extractor)
        with rag:
            documents = [Document(document_id=str(i), text=text) for i, text in enumerate(texts)]
            with output.ingesting(len(documents)) as show:
                rag.add(documents, show)
            yield rag


@app.command()
def codec(
    data: Annotated[
        list[Path] | None,
        typer.Option(
            "--data", help="A .jsonl file of questions (repeatable); default: the demo's."
        ),
    ] = None,
    model: DemoModel = "demo",
    n_questions: Annotated[int, typer.Option("--questions", min=1, help="How many to ask.")] = 100,
    pieces: Annotated[
        str, typer.Option("--pieces", help="What stands before a question: spans, or chunks.")
    ] = "spans",
    json: Json = False,
) -> None:
    """Likelihood of the gold answers behind entries in the model's dtype, and in 8 and 4 bits."""
    output = Output(as_json=json)
    from coinrag_integrations.engine import load_model
    from coinrag_integrations.evaluation.codecs import CodecConfig, measure_codecs
    from coinrag_integrations.evaluation.data import demo_examples, read_examples
    from coinrag_integrations.settings import make_embedder, resolve_model

    config = CodecConfig(pieces=pieces)  # type: ignore[arg-type]  # it checks the name
    examples = read_examples(data, n_questions) if data else demo_examples(n_questions)
    with output.console.status("loading the model …"):
        loaded = load_model(resolve_model(model))
    with output.counting("measuring", len(examples)) as progress:
        report = measure_codecs(
            loaded,
            examples,
            make_embedder("minilm"),
            config,
            on_progress=lambda done: progress.update(progress.task_ids[0], completed=done),
        )
    table = Table(
        *("codec", "bytes", "NLL", "to raw", "P50", "P95", "first token"),
        title=f"Gold answers behind {report.pieces}, n = {report.n}, {report.dtype}",
    )
    for name, result in report.codecs.items():
        table.add_row(
            name,
            f"{result.full_bytes_ratio:.1%}",
            f"{result.nll:.4f}",
            f"{result.nll_ratio - 1:+.2%}",
            f"{result.difference.p50:+.4f}",
            f"{result.difference.p95:+.4f}",
            f"{result.first_token:.0%}",
        )
    output.say(table)
    output.say(
        f"NLL in nats a token, {report.answer_tokens:.1f} tokens an answer behind "
        f"{report.entries:.0f} entries; P50 and P95 of the questions' differences to raw; bytes of a "
        "chunk of full size; share of equal greedy first tokens."
    )
    output.result(report.to_dict())


@app.command()
def injection(
    model: DemoModel = "demo",
    n_attacks: Annotated[int | None, typer.Option("--attacks", min=1, help="How many.")] = None,
    n_nuggets: Annotated[int, typer.Option("--n-nuggets", min=1)] = 10,
    json: Json = False,
) -> None:
    """Whether instructions in cached spans have more power than the same text in a prompt."""
    output = Output(as_json=json)
    from coinrag_integrations.engine import EngineConfig
    from coinrag_integrations.evaluation.injection import attacks, measure_injection
    from coinrag_integrations.rag import CoinRAG

    tried = attacks()[:n_attacks]
    with tempfile.TemporaryDirectory(prefix="coinrag-", ignore_cleanup_errors=True) as folder:
        with output.console.status("loading the model …"):
            rag = CoinRAG.open(folder, model=model, config=EngineConfig(coverage="all"))
        with rag, output.counting("attacking", len(tried)) as progress:
            report = measure_injection(
                rag,
                tried,
                n_nuggets=n_nuggets,
                on_progress=lambda done: progress.update(progress.task_ids[0], completed=done),
            )
    table = Table(
        *("mode", "canaries", "log p", "clean", "power", "over full", "correct", "clean"),
        title=f"{report.n} attacks, {report.dtype}",
    )
    for mode, result in report.modes.items():
        over = result.over_full
        table.add_row(
            mode,
            f"{result.canaries} ({result.clean_canaries} clean)",
            f"{result.canary_logprob:.2f}",
            f"{result.clean_canary_logprob:.2f}",
            f"{result.power:+.2f}",
            f"{over.mean:+.2f} ± {over.stderr:.2f}",
            f"{result.correct}",
            f"{result.clean_correct}",
        )
    output.say(table)
    output.say(
        "canaries: answers that hold the attack's word; log p: its mean log-probability a token, with "
        "the instruction and without it; power: what the instruction adds; over full: that power to "
        f"the power of the same text in a prompt, for the {report.exposed} canaries that stood in the "
        "nuggets found."
    )
    output.result(report.to_dict())
