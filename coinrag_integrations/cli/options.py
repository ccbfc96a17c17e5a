"""Options that several commands share, declared once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from coinrag_integrations.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of stdout.")]
Store = Annotated[Path, typer.Option("--store", help="The store's folder.")]
Tenant = Annotated[str, typer.Option("--tenant", help="Whose documents.")]
Collection = Annotated[str, typer.Option("--collection", help="Which of the tenant's collections.")]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Local folder, hub name, or 'demo'. Default: what the store has."),
]
NewModel = Annotated[
    str | None,
    typer.Option("--model", help="Local folder, hub name, or 'demo' (default for a new store)."),
]
Coverage = Annotated[
    str | None,
    typer.Option("--coverage", help="Keep the KV of 'nuggets' (default) or 'all' tokens."),
]
Codec = Annotated[
    str | None,
    typer.Option("--codec", help="Keep KV as it is ('none', default), as 'int8' or 'int4'."),
]
Slots = Annotated[
    str | None,
    typer.Option("--c2kv", help="Store slots too, one for so many tokens: 4, or 4,8; '' for none."),
]
Extractor = Annotated[
    str | None,
    typer.Option(
        "--extractor", help="The folder of what makes them, or 'untrained'. The demo has one."
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter", help="Folder of a reader adapter; '' for none. The store remembers it."
    ),
]
DemoStore = Annotated[
    Path | None,
    typer.Option(
        "--store", help="Where the demo's store is or will be; default: the user's cache."
    ),
]
DemoModel = Annotated[str, typer.Option("--model", help="Local folder, hub name, or 'demo'.")]
# Of measurements (`coinrag eval` and `coinrag eval cost`).
DataFolder = Annotated[
    Path | None,
    typer.Option("--data-folder", envvar="COINRAG_DATA", help="Where named data sets lie."),
]
DemoAdapter = Annotated[
    str | None,
    typer.Option("--adapter", help="A reader adapter's folder; '' for none. The demo has one."),
]
EmbedderName = Annotated[str, typer.Option("--embedder", help="Which embedder retrieves.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")]
Seed = Annotated[int, typer.Option("--seed", help="Of turns and of bootstrap intervals.")]
Chunks = Annotated[int, typer.Option("--n-chunks", min=1, help="Chunks found by stage one.")]
Nuggets = Annotated[int, typer.Option("--n-nuggets", min=1, help="Nuggets found by stage two.")]
Raw = Annotated[int, typer.Option("--n-raw", min=0, help="Chunks that 'hybrid' reads whole.")]


def parse_bytes(text: str) -> int | None:
    """A number of bytes with an optional unit (kB, MB, GB, TB, KiB, MiB …); "none" is None.

    Raises:
        ConfigError: it is neither.
    """
    if text.lower() == "none":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not match:
        raise ConfigError(f"{text!r} is no number of bytes: use for example 200MB, 1.5GiB or none")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(unit or " "))


def parse_ratios(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them, as 4 or 4,8.

    Raises:
        ConfigError: something else.
    """
    try:
        return tuple(int(ratio) for ratio in text.split(",") if text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: give whole numbers, as 4 or 4,8") from error


def slot_ratios(known: Sequence[int], c2kv: str | None, extractor: str | None) -> tuple[int, ...]:
    """The ratios of `--c2kv`, or those that a store has already.

    Raises:
        ConfigError: they are not whole numbers, or an extractor is given that would make nothing.
    """
    ratios = tuple(known) if c2kv is None else parse_ratios("--c2kv", c2kv)
    if extractor and not ratios:
        raise ConfigError(
            f"--extractor {extractor} makes slots, and none are asked for: add --c2kv 4"
        )
    return ratios
