"""The methods by name. "cacheblend:0.3" sets a method's number, "spans:5" takes five nuggets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.rivals.ape import ape
from coinrag_integrations.evaluation.rivals.c2kv import c2kv, hybrid, untrained
from coinrag_integrations.evaluation.rivals.independent import (
    chunk,
    chunk_after_prompt,
    chunk_bos,
    evict,
    isolated,
    meanpool,
    naive,
    strided,
    truncated,
)
from coinrag_integrations.evaluation.rivals.kitchen import Kitchen
from coinrag_integrations.evaluation.rivals.links import kvlink
from coinrag_integrations.evaluation.rivals.plain import full, none, prefix, text
from coinrag_integrations.evaluation.rivals.recompute import cacheblend, legolink
from coinrag_integrations.evaluation.rivals.spans import spans, unaligned
from coinrag_integrations.evaluation.rivals.task import Composed, Search, Task

Compose = Callable[[Kitchen, Task], Composed]
Reads = Literal["nothing", "nuggets", "chunks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to put context before a question, under the name it is asked for.

    `search` finds what it works on, `reads` says what of that; `n_nuggets` how many of the nuggets, None:
    the task's. Without `is_adapted` the base model reads it, adapter or not.
    """

    name: str
    compose: Compose
    reads: Reads
    n_nuggets: int | None = None
    search: Search = "two-stage"
    is_adapted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    """The options that a method's number sets, how it is read, what it may be, what a sweep tries."""

    options: tuple[str, ...]
    read: Callable[[str], float]
    least: float
    sweep: tuple[float, ...]
    most: float = float("inf")


_NUGGETS = _Number(options=("nuggets",), read=int, least=1, sweep=(2, 5, 10, 20))
_ENTRIES = _Number(options=("k",), read=int, least=1, sweep=(2, 4, 8))
_NUMBERS: Mapping[str, _Number] = {
    "cacheblend": _Number(
        options=("ratio",), read=float, least=0.0, most=1.0, sweep=(0.05, 0.16, 0.3)
    ),
    "legolink": _Number(options=("k",), read=int, least=1, sweep=(4, 16, 64)),
    "ape": _Number(
        options=("temperature", "scale"), read=float, least=0.1, most=10.0, sweep=(0.8, 0.9, 1.0)
    ),
    "kvlink": _Number(options=("links",), read=int, least=0, sweep=(1, 5)),
    "text": _NUGGETS,
    "isolated": _NUGGETS,
    "spans": _NUGGETS,
    "evict": _ENTRIES,
    "strided": _ENTRIES,
    "meanpool": _ENTRIES,
    "truncated": _ENTRIES,
    "c2kv": _ENTRIES,
    "c2kv-untrained": _ENTRIES,
    "hybrid": _ENTRIES,
}

METHODS: Mapping[str, Compose] = {
    "none": none,
    "full": full,
    "prefix": prefix,
    "naive": naive,
    "chunk": chunk,
    "chunk-bos": chunk_bos,
    "chunk-after-prompt": chunk_after_prompt,
    "cacheblend": cacheblend,
    "legolink": legolink,
    "ape": ape,
    "kvlink": kvlink,
    "text": text,
    "isolated": isolated,
    "evict": evict,
    "strided": strided,
    "meanpool": meanpool,
    "truncated": truncated,
    "c2kv": c2kv,
    "c2kv-untrained": untrained,
    "hybrid": hybrid,
    "spans": spans,
}

# What the papers took away to see what it is worth; `isolated` is one more.
ABLATIONS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(name="spans-one-stage", compose=spans, reads="nuggets", search="one-stage"),
        Method(name="spans-unaligned", compose=unaligned, reads="nuggets"),
        Method(name="spans-unadapted", compose=spans, reads="nuggets", is_adapted=False),
    )
}
RERANKED = Method(name="spans-reranked", compose=spans, reads="nuggets", search="reranked")


def parse_method(name: str) -> Method:
    """The method of a name, with its number if one follows a colon ("legolink:32").

    Raises:
        ConfigError: no such method, or not with such a number.
    """
    others = {**ABLATIONS, RERANKED.name: RERANKED}
    if name in others:
        return others[name]
    base, colon, number = name.partition(":")
    compose = METHODS.get(base)
    if compose is None:
        known = ", ".join((*METHODS, *others))
        raise ConfigError(f"method {base!r} is not known: use some of {known}")
    reads: Reads = "nuggets" if _NUMBERS.get(base) is _NUGGETS else "chunks"
    if compose is none:
        reads = "nothing"
    if not colon:
        return Method(name=name, compose=compose, reads=reads)
    kind = _NUMBERS.get(base)
    if kind is None:
        numbered = ", ".join(_NUMBERS)
        raise ConfigError(f"method {base!r} takes no number, only {numbered} do: got {name!r}")
    try:
        value = kind.read(number)
        if not kind.least <= value <= kind.most:
            raise ValueError("out of range")
    except ValueError as error:
        what = "a whole number" if kind.read is int else "a number"
        limit = f" to {kind.most:g}" if kind.most < float("inf") else ""
        raise ConfigError(
            f"method {name!r}: {number!r} is not {what} from {kind.least:g}{limit}"
        ) from error
    options: dict[str, Any] = dict.fromkeys(kind.options, value)
    return Method(
        name=name,
        compose=partial(compose, **options),
        reads=reads,
        n_nuggets=options.get("nuggets"),
    )


def swept(names: Sequence[str]) -> list[str]:
    """These methods, and behind each that has a number the same with several ones."""
    found: dict[str, None] = {}
    for name in names:
        found[name] = None
        if name in _NUMBERS:
            found |= dict.fromkeys(f"{name}:{number:g}" for number in _NUMBERS[name].sweep)
    return list(found)
