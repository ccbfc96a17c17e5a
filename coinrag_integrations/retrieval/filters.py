"""Conditions on documents' metadata, in Chroma's own form, checked before Chroma sees them.

Chroma takes exactly one key or operator a level, no empty lists and no lone `$and`; frameworks and people
write all of that. Chunks carry their document's metadata, so conditions hold for documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, floor, isfinite
from typing import Any

from coinrag_integrations.errors import ConfigError

Condition = dict[str, Any]
# No row has it: what a condition becomes that nothing can fulfil.
NOTHING: Condition = {"coinrag_chunk_id": {"$eq": ""}}

_ONE = ("$eq", "$ne", "$gt", "$gte", "$lt", "$lte")
_NUMBERS = ("$gt", "$gte", "$lt", "$lte")
_MANY = ("$in", "$nin")
_LISTS = ("$contains", "$not_contains")
_JOINED = ("$and", "$or")


def where_of(condition: Mapping[str, Any] | None) -> Condition | None:
    """A condition as Chroma takes it; None if everything fulfils it.

    Takes what Chroma documents, and besides: several keys (all must hold), several operators of a key,
    empty lists, and values of several types in a list.

    Raises:
        ConfigError: an operator that Chroma lacks, or a value that it cannot compare.
    """
    if condition is None:
        return None
    if not isinstance(condition, Mapping):
        raise ConfigError(f"a filter is a mapping of keys to values: got {condition!r:.80}")
    return all_of(_one(key, value) for key, value in condition.items())


def all_of(conditions: Iterable[Condition | None]) -> Condition | None:
    """Fulfilled where every one is."""
    parts = [it for it in conditions if it is not None]
    if NOTHING in parts:
        return NOTHING
    return {"$and": parts} if len(parts) > 1 else parts[0] if parts else None


def any_of(conditions: Iterable[Condition | None]) -> Condition | None:
    """Fulfilled where one is; by nothing if there are none."""
    parts = list(conditions)
    if None in parts:
        return None
    parts = [it for it in parts if it != NOTHING]
    return {"$or": parts} if len(parts) > 1 else parts[0] if parts else NOTHING


def _one(key: str, value: Any) -> Condition | None:
    """What one key asks for."""
    if key in _JOINED:
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"{key} in a filter needs a list of conditions: got {value!r:.80}")
        join = all_of if key == "$and" else any_of
        return join([where_of(it) for it in value])
    if not isinstance(key, str) or not key or key.startswith("$"):
        known = ", ".join((*_JOINED, *_ONE, *_MANY, *_LISTS))
        raise ConfigError(f"{key!r:.80} is no key or operator of a filter: operators are {known}")
    if not isinstance(value, Mapping):
        return _operator(key, "$eq", value)
    return all_of(_operator(key, operator, operand) for operator, operand in value.items())


def _operator(key: str, operator: str, operand: Any) -> Condition | None:
    if operator in _MANY:
        if not isinstance(operand, list | tuple | set | frozenset):
            raise ConfigError(f"{operator} on {key!r} needs a list: got {operand!r:.80}")
        by_type: dict[type, list[Any]] = {}
        parts: list[Condition | None] = []
        for value in operand:
            if _is_fraction(_scalar(key, value)):
                parts.append(_against_fraction(key, "$eq" if operator == "$in" else "$ne", value))
            else:
                by_type.setdefault(type(value), []).append(value)
        parts += [{key: {operator: values}} for values in by_type.values()]
        return any_of(parts) if operator == "$in" else all_of(parts)
    if operator in _LISTS:
        return {key: {operator: _scalar(key, operand)}}
    if operator not in _ONE:
        known = ", ".join((*_ONE, *_MANY, *_LISTS))
        raise ConfigError(
            f"{operator!r:.80} on {key!r} is no operator of Chroma: use one of {known}"
        )
    value = _scalar(key, operand)
    if operator in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(f"{operator} on {key!r} compares numbers only: got {value!r:.80}")
    if _is_fraction(value):
        return _against_fraction(key, operator, float(value))
    return {key: {operator: value}}


def _is_fraction(value: object) -> bool:
    return isinstance(value, float) and isfinite(value) and not value.is_integer()


def _against_fraction(key: str, operator: str, value: float) -> Condition | None:
    """Chroma cuts the fraction off before it compares with whole numbers: say what holds for these."""
    below, above = floor(value), ceil(value)
    asked: Condition = {key: {operator: value}}
    also: dict[str, list[Condition]] = {
        "$eq": [{key: {"$gt": below}}, {key: {"$lt": above}}],
        "$gte": [{key: {"$gt": below}}],
        "$lte": [{key: {"$lt": above}}],
    }
    instead: dict[str, list[Condition]] = {
        "$ne": [{key: {"$eq": below}}, {key: {"$eq": above}}],
        "$gt": [{key: {"$gte": above}}],
        "$lt": [{key: {"$lte": below}}],
    }
    if operator in also:
        return all_of([asked, *also[operator]])
    return any_of([asked, *instead[operator]])


def _scalar(key: str, value: Any) -> str | int | float | bool:
    if isinstance(value, str | int | float):
        return value
    raise ConfigError(
        f"metadata {key!r} cannot be compared with {value!r:.80}: use text, a number or a boolean"
    )
