"""`coinrag inspect`: what a store holds. Loads no model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from coinrag_integrations.cli.options import Collection, Json, Store, Tenant
from coinrag_integrations.cli.output import Output, kind, megabytes

if TYPE_CHECKING:
    from coinrag_integrations.types import Chunk


def inspect(
    store: Store,
    document: Annotated[
        str | None, typer.Option(help="Show a document's chunks with their nuggets marked.")
    ] = None,
    tenant: Tenant = "default",
    collection: Collection = "main",
    json: Json = False,
) -> None:
    """Show a store's settings, sizes and documents, or one document's nuggets."""
    output = Output(as_json=json)
    from coinrag_integrations.engine.store import Catalog, Disk, scope_folder, scopes
    from coinrag_integrations.engine.store.disk import KV
    from coinrag_integrations.engine.store.variants import variants
    from coinrag_integrations.errors import StoreError
    from coinrag_integrations.settings import StoreSettings
    from coinrag_integrations.types import Scope

    settings, scope = StoreSettings.load(store), Scope(tenant=tenant, collection=collection)
    if scope not in scopes(store):
        raise StoreError(f"{store} holds nothing of {scope}: build it with --tenant, --collection")
    folder = scope_folder(store, scope)
    with Catalog(folder / "catalog.sqlite") as catalog:
        if document is not None:
            chunks = [catalog.chunk(i) for i in catalog.chunk_ids(document)]
            if not chunks:
                raise StoreError(
                    f"{store} holds no document {document!r}: `coinrag inspect --store {store}` "
                    "lists them"
                )
            _show_document(output, chunks)
            return
        counts, documents, pins = catalog.counts(), catalog.documents(), catalog.pins()
        n_nuggets = sum(len(chunk.nuggets) for chunk in catalog.chunks())
    output.say(
        f"{store} {scope}: {counts['documents']} documents, {counts['chunks']} chunks, "
        f"{n_nuggets} nuggets; {megabytes(Disk(store).usage()[''])} on disk in all"
    )
    output.say(f"model {settings.model}, embedder {settings.embedder}, {settings.limits}")
    if settings.engine.c2kv:
        ratios = " and ".join(map(str, settings.engine.c2kv))
        output.say(f"slots of {ratios} tokens, made by extractor {settings.extractor}")
    kv: dict[str, dict[str, Any]] = {}
    for name, fingerprint in variants(folder / KV).items():
        sizes = [path.stat().st_size for path in (folder / KV / name).glob("??/*.safetensors")]
        kv[name] = {
            "files": len(sizes),
            "bytes": sum(sizes),
            "ratio": fingerprint.ratio,
            "fingerprint": fingerprint.to_dict(),
        }
        n_bytes, what = megabytes(sum(sizes)), kind(fingerprint.ratio)
        output.say(f"fingerprint {name}: {len(sizes)} files of {n_bytes}, {what}")
        for key, value in fingerprint.to_dict().items():
            output.say(f"  {key}: {value}")
    for name in documents:
        output.say(f"  {name}{' (pinned)' if name in pins else ''}")
    output.result(
        {
            "settings": asdict(settings),
            "scope": asdict(scope),
            **counts,
            "nuggets": n_nuggets,
            "kv": kv,
            "bytes": sum(item["bytes"] for item in kv.values()),
            "document_ids": documents,
            "pinned": pins,
        }
    )


def _show_document(output: Output, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        text = Text(chunk.text)
        for i, nugget in enumerate(chunk.nuggets):
            text.stylize("cyan" if i % 2 else "green", nugget.char_start, nugget.char_stop)
        output.say(f"chunk {chunk.index}", style="bold", end=" ")
        output.say(f"{chunk.chunk_id}: {len(chunk)} tokens, {len(chunk.nuggets)} nuggets")
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
