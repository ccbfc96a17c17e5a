"""`coinrag plan`: what a store would cost, before it is built."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from coinrag_integrations.cli.options import Chunks, Json, Nuggets, Raw, parse_ratios
from coinrag_integrations.cli.output import Output, megabytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from coinrag_integrations.evaluation.estimate import Estimate, Guess


def plan(
    paths: Annotated[
        list[Path], typer.Argument(help="Files or folders: txt, md, html, pdf, jsonl.")
    ],
    model: Annotated[str, typer.Option(help="Local folder, hub name, or 'demo'.")] = "demo",
    embedder: Annotated[str, typer.Option(help="'minilm', 'bge-m3', or 'bge-m3:<folder>'.")] = (
        "minilm"
    ),
    coverage: Annotated[
        str, typer.Option(help="Keep the KV of 'nuggets' or 'all' tokens.")
    ] = "nuggets",
    chunk_tokens: Annotated[int, typer.Option(help="Tokens a chunk.")] = 512,
    codec: Annotated[
        str, typer.Option(help="Keep KV as it is ('none'), or as codes: 'int8', 'int4'.")
    ] = "none",
    c2kv: Annotated[
        str, typer.Option("--c2kv", help="Slots too, one for so many tokens: 4, or 4,8.")
    ] = "",
    n_chunks: Chunks = 5,
    n_nuggets: Nuggets = 10,
    n_raw: Raw = 1,
    sample: Annotated[
        int, typer.Option(min=0, help="Chunks to look into for nuggets; 0: all of them.")
    ] = 64,
    questions_per_day: Annotated[
        float | None, typer.Option(min=0, help="Also say what so many questions read and save.")
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(help="Where to try writing: a folder on the disk that the store will be on."),
    ] = None,
    json: Json = False,
) -> None:
    """Estimate a store's size and build time, and after how many questions it pays off.

    Reads and tokenises the documents, and measures a few batches and questions on this machine.
    """
    output = Output(as_json=json)
    from coinrag_integrations.documents import read_documents
    from coinrag_integrations.engine import EngineConfig, load_model
    from coinrag_integrations.errors import DocumentError
    from coinrag_integrations.evaluation.trial import estimate_store
    from coinrag_integrations.evaluation.ttft import describe_machine
    from coinrag_integrations.retrieval import RetrievalConfig
    from coinrag_integrations.settings import make_embedder, resolve_model

    failed: list[str] = []

    def note(error: DocumentError) -> None:
        failed.append(str(error))
        output.say("skipped:", style="yellow", end=" ")
        output.say(str(error))

    # What costs nothing comes first, so that mistakes show at once.
    config = EngineConfig(
        coverage=coverage,  # type: ignore[arg-type]  # it checks the names
        chunk_tokens=chunk_tokens,
        codec=codec,  # type: ignore[arg-type]
        c2kv=parse_ratios("--c2kv", c2kv),
    )
    searcher = make_embedder(embedder)
    documents = read_documents(paths, on_error=note)
    first = next(documents, None)
    if first is None:
        raise DocumentError(
            f"nothing to plan for: no readable document in {', '.join(map(str, paths))}"
        )
    with output.console.status("loading the model …") as status:
        loaded = load_model(resolve_model(model))
        estimate = estimate_store(
            chain([first], documents),
            loaded,
            searcher,
            config,
            retrieval=RetrievalConfig(n_chunks=n_chunks, n_nuggets=n_nuggets, n_raw=n_raw),
            n_sample=sample or None,
            scratch=scratch,
            on_step=lambda step: status.update(f"{step} …"),
        )
    per_day = None if questions_per_day is None else estimate.per_day(questions_per_day)
    show_estimate(output, estimate, n_nuggets, per_day)
    output.result(
        {
            **estimate.to_dict(),
            "per_day": per_day,
            "failed": failed,
            "settings": {
                "model": model,
                "embedder": embedder,
                "coverage": coverage,
                "chunk_tokens": chunk_tokens,
                "c2kv": list(config.c2kv),
                "n_chunks": n_chunks,
                "n_nuggets": n_nuggets,
                "n_raw": n_raw,
                "sample": sample,
            },
            "machine": describe_machine(loaded.device),
        }
    )
    if failed:
        raise typer.Exit(1)


def show_estimate(
    output: Output, estimate: Estimate, n_nuggets: int, per_day: dict[str, Any] | None = None
) -> None:
    """What a store would cost, for people."""
    output.say(_store_table(estimate, n_nuggets))
    output.say(_codec_table(estimate))
    if estimate.slot_bytes:
        output.say(_form_table(estimate))
    output.say(_pay_off(estimate, per_day))


def _store_table(estimate: Estimate, n_nuggets: int) -> Table:
    table = Table("", "estimate", "range", title="A store of these documents")

    def row(name: str, guess: Guess, show: Callable[[float], str]) -> None:
        between = "" if guess.is_exact else f"{show(guess.low)} to {show(guess.high)}"
        table.add_row(name, show(guess.value), between)

    table.add_row("documents", _count(estimate.n_documents), "")
    row("chunks", estimate.chunks, _count)
    row("tokens", estimate.tokens, _count)
    row("nuggets", estimate.nuggets, _count)
    row("covered", estimate.covered_share, lambda share: f"{share:.1%}")
    table.add_section()
    row(f"KV files (codec {estimate.codec})", estimate.kv_bytes[estimate.codec], megabytes)
    for ratio, by_codec in estimate.slot_bytes.items():
        row(f"  slots of {ratio} tokens", by_codec[estimate.codec], megabytes)
    row("catalog", estimate.catalog_bytes, megabytes)
    row("index", estimate.index_bytes, megabytes)
    row("on disk", estimate.disk_bytes, megabytes)
    row("memory while building", estimate.ram_bytes, megabytes)
    if estimate.gpu_bytes is not None:
        table.add_row("GPU memory", megabytes(estimate.gpu_bytes), "")
    table.add_section()
    for part, seconds in estimate.build.items():
        row(f"  {part}", seconds, _duration)
    row("building", estimate.build_seconds, _duration)
    table.add_section()
    row("read for a question", estimate.question_bytes[estimate.codec], megabytes)
    row(f"first token, {n_nuggets} nuggets", estimate.spans_ms, _milliseconds)
    row(f"first token, {estimate.context_tokens} tokens anew", estimate.full_ms, _milliseconds)
    return table


def _codec_table(estimate: Estimate) -> Table:
    of_slots = [f"slots of {ratio}" for ratio in estimate.slot_bytes]
    table = Table("codec", "KV files", "of none", *of_slots, "read for a question", title="Codecs")
    for name, guess in estimate.kv_bytes.items():
        share = guess.value / estimate.kv_bytes["none"].value
        table.add_row(
            name,
            megabytes(guess.value),
            f"{share:.0%}",
            *(megabytes(by_codec[name].value) for by_codec in estimate.slot_bytes.values()),
            megabytes(estimate.question_bytes[name].value),
        )
    return table


def _form_table(estimate: Estimate) -> Table:
    """What a question reads in every form. What is not stored is encoded again for each question."""
    columns = ("form", "tokens a slot", "entries", "read for a question", "chunks encoded again")
    table = Table(*columns, title="Forms of what is read")
    for it in estimate.readings:
        table.add_row(
            it.form,
            "" if it.ratio is None else str(it.ratio),
            _count(it.entries.value),
            megabytes(it.n_bytes[estimate.codec].value),
            f"{it.encoded.value:.1f}" if it.encoded.value else "",
        )
    return table


def _pay_off(estimate: Estimate, per_day: dict[str, Any] | None) -> str:
    even = estimate.break_even_questions
    if even is None:
        return (
            "Spans are not faster than full prefill here: with a small model, short chunks or few "
            "of them there is little to save."
        )
    latest = _count(even.high) if math.isfinite(even.high) else "never"
    text = (
        f"Building pays off after {_count(even.value)} questions ({_count(even.low)} to {latest})"
    )
    if per_day is None or per_day["break_even_days"] is None:
        return f"{text}."
    return (
        f"{text}: {per_day['break_even_days']:,.1f} days of {per_day['questions']:,.0f} questions, "
        f"which read {megabytes(per_day['bytes_read'])} and save "
        f"{_duration(per_day['seconds_saved'])} a day."
    )


def _count(n: float) -> str:
    return f"{n:,.0f}"


def _milliseconds(ms: float) -> str:
    return f"{ms:,.0f} ms"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
