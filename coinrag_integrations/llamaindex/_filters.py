"""LlamaIndex metadata filters as conditions of Chroma."""

from __future__ import annotations

from collections.abc import Callable

from llama_index.core.vector_stores import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.retrieval import Condition, all_of, any_of, where_of

_OPERATORS = {
    FilterOperator.EQ: "$eq",
    FilterOperator.NE: "$ne",
    FilterOperator.GT: "$gt",
    FilterOperator.GTE: "$gte",
    FilterOperator.LT: "$lt",
    FilterOperator.LTE: "$lte",
    FilterOperator.IN: "$in",
    FilterOperator.NIN: "$nin",
    FilterOperator.CONTAINS: "$contains",
}
# Of lists: whether any, or each, of the values given is in it.
_OF_LISTS = {FilterOperator.ANY: any_of, FilterOperator.ALL: all_of}
# Those whose opposites hold for rows without the key, as the opposite of a condition must.
_OPPOSITES = {
    FilterOperator.EQ: FilterOperator.NE,
    FilterOperator.NE: FilterOperator.EQ,
    FilterOperator.IN: FilterOperator.NIN,
    FilterOperator.NIN: FilterOperator.IN,
}


def condition_of(filters: MetadataFilters | None) -> Condition | None:
    """What Chroma is asked; None for everything.

    Raises:
        ConfigError: an operator that Chroma has no counterpart of; names it.
    """
    if filters is None or not filters.filters:
        return None
    match filters.condition:
        case FilterCondition.OR:
            return any_of(_each(filters, _holds))
        case FilterCondition.NOT:  # none of them holds
            return all_of(_each(filters, _fails))
        case _:
            return all_of(_each(filters, _holds))


def _each(
    filters: MetadataFilters, translate: Callable[[MetadataFilter], Condition | None]
) -> list[Condition | None]:
    if translate is _fails and any(isinstance(it, MetadataFilters) for it in filters.filters):
        raise ConfigError("NOT around filters that are joined themselves: negate each of them")
    return [
        condition_of(it) if isinstance(it, MetadataFilters) else translate(it)
        for it in filters.filters
    ]


def _holds(filter_: MetadataFilter) -> Condition | None:
    if join := _OF_LISTS.get(filter_.operator):
        values = filter_.value if isinstance(filter_.value, list) else [filter_.value]
        return join([where_of({filter_.key: {"$contains": value}}) for value in values])
    operator = _OPERATORS.get(filter_.operator)
    if operator is None:
        known = ", ".join(it.value for it in (*_OPERATORS, *_OF_LISTS))
        raise ConfigError(
            f"Chroma has no filter {filter_.operator.value!r} (on {filter_.key!r}): use one of {known}"
        )
    return where_of({filter_.key: {operator: filter_.value}})


def _fails(filter_: MetadataFilter) -> Condition | None:
    opposite = _OPPOSITES.get(filter_.operator)
    if opposite is None:
        raise ConfigError(
            f"Chroma cannot negate the filter {filter_.operator.value!r} (on {filter_.key!r}), since "
            f"documents without {filter_.key!r} would be left out: say what must hold instead"
        )
    return _holds(filter_.model_copy(update={"operator": opposite}))
