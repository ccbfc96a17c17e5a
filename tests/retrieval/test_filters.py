"""Conditions mean what a plain evaluation of them means, or are refused by name."""

from __future__ import annotations

import operator
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.engine.chunking import chunk_document
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.retrieval import RetrievalConfig, SpanIndex, open_client, where_of
from coinrag_integrations.retrieval.filters import NOTHING
from coinrag_integrations.types import Document
from tests.tiny import HashEmbedder

ROWS = [
    {"name": "a", "year": 1900},
    {"name": "b", "year": 1923, "open": True},
    {"name": "c", "year": 1923.5},
    {"year": 1950, "open": False},
    {"name": "a", "tags": ["x", "y"]},
    {"year": -3, "tags": ["y"]},
    {"year": -3.5},
]
COMPARE = {
    "$eq": operator.eq,
    "$ne": operator.ne,
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


@pytest.fixture(scope="module")
def index(model):
    index = SpanIndex(open_client(None), HashEmbedder(), f"t{uuid4().hex}")
    tokenizer = model.tokenizer
    for number, metadata in enumerate(ROWS):
        document = Document(document_id=str(number), text=f"row {number}", metadata=metadata)
        index.put(chunk_document(document, tokenizer, 32))
    return index


def found(index, condition) -> set[int]:
    return {
        int(it.document_id)
        for it in index.search("row", RetrievalConfig(n_chunks=20, n_nuggets=20, where=condition))
    }


def holds(condition, row) -> bool:
    """What a condition means; a row without the key fulfils only what is negative."""
    for key, value in condition.items():
        if key == "$and":
            fulfilled = all(holds(it, row) for it in value)
        elif key == "$or":
            fulfilled = any(holds(it, row) for it in value)
        elif isinstance(value, dict):
            fulfilled = all(_holds(row.get(key), op, operand) for op, operand in value.items())
        else:
            fulfilled = _holds(row.get(key), "$eq", value)
        if not fulfilled:
            return False
    return True


def _holds(there, op, operand) -> bool:
    if op in ("$in", "$nin"):
        return any(_same(there, it) for it in operand) == (op == "$in")
    if op in ("$contains", "$not_contains"):
        return (operand in (there or ())) == (op == "$contains")
    if op in ("$eq", "$ne"):
        return _same(there, operand) == (op == "$eq")
    return isinstance(there, int | float) and COMPARE[op](there, operand)


def _same(there, operand) -> bool:
    return there == operand and isinstance(there, bool) == isinstance(operand, bool)


names, years = st.sampled_from("abz"), st.sampled_from([1900, 1923, 1923.0, 1923.5, 2000, -3, -3.5])
leaves = st.one_of(
    st.fixed_dictionaries({"name": names}),
    st.fixed_dictionaries({"name": names, "year": years}),
    st.fixed_dictionaries({"open": st.booleans()}),
    st.dictionaries(st.sampled_from(["$ne", "$eq"]), names, min_size=1).map(lambda v: {"name": v}),
    st.dictionaries(st.sampled_from([*COMPARE]), years, min_size=1).map(lambda v: {"year": v}),
    st.dictionaries(
        st.sampled_from(["$in", "$nin"]), st.lists(names | years, max_size=3), min_size=1
    ).map(lambda v: {"name": v}),
    st.dictionaries(
        st.sampled_from(["$contains", "$not_contains"]), st.sampled_from("xyz"), min_size=1
    ).map(lambda v: {"tags": v}),
    st.just({}),
)
conditions = st.recursive(
    leaves,
    lambda inner: st.dictionaries(
        st.sampled_from(["$and", "$or"]), st.lists(inner, min_size=1, max_size=3), min_size=1
    ),
    max_leaves=6,
)


@given(conditions)
def test_conditions_find_the_rows_that_fulfil_them(index, condition):
    assert found(index, condition) == {n for n, row in enumerate(ROWS) if holds(condition, row)}


def test_nothing_fulfils_an_empty_list_and_everything_its_opposite(index):
    assert where_of({"name": {"$in": []}}) == NOTHING
    assert found(index, {"name": {"$in": []}}) == set()
    assert where_of({"name": {"$nin": []}}) is None
    assert where_of({}) is None
    assert where_of(None) is None


@pytest.mark.parametrize(
    ("condition", "named"),
    [
        ({"name": {"$like": "a"}}, r"'\$like' on 'name' is no operator"),
        ({"$not": {"name": "a"}}, r"'\$not' is no key or operator"),
        ({"year": {"$gt": "1900"}}, r"\$gt on 'year' compares numbers only"),
        ({"open": {"$gt": True}}, r"\$gt on 'open' compares numbers only"),
        ({"name": None}, "'name' cannot be compared with None"),
        ({"name": ["a"]}, r"'name' cannot be compared with \['a'\]"),
        ({"name": {"$in": "ab"}}, r"\$in on 'name' needs a list"),
        ({"$and": []}, r"\$and in a filter needs a list"),
        ({"$or": {"name": "a"}}, r"\$or in a filter needs a list"),
        ({"": "a"}, "'' is no key"),
        ({1: "a"}, "1 is no key"),
        (["name"], "a filter is a mapping"),
    ],
)
def test_what_chroma_cannot_check_is_refused_by_name(condition, named):
    with pytest.raises(ConfigError, match=named):
        RetrievalConfig(where=condition)
