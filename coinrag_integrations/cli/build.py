"""`coinrag build`: documents into a store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from coinrag_integrations.cli.options import (
    Codec,
    Collection,
    Coverage,
    Extractor,
    Json,
    NewModel,
    Slots,
    Store,
    Tenant,
    parse_bytes,
    slot_ratios,
)
from coinrag_integrations.cli.output import Output, stored, stored_bytes


def build(
    paths: Annotated[
        list[Path], typer.Argument(help="Files or folders: txt, md, html, pdf, jsonl.")
    ],
    store: Store,
    model: NewModel = None,
    embedder: Annotated[
        str | None, typer.Option(help="'minilm' (default), 'bge-m3', or 'bge-m3:<folder>'.")
    ] = None,
    chroma: Annotated[
        str | None, typer.Option(help="http://host:port of a Chroma server; default: in the store.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Encode chunks 'alone' (default) or 'after_prompt'.")
    ] = None,
    coverage: Coverage = None,
    codec: Codec = None,
    c2kv: Slots = None,
    extractor: Extractor = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Tokens a chunk (default 512).")] = None,
    tenant: Tenant = "default",
    collection: Collection = "main",
    max_bytes: Annotated[
        str | None, typer.Option(help="Cap of the whole folder on disk, e.g. 200MB.")
    ] = None,
    remote: Annotated[
        str | None, typer.Option(help="Storage behind the folder, e.g. s3://bucket/prefix.")
    ] = None,
    add_fingerprint: Annotated[
        bool, typer.Option("--add-fingerprint", help="Let KV of another encoding stand beside.")
    ] = False,
    ray: Annotated[
        int | None,
        typer.Option("--ray", min=1, help="Encode with so many workers of Ray Data (extra `ray`)."),
    ] = None,
    ray_gpus: Annotated[float, typer.Option(min=0, help="GPUs of each of them.")] = 0.0,
    ray_address: Annotated[
        str | None, typer.Option(help="A cluster's address; default: this machine.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="Stop at the first unreadable file.")] = False,
    json: Json = False,
) -> None:
    """Read documents, cut them into chunks and nuggets, encode, store and index them.

    Running it again continues an interrupted build, replaces changed documents and skips the rest.
    """
    output = Output(as_json=json)
    from coinrag_integrations.documents import read_documents
    from coinrag_integrations.errors import DocumentError
    from coinrag_integrations.rag import CoinRAG
    from coinrag_integrations.settings import SETTINGS_FILE, StoreSettings

    failed: list[str] = []

    def note(error: DocumentError) -> None:
        failed.append(str(error))
        output.say("skipped:", style="yellow", end=" ")
        output.say(str(error))

    is_new = not (store / SETTINGS_FILE).exists()
    known = StoreSettings(model="demo") if is_new else StoreSettings.load(store)
    # Read the first document before a model is loaded: a wrong path shows at once.
    documents = _started(read_documents(paths, on_error=None if strict else note))
    if documents is None:
        raise DocumentError(
            f"nothing to build: no readable document in {', '.join(map(str, paths))}"
        )
    with CoinRAG.open(
        store,
        model=model or (known.model if is_new else None),
        embedder=embedder,
        chroma=chroma,
        config=_config(
            known,
            context=context,
            coverage=coverage,
            codec=codec,
            c2kv=slot_ratios(known.engine.c2kv, c2kv, extractor),
            chunk_tokens=chunk_tokens,
        ),
        extractor=extractor,
        tenant=tenant,
        collection=collection,
        limits=_limits(known, max_bytes),
        remote=remote,
        add_fingerprint=add_fingerprint,
    ) as rag:
        if ray is not None:
            from coinrag_integrations.serving.ray_build import RayEncoding

            rag.ingestor.encoding = RayEncoding(
                rag, store, n_workers=ray, n_gpus=ray_gpus, address=ray_address
            )
        with output.ingesting() as show:
            report = rag.add(documents, show)
        n_bytes, of_slots = stored_bytes(rag.engine.forms)
        totals = rag.engine.catalog.counts()
    speed = report.n_tokens / report.seconds if report.n_encoded else 0.0
    output.say(
        f"{report.n_added} added, {report.n_updated} updated, {report.n_unchanged} unchanged, "
        f"{len(report.empty)} empty, {len(failed)} unreadable; {report.n_chunks} chunks, "
        f"{report.n_nuggets} nuggets in {report.seconds:.1f} s"
        + (f" ({speed:,.0f} tokens/s)" if speed else "")
    )
    output.say(
        f"{store}: {totals['documents']} documents, {totals['chunks']} chunks, "
        + stored(n_bytes, of_slots)
    )
    output.result(
        {
            **asdict(report),
            "failed": failed,
            "store": str(store),
            "bytes": n_bytes,
            "slot_bytes": of_slots,
            **totals,
        }
    )
    if failed:
        raise typer.Exit(1)


def _started(documents: Any) -> Any:
    """The same iterator, its first item already read; None if there is none."""
    from itertools import chain

    first = next(documents, None)
    return None if first is None else chain([first], documents)


def _config(known: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(known.engine, **{k: v for k, v in changes.items() if v is not None})


def _limits(known: Any, max_bytes: str | None) -> Any:
    from dataclasses import replace

    if max_bytes is None:
        return known.limits
    return replace(known.limits, max_bytes=parse_bytes(max_bytes))
