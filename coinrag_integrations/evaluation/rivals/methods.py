"""The methods by name. "cacheblend:0.3" sets a method's number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.rivals.ape import ape
from coinrag_integrations.evaluation.rivals.independent import (
    chunk,
    chunk_after_prompt,
    chunk_bos,
    evict,
    isolated,
    meanpool,
    naive,
    strided,
)
from coinrag_integrations.evaluation.rivals.kitchen import Kitchen
from coinrag_integrations.evaluation.rivals.links import kvlink
from coinrag_integrations.evaluation.rivals.plain import full, none, prefix, text
from coinrag_integrations.evaluation.rivals.recompute import cacheblend, legolink
from coinrag_integrations.evaluation.rivals.spans import spans
from coinrag_integrations.evaluation.rivals.task import Composed, Task

Compose = Callable[[Kitchen, Task], Composed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to put context before a question, under the name it is asked for."""

    name: str
    compose: Compose


@dataclass(frozen=True, slots=True, kw_only=True)
class _Number:
    """The options that a method's number sets, how it is read, and what it may be."""

    options: tuple[str, ...]
    read: Callable[[str], float]
    least: float
    most: float = float("inf")


_COUNT, _LINKS = (
    _Number(options=(option,), read=int, least=least) for option, least in (("k", 1), ("links", 0))
)
_NUMBERS: Mapping[str, _Number] = {
    "cacheblend": _Number(options=("ratio",), read=float, least=0.0, most=1.0),
    "legolink": _COUNT,
    "ape": _Number(options=("temperature", "scale"), read=float, least=0.1, most=10.0),
    "kvlink": _LINKS,
    "evict": _COUNT,
    "strided": _COUNT,
    "meanpool": _COUNT,
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
    "spans": spans,
}


def parse_method(name: str) -> Method:
    """The method of a name, with its number if one follows a colon ("legolink:32").

    Raises:
        ConfigError: no such method, or not with such a number.
    """
    base, colon, number = name.partition(":")
    compose = METHODS.get(base)
    if compose is None:
        raise ConfigError(f"method {base!r} is not known: use some of {', '.join(METHODS)}")
    if not colon:
        return Method(name=name, compose=compose)
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
    return Method(name=name, compose=partial(compose, **options))
