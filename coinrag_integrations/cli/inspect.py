"""`coinrag inspect`: what a store holds. Loads no model."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from coinrag_integrations.cli.options import Json, Store
from coinrag_integrations.cli.output import Output, megabytes

if TYPE_CHECKING:
    from coinrag_integrations.types import Chunk


def inspect(
    store: Store,
    document: Annotated[
        str | None, typer.Option(help="Show a document's chunks with their nuggets marked.")
    ] = None,
    json: Json = False,
) -> None:
    """Show a store's settings, sizes and documents, or one document's nuggets."""
    output = Output(as_json=json)
    from coinrag_integrations.engine.store import Catalog
    from coinrag_integrations.errors import StoreError
    from coinrag_integrations.settings import StoreSettings

    settings = StoreSettings.load(store)
    with Catalog(store / "catalog.sqlite") as catalog:
        if document is not None:
            chunks = [catalog.chunk(i) for i in catalog.chunk_ids(document)]
            if not chunks:
                raise StoreError(
                    f"{store} holds no document {document!r}: `coinrag inspect --store {store}` "
                    "lists them"
                )
            _show_document(output, chunks)
            return
        counts, documents = catalog.counts(), catalog.documents()
        n_nuggets = sum(len(chunk.nuggets) for chunk in catalog.chunks())
    sizes = [path.stat().st_size for path in (store / "kv").glob("??/*.safetensors")]
    fingerprint = json_module.loads((store / "kv" / "fingerprint.json").read_text(encoding="utf-8"))
    output.say(
        f"{store}: {counts['documents']} documents, {counts['chunks']} chunks, {n_nuggets} nuggets, "
        f"{len(sizes)} KV files of {megabytes(sum(sizes))}"
    )
    output.say(f"model {settings.model}, embedder {settings.embedder}")
    for name, value in fingerprint.items():
        output.console.print(f"  {name}: {value}", markup=False)
    for name in documents:
        output.console.print(f"  {name}", markup=False)
    output.result(
        {
            "settings": asdict(settings),
            "fingerprint": fingerprint,
            **counts,
            "nuggets": n_nuggets,
            "kv_files": len(sizes),
            "bytes": sum(sizes),
            "document_ids": documents,
        }
    )


def _show_document(output: Output, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        text = Text(chunk.text)
        for i, nugget in enumerate(chunk.nuggets):
            text.stylize("cyan" if i % 2 else "green", nugget.char_start, nugget.char_stop)
        output.say(
            f"[bold]chunk {chunk.index}[/bold] {chunk.chunk_id}: {len(chunk)} tokens, "
            f"{len(chunk.nuggets)} nuggets"
        )
        output.say(text)
    output.result({"document": chunks[0].document_id, "chunks": [_chunk(c) for c in chunks]})


def _chunk(chunk: Chunk) -> dict[str, Any]:
    return {
        "chunk_id": chunk.chunk_id,
        "tokens": len(chunk),
        "text": chunk.text,
        "nuggets": [
            {
                "start": n.span.start,
                "stop": n.span.stop,
                "text": n.text,
                "match": n.match,
                "similarity": n.similarity,
            }
            for n in chunk.nuggets
        ],
    }
