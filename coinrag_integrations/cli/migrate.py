"""`coinrag migrate`: somebody else's Chroma collection into a store."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    slot_ratios,
)
from coinrag_integrations.cli.output import Output, megabytes, stored, stored_bytes
from coinrag_integrations.cli.plan import show_estimate

if TYPE_CHECKING:
    from coinrag_integrations.migration import CollectionInfo, MigrationReport, Notes

_N_SHOWN = 5
_NEXT = {
    "LangChain": """\
- retriever = Chroma({name!r}, embeddings, persist_directory=…).as_retriever()
+ rag = CoinRAG.open({store!r})
+ retriever = CoinRAGRetriever(rag=rag)
- llm = …
+ llm = ChatCoinRAG(rag=rag)""",
    "LlamaIndex": """\
- index = VectorStoreIndex.from_vector_store(ChromaVectorStore(chroma_collection=…))
+ index = CoinRAGIndex(CoinRAG.open({store!r}))
  engine = index.as_query_engine()""",
}


def migrate(
    source: Annotated[
        str, typer.Argument(help="The Chroma folder, or http://host:port of its server.")
    ],
    store: Store,
    name: Annotated[
        str | None,
        typer.Option("--from", help="The collection; needed where there is more than one."),
    ] = None,
    model: NewModel = None,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="What made the vectors: 'minilm' (default), 'bge-m3', 'bge-m3:<folder>'."
        ),
    ] = None,
    reembed: Annotated[
        bool, typer.Option("--reembed", help="Embed all texts anew, with any embedder.")
    ] = False,
    coverage: Coverage = None,
    codec: Codec = None,
    c2kv: Slots = None,
    extractor: Extractor = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens a chunk; default for a new store: as many as the longest row has."
        ),
    ] = None,
    tenant: Tenant = "default",
    collection: Collection = "main",
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Remove documents of the store that the collection lacks."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would cost; writes no store.")
    ] = False,
    sample: Annotated[
        int, typer.Option(min=0, help="Dry run: chunks to look into for nuggets; 0: all of them.")
    ] = 64,
    scratch: Annotated[
        Path | None,
        typer.Option(
            help="Where the folder is copied to meanwhile; default: the temporary folder."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Move a Chroma collection of a LangChain or LlamaIndex application into a store.

    Ids, texts, metadata and vectors are kept; the collection itself is not touched. Running it again
    continues an interrupted move, takes over what changed and skips the rest.
    """
    output = Output(as_json=json)
    from coinrag_integrations.engine import load_model
    from coinrag_integrations.migration import (
        describe,
        fitting_chunk_tokens,
        folder_bytes,
        open_collection,
    )
    from coinrag_integrations.migration import migrate as move
    from coinrag_integrations.rag import CoinRAG
    from coinrag_integrations.settings import (
        SETTINGS_FILE,
        StoreSettings,
        load_extractor,
        make_embedder,
        resolve_model,
    )

    _refuse_one_in_the_other(source, store)
    is_new = not (store / SETTINGS_FILE).exists()
    known = StoreSettings(model="demo") if is_new else StoreSettings.load(store)
    ratios = slot_ratios(known.engine.c2kv, c2kv, extractor)
    changes = {"coverage": coverage, "codec": codec, "c2kv": ratios}
    known = replace(
        known,
        model=model or known.model,
        embedder=embedder or known.embedder,
        extractor=known.extractor if extractor is None else extractor or None,
        engine=replace(known.engine, **{k: v for k, v in changes.items() if v is not None}),  # type: ignore[arg-type]
    ).with_own_extractor()
    with open_collection(source, name, scratch=scratch) as found:
        info = describe(found)
        output.say(_about(info))
        with output.console.status("loading the model …"):
            loaded = load_model(resolve_model(known.model), dtype=known.dtype)
            loaded = replace(loaded, name=known.model)
            load_extractor(known, loaded)
        if chunk_tokens is None and is_new:
            with output.console.status("looking for the longest row …"):
                chunk_tokens = fitting_chunk_tokens(found, loaded)
        config = known.engine
        if chunk_tokens is not None:
            config = replace(config, chunk_tokens=chunk_tokens)
        if dry_run:
            result = _estimate(
                output, found, info, loaded, make_embedder(known.embedder), config,
                reembed=reembed, sample=sample, scratch=scratch,
            )  # fmt: skip
            if "://" not in source:
                n_bytes = folder_bytes(Path(source))
                output.say(f"Copying the folder while it is read takes {megabytes(n_bytes)}.")
                result["scratch_bytes"] = n_bytes
            output.result({"collection": asdict(info), **result})
            return
        with CoinRAG.open(
            store,
            model=loaded,
            embedder=known.embedder,
            config=config,
            extractor=extractor,
            tenant=tenant,
            collection=collection,
        ) as rag:
            with output.ingesting(info.n_rows) as show:
                report = move(rag, found, reembed=reembed, prune=prune, on_progress=show)
            n_bytes, of_slots = stored_bytes(rag.engine.forms)
            totals = rag.engine.catalog.counts()
    _say_report(output, report)
    output.say(
        f"{store}: {totals['documents']} documents, {totals['chunks']} chunks of at most "
        f"{config.chunk_tokens} tokens, {stored(n_bytes, of_slots)}"
    )
    output.say("In the application:")
    output.say(_NEXT[info.framework].format(name=info.name, store=str(store)))
    output.result(
        {
            **_as_dict(report),
            "store": str(store),
            "bytes": n_bytes,
            "slot_bytes": of_slots,
            **totals,
        }
    )


def _refuse_one_in_the_other(source: str, store: Path) -> None:
    from coinrag_integrations.errors import ConfigError

    if "://" in source:
        return
    theirs, ours = Path(source).resolve(), store.resolve()
    if theirs == ours or theirs in ours.parents or ours in theirs.parents:
        raise ConfigError(
            f"the store {store} and the folder {source} must not lie in each other: the folder stays "
            "as it is. Choose another --store"
        )


def _estimate(
    output: Output,
    found: Any,
    info: CollectionInfo,
    loaded: Any,
    searcher: Any,
    config: Any,
    *,
    reembed: bool,
    sample: int,
    scratch: Path | None,
) -> dict[str, Any]:
    from coinrag_integrations.evaluation.trial import estimate_store
    from coinrag_integrations.migration import Notes, check_embedder, read_documents
    from coinrag_integrations.retrieval import RetrievalConfig

    notes, retrieval = Notes(), RetrievalConfig()
    with output.console.status("comparing vectors …") as status:
        agreement = None if reembed else check_embedder(found, info, searcher)
        estimate = estimate_store(
            read_documents(found, notes, with_vectors=not reembed),
            loaded,
            searcher,
            config,
            retrieval=retrieval,
            n_sample=sample or None,
            scratch=scratch,
            on_step=lambda step: status.update(f"{step} …"),
        )
    show_estimate(output, estimate, retrieval.n_nuggets)
    _say_notes(output, notes, agreement)
    return {**estimate.to_dict(), "agreement": agreement, **_notes_as_dict(notes)}


def _about(info: CollectionInfo) -> str:
    about = (
        f"{info.name!r}, made by {info.framework}: {info.n_rows} rows, {info.n_dimensions} numbers a "
        f"vector, {info.space}"
    )
    if info.space != "cosine" and not info.has_unit_vectors:
        about += ". Its vectors are not of unit length: here they are compared by their cosine"
    return about


def _say_report(output: Output, report: MigrationReport) -> None:
    done = report.ingest
    output.say(
        f"{done.n_added} added, {done.n_updated} updated, {done.n_unchanged} unchanged, "
        f"{len(report.notes.skipped) + len(done.empty)} skipped, {report.n_pruned} pruned; "
        f"{done.n_chunks} chunks, {done.n_nuggets} nuggets in {done.seconds:.1f} s"
    )
    _say_notes(output, report.notes, report.agreement)


def _say_notes(output: Output, notes: Notes, agreement: float | None) -> None:
    if agreement is not None:
        output.say(f"The embedder's vectors and the collection's agree by {agreement:.3f}.")
    for reason, n in Counter(notes.skipped.values()).items():
        ids = [id_ for id_, why in notes.skipped.items() if why == reason]
        shown = ", ".join(ids[:_N_SHOWN]) + (", …" if n > _N_SHOWN else "")
        output.say(f"skipped {n} rows, {reason}: {shown}")
    for key, n in sorted(notes.left_out.items()):
        output.say(f"left out metadata {key!r} of {n} rows: not to be kept")


def _notes_as_dict(notes: Notes) -> dict[str, Any]:
    return {"skipped": notes.skipped, "left_out": dict(notes.left_out)}


def _as_dict(report: MigrationReport) -> dict[str, Any]:
    return {
        "collection": asdict(report.collection),
        **asdict(report.ingest),
        **_notes_as_dict(report.notes),
        "agreement": report.agreement,
        "pruned": report.n_pruned,
    }
