"""Evidence made by hand: passages whose nuggets are between brackets, loaded ones between double ones."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coinrag_integrations.evaluation.errors.evidence import (
    Evidence,
    EvidenceFile,
    ShownChunk,
    ShownNugget,
)
from coinrag_integrations.evaluation.results import Measured

QUESTION, GOLD = "Who built the organ?", "Bastien Roule"


def chunk(marked: str, rank: int | None = 1, **options: Any) -> ShownChunk:
    """A chunk of "[[loaded]] rest [left]", whose loaded nuggets are the nearest ones in their order."""
    text, nuggets = "", []
    for part in re.findall(r"\[\[.+?\]\]|\[.+?\]|[^\[]+", marked):
        bare = part.strip("[]") if part.startswith("[") else part
        if bare != part:
            is_loaded = part.startswith("[[")
            n = 1 + sum(nugget.is_loaded for nugget in nuggets)
            place = (len(text), len(text) + len(bare))
            nuggets.append(ShownNugget(*place, n if is_loaded else None, is_loaded))
        text += bare
    values: dict[str, Any] = {"document_id": "a", "is_supporting": None, **options}
    return ShownChunk(text=text, rank=rank, nuggets=tuple(nuggets), **values)


def evidence(*chunks: ShownChunk, **options: Any) -> Evidence:
    """Of one example, "1" of data "x" with settings "s" unless told otherwise."""
    values: dict[str, Any] = {
        "settings": "s",
        "data": "x",
        "example": "1",
        "search": "two-stage",
        "question": QUESTION,
        "answers": (GOLD,),
        **options,
    }
    return Evidence(chunks=chunks, **values)


def measured(answer: str, **options: Any) -> dict[str, Any]:
    """A line of results."""
    row = Measured(
        settings="s",
        data="x",
        example="1",
        method="spans",
        answer=answer,
        f1=0.0,
        nll=1.25,
        n_context=1,
        bytes_read=1,
        compose_ms=1.0,
        ttft_ms=1.0,
    )
    return {**asdict(row), **options}


def write(folder: Path, found: list[Evidence], results: list[dict[str, Any]]) -> None:
    """A folder of results with its evidence."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in results))
    for settings in dict.fromkeys(row.settings for row in found):
        with EvidenceFile(folder, settings) as file:
            for row in found:
                if row.settings == settings:
                    file.add(row)
