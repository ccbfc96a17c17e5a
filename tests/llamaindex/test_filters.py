"""LlamaIndex filters find what LlamaIndex itself would find, or are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import Document
from llama_index.core.vector_stores import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.llamaindex import CoinRAGRetriever, add_documents
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig

ROWS = {
    "a": {"name": "a", "year": 1900},
    "b": {"name": "b", "year": 1923},
    "c": {"name": "c", "year": 1950},
    "d": {"year": 1950, "tags": ["x", "y"]},
    "e": {"name": "a", "tags": ["y"]},
}
NUMBERS = [FilterOperator.GT, FilterOperator.GTE, FilterOperator.LT, FilterOperator.LTE]
EXACT = [FilterOperator.EQ, FilterOperator.NE]
LISTS = [FilterOperator.IN, FilterOperator.NIN]
OF_LISTS = [FilterOperator.ANY, FilterOperator.ALL]


@pytest.fixture
def rows(rag: CoinRAG) -> CoinRAG:
    rag.retrieval = RetrievalConfig(n_chunks=20, n_nuggets=20)
    add_documents(
        rag, [Document(id_=n, text=f"The row is {n}.", metadata=m) for n, m in ROWS.items()]
    )
    return rag


names = st.sampled_from(["a", "b", "z"])
exact = st.builds(MetadataFilter, key=st.just("name"), value=names, operator=st.sampled_from(EXACT))
lists = st.builds(
    MetadataFilter,
    key=st.just("name"),
    value=st.lists(names, max_size=2),
    operator=st.sampled_from(LISTS),
)
numbers = st.builds(
    MetadataFilter,
    key=st.just("year"),
    value=st.sampled_from([1900, 1923, 2000]),
    operator=st.sampled_from(NUMBERS),
)
tag = st.sampled_from(["x", "y", "z"])
tags = st.builds(
    MetadataFilter,
    key=st.just("tags"),
    value=st.lists(tag, min_size=1, max_size=2),
    operator=st.sampled_from(OF_LISTS),
) | st.builds(
    MetadataFilter, key=st.just("tags"), value=tag, operator=st.just(FilterOperator.CONTAINS)
)
joined = st.builds(
    MetadataFilters,
    filters=st.lists(exact | lists | numbers | tags, min_size=1, max_size=3),
    condition=st.sampled_from([FilterCondition.AND, FilterCondition.OR]),
)
negated = st.builds(
    MetadataFilters,
    filters=st.lists(exact | lists, min_size=1, max_size=2),
    condition=st.just(FilterCondition.NOT),
)
nested = st.builds(
    MetadataFilters,
    filters=st.lists(joined | negated | exact, min_size=1, max_size=2),
    condition=st.sampled_from([FilterCondition.AND, FilterCondition.OR]),
)


def expected(filters: MetadataFilters) -> set[str]:
    return {n for n in ROWS if _holds(filters, n)}


def _holds(filters: MetadataFilters, name: str) -> bool:
    """By LlamaIndex's own filter, which looks into no nested ones."""
    fulfilled = [
        _holds(it, name)
        if isinstance(it, MetadataFilters)
        else build_metadata_filter_fn(ROWS.__getitem__, MetadataFilters(filters=[it]))(name)
        for it in filters.filters
    ]
    if filters.condition is FilterCondition.OR:
        return any(fulfilled)
    if filters.condition is FilterCondition.NOT:
        return not any(fulfilled)
    return all(fulfilled)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(filters=joined | negated | nested)
def test_filters_find_what_llamaindex_finds(rows: CoinRAG, filters: MetadataFilters):
    nodes = CoinRAGRetriever(rows, filters=filters).retrieve("row")
    assert {node.node.ref_doc_id for node in nodes} == expected(filters)


def test_no_filters_find_everything(rows: CoinRAG):
    for filters in (None, MetadataFilters(filters=[])):
        assert len(CoinRAGRetriever(rows, filters=filters).retrieve("row")) == len(ROWS)


@pytest.mark.parametrize(
    "operator",
    [
        it
        for it in FilterOperator
        if it not in (*NUMBERS, *EXACT, *LISTS, *OF_LISTS, FilterOperator.CONTAINS)
    ],
)
def test_operators_that_chroma_lacks_are_named(rows: CoinRAG, operator: FilterOperator):
    filters = MetadataFilters(filters=[MetadataFilter(key="name", value="a", operator=operator)])
    with pytest.raises(ConfigError, match=f"no filter '{operator.value}' \\(on 'name'\\)"):
        CoinRAGRetriever(rows, filters=filters)


def test_what_cannot_be_negated_is_named(rows: CoinRAG):
    above = MetadataFilter(key="year", value=1923, operator=FilterOperator.GT)
    for inner in (above, MetadataFilters(filters=[above])):
        filters = MetadataFilters(filters=[inner], condition=FilterCondition.NOT)
        with pytest.raises(ConfigError, match=r"negate"):
            CoinRAGRetriever(rows, filters=filters)
