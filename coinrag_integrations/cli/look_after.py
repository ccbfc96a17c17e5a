"""`coinrag verify`, `gc`, `convert`, `delete` and `limit`: looking after a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coinrag_integrations.cli.options import Collection, Json, Store, Tenant, parse_bytes
from coinrag_integrations.cli.output import Output, kind, megabytes

if TYPE_CHECKING:
    from coinrag_integrations.maintenance.opened import OnProgress


def verify(
    store: Store,
    quick: Annotated[bool, typer.Option("--quick", help="Check headers, not every byte.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Load the model, and encode and index what is lost.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare files, texts and index of every tenant, and check the bytes of all KV."""
    output = Output(as_json=json)
    from coinrag_integrations import maintenance
    from coinrag_integrations.rag import CoinRAG
    from coinrag_integrations.settings import StoreSettings

    bounded = bool(StoreSettings.load(store).limits)

    def look() -> tuple[list[Any], dict[str, list[str]]]:
        with _progress(output, "verifying") as show:
            reports = maintenance.verify(store, full=not quick, on_progress=show)
        return reports, {str(r.scope): r.problems(bounded=bounded) for r in reports}

    reports, problems = look()
    n_repaired = 0
    if repair and any(problems.values()):
        for report in reports:
            if problems[str(report.scope)]:
                scope = asdict(report.scope)
                with CoinRAG.open(store, **scope) as rag, _progress(output, "repairing") as show:
                    n_repaired += maintenance.repair(rag, show)
        maintenance.collect_garbage(store)
        reports, problems = look()
    for report in reports:
        kv = ", ".join(
            f"{v.name}: {v.n_files} files of {megabytes(v.n_bytes)} ({kind(v.ratio)})"
            for v in report.variants
        )
        output.say(
            f"{report.scope}: {report.n_documents} documents, {report.n_chunks} chunks; KV {kv}"
        )
        for problem in problems[str(report.scope)]:
            output.say(f"  {problem}", style="yellow")
    is_sound = not any(problems.values())
    output.say("everything is in order" if is_sound else "run again with --repair to mend it")
    output.result(
        {
            "sound": is_sound,
            "repaired": n_repaired,
            "problems": problems,
            "scopes": [asdict(report) for report in reports],
        }
    )
    if not is_sound:
        raise typer.Exit(1)


def gc(
    store: Store,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="Name of a fingerprint whose KV is to go; `inspect` shows them."),
    ] = None,
    json: Json = False,
) -> None:
    """Remove what no document needs: leftovers, interrupted builds, KV above the caps."""
    output = Output(as_json=json)
    from coinrag_integrations.maintenance import collect_garbage

    freed = max(collect_garbage(store, drop=drop or ()), 0)  # journals may have grown
    output.say(f"{megabytes(freed)} are free again")
    output.result({"freed": freed})


def convert(
    store: Store,
    codec: Annotated[str, typer.Option(help="'int8' or 'int4'.")],
    keep: Annotated[bool, typer.Option("--keep", help="Keep the KV as it was beside it.")] = False,
    json: Json = False,
) -> None:
    """Store KV in fewer bits. May be interrupted and run again; loads no model."""
    output = Output(as_json=json)
    from coinrag_integrations.maintenance import convert as convert_store

    with _progress(output, "converting") as show:
        sizes = convert_store(store, codec, keep=keep, on_progress=show)  # type: ignore[arg-type]
    share = sizes["after"] / sizes["before"] if sizes["before"] else 1.0
    output.say(f"{megabytes(sizes['before'])} became {megabytes(sizes['after'])} ({share:.2f})")
    output.result(sizes)


def delete(
    documents: Annotated[list[str], typer.Argument(help="Ids of documents.")],
    store: Store,
    tenant: Tenant = "default",
    collection: Collection = "main",
    json: Json = False,
) -> None:
    """Remove documents with their texts, KV and index rows."""
    output = Output(as_json=json)
    from coinrag_integrations.maintenance import delete_documents

    n_deleted = delete_documents(store, documents, tenant=tenant, collection=collection)
    output.say(f"{n_deleted} of {len(documents)} documents deleted")
    output.result({"deleted": n_deleted})
    if n_deleted < len(documents):
        raise typer.Exit(1)


def limit(
    store: Store,
    max_bytes: Annotated[
        str | None, typer.Option(help="Cap of the whole folder, e.g. 200MB, 1.5GiB, or 'none'.")
    ] = None,
    quota: Annotated[
        list[str] | None, typer.Option(help="Cap of one tenant: NAME=50MB, or NAME=none.")
    ] = None,
    json: Json = False,
) -> None:
    """Bound the bytes on disk; KV that was not used for longest is evicted at once."""
    output = Output(as_json=json)
    from coinrag_integrations.maintenance import set_limits

    quotas = dict(_quota(text) for text in quota or [])
    limits, freed = set_limits(
        store,
        **({} if max_bytes is None else {"max_bytes": parse_bytes(max_bytes)}),
        tenant_bytes=quotas,
    )
    output.say(f"limits are {limits}; {megabytes(freed)} were evicted")
    output.result({"limits": asdict(limits), "freed": freed})


def _quota(text: str) -> tuple[str, int | None]:
    from coinrag_integrations.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is no quota: use NAME=50MB")
    return name, parse_bytes(value)


@contextmanager
def _progress(output: Output, what: str) -> Iterator[OnProgress]:
    with output.counting(what, 0) as progress:
        task = progress.task_ids[0]
        yield lambda done, total: progress.update(task, completed=done, total=total)
