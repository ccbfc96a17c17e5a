"""`coinrag demo`: an invented encyclopedia, questions, answers from KV, and both TTFTs."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from coinrag_integrations.cli.ask import reply_object
from coinrag_integrations.cli.options import DemoModel, DemoStore, Json
from coinrag_integrations.cli.output import Output, megabytes

if TYPE_CHECKING:
    from coinrag_integrations.rag import CoinRAG


def demo(
    store: DemoStore = None,
    model: DemoModel = "demo",
    n_questions: Annotated[int, typer.Option("--questions", min=1, help="How many to ask.")] = 10,
    clean: Annotated[bool, typer.Option("--clean", help="Delete the demo's store first.")] = False,
    json: Json = False,
) -> None:
    """Build a store over 60 short articles and answer questions from it, with and without KV."""
    output = Output(as_json=json)
    from coinrag_integrations.demo.data import demo_documents, demo_questions
    from coinrag_integrations.evaluation.metrics import contains_answer, token_f1

    questions = demo_questions()[:n_questions]
    rows: list[dict[str, Any]] = []
    table = Table("question", "answer from KV", "gold", "KV", "full prefill", title="Answers")
    with open_demo(output, store, model, clean=clean) as rag:
        rag.ask(questions[0].question)  # warm up, so that both columns are fair
        with output.counting("asking", len(questions)) as progress:
            for item in questions:
                reply = rag.ask(item.question)
                full = rag.ask(item.question, "full")
                row = reply_object(item.question, reply)
                row["gold"] = item.answers[0]
                row["f1"] = token_f1(reply.text, item.answers)
                row["correct"] = contains_answer(reply.text, item.answers)
                row["full"] = {
                    "answer": full.text,
                    "correct": contains_answer(full.text, item.answers),
                    "ttft_ms": full.answer.timings.ttft_ms,
                }
                rows.append(row)
                table.add_row(
                    item.question,
                    reply.text,
                    item.answers[0],
                    f"{row['ttft_ms']:.0f} ms",
                    f"{row['full']['ttft_ms']:.0f} ms",
                )
                progress.advance(progress.task_ids[0])
        folder = rag.engine.disk.root
        n_bytes = rag.engine.forms.n_bytes()
    f1 = sum(row["f1"] for row in rows) / len(rows)
    correct = sum(row["correct"] for row in rows), sum(row["full"]["correct"] for row in rows)
    ours = sorted(row["ttft_ms"] for row in rows)[len(rows) // 2]
    theirs = sorted(row["full"]["ttft_ms"] for row in rows)[len(rows) // 2]
    output.say(table)
    output.say(
        f"Median time to first token: {ours:.0f} ms from KV, {theirs:.0f} ms with full prefill "
        f"({theirs / ours:.1f} times faster)."
    )
    output.say(
        f"{correct[0]} of {len(rows)} answers from KV hold the gold answer, {correct[1]} with full "
        f"prefill (word F1 from KV {f1:.2f})."
    )
    command = "coinrag" if shutil.which("coinrag") else sys.argv[0]
    output.say(
        f"The store holds {len(demo_documents())} articles in {megabytes(n_bytes)} at {folder}. "
        f'Ask it yourself: {command} ask --store {folder} "Who founded the Petrel Line?" --show-spans'
    )
    output.result(
        {
            "questions": rows,
            "f1": f1,
            "correct": {"kv": correct[0], "full": correct[1]},
            "ttft_ms": {"kv": ours, "full": theirs},
            "store": str(folder),
            "bytes": n_bytes,
        }
    )


def open_demo(output: Output, store: Path | None, model: str, *, clean: bool = False) -> CoinRAG:
    """The demo's store, built if it is not complete; every token kept, so all modes work."""
    from coinrag_integrations.demo.data import demo_documents
    from coinrag_integrations.demo.model import demo_cache, ensure_demo_model
    from coinrag_integrations.engine import EngineConfig, GenerationConfig
    from coinrag_integrations.rag import CoinRAG
    from coinrag_integrations.settings import FORMAT, SETTINGS_FILE, StoreSettings

    if model == "demo":
        with output.console.status("the demo model") as status:
            ensure_demo_model(lambda step: status.update(f"{step} …"))
    folder = store or demo_cache() / f"demo-store-{FORMAT}"
    if clean:
        shutil.rmtree(folder, ignore_errors=True)
    is_there = (folder / SETTINGS_FILE).exists()
    known = StoreSettings.load(folder).engine if is_there else EngineConfig()
    documents = demo_documents()
    with output.console.status("loading the model …"):
        rag = CoinRAG.open(
            folder,
            model=model,
            config=replace(known, coverage="all"),
            generation=GenerationConfig(max_new_tokens=32, stop=("\n",)),
        )
    with output.ingesting(len(documents)) as show:
        report = rag.add(documents, show)
    output.say(
        f"{report.n_encoded} chunks encoded, {report.n_unchanged} of {len(documents)} articles were "
        f"already stored ({report.seconds:.1f} s)"
    )
    return rag
