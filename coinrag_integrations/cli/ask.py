"""`coinrag ask`: a question to a store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from coinrag_integrations.cli.options import (
    Adapter,
    Chunks,
    Collection,
    Json,
    Model,
    Nuggets,
    Raw,
    Store,
    Tenant,
)
from coinrag_integrations.cli.output import Output, megabytes


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    store: Store,
    mode: Annotated[
        str,
        typer.Option(
            help="'coinrag' (nuggets' KV), 'chunk' (whole chunks'), 'c2kv' (their slots), 'hybrid' "
            "(the best chunks whole, slots of the others) or 'full'."
        ),
    ] = "coinrag",
    form: Annotated[
        str,
        typer.Option(
            help="What 'coinrag' reads: 'spans', 'slots' that meet them, or 'background' (the spans, and "
            "slots of the rest of their chunks)."
        ),
    ] = "spans",
    ratio: Annotated[
        int | None, typer.Option(min=2, help="Tokens a slot; default: the store's first.")
    ] = None,
    n_raw: Raw = 1,
    n_chunks: Chunks = 5,
    n_nuggets: Nuggets = 10,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 48,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    model: Model = None,
    adapter: Adapter = None,
    tenant: Tenant = "default",
    collection: Collection = "main",
    show_spans: Annotated[
        bool, typer.Option("--show-spans", help="Print what it rests on.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer a question from cached KV, streaming."""
    output = Output(as_json=json)
    _refuse_contradictions(mode, form, ratio)
    from coinrag_integrations.engine import GenerationConfig
    from coinrag_integrations.rag import CoinRAG
    from coinrag_integrations.retrieval import RetrievalConfig

    with CoinRAG.open(
        store, model=model, adapter=adapter, tenant=tenant, collection=collection
    ) as rag:
        stream = rag.stream(
            question,
            mode,  # type: ignore[arg-type]  # checked by stream, which names the modes
            retrieval=RetrievalConfig(
                n_chunks=n_chunks,
                n_nuggets=n_nuggets,
                form=form,  # type: ignore[arg-type]  # it checks the name
                ratio=ratio,
                n_raw=n_raw,
            ),
            generation=GenerationConfig(max_new_tokens=max_new_tokens, temperature=temperature),
        )
        for piece in stream:
            output.say(piece, end="")
        output.say()
        reply = stream.reply
    timings, usage = reply.answer.timings, reply.answer.usage
    output.say(
        f"{mode}: {usage.cached} cached and {usage.online} online tokens, "
        f"{megabytes(timings.bytes_read)} read; retrieve {timings.retrieve_ms:.0f} ms, first token "
        f"after {timings.ttft_ms:.0f} ms (load {timings.load_ms:.0f}, compose "
        f"{timings.compose_ms:.0f}, prefill {timings.prefill_ms:.0f})",
        style="dim",
    )
    if show_spans:
        for span in reply.spans:
            place = f"{span.document_id}[{span.char_start}:{span.char_stop}]"
            output.say(f"{span.score:.3f} {place} {span.text}")
    output.result(reply_object(question, reply) | {"mode": mode})


def _refuse_contradictions(mode: str, form: str, ratio: int | None) -> None:
    """Options of which one would go unheard."""
    from coinrag_integrations.errors import ConfigError

    if mode != "coinrag" and form != "spans":
        raise ConfigError(
            f"--form {form} is read in mode 'coinrag' only: leave out --form, or --mode {mode}"
        )
    if ratio is not None and (mode in ("chunk", "full") or (mode, form) == ("coinrag", "spans")):
        raise ConfigError(
            f"--ratio {ratio} is of slots, and none are read: add --mode c2kv or hybrid, or --form "
            "slots or background"
        )


def reply_object(question: str, reply: Any) -> dict[str, Any]:
    """A reply as plain values."""
    answer = reply.answer
    return {
        "question": question,
        "answer": answer.text,
        "finish_reason": answer.finish_reason,
        "spans": [
            {
                "chunk_id": span.ref.chunk_id,
                "start": span.ref.start,
                "stop": span.ref.stop,
                "ratio": span.ref.ratio,
                "text": span.text,
                "score": round(span.score, 6),
                "document_id": span.document_id,
            }
            for span in reply.spans
        ],
        "recomputed": len(answer.recomputed),
        "usage": asdict(answer.usage),
        "timings": asdict(answer.timings),
        "ttft_ms": answer.timings.ttft_ms,
    }
