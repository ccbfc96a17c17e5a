"""Names of blocks: equal only for equal rows, whatever their tokens are."""

from __future__ import annotations

from itertools import zip_longest

from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.serving.blocks import block_names
from coinrag_integrations.serving.checking import Injection
from coinrag_integrations.types import ChunkId, Scope, SpanRef

A, B = ChunkId("a" * 32), ChunkId("b" * 32)
SIZE = 4


def injection(n_head: int, *refs: SpanRef) -> Injection:
    return Injection(scope=Scope(), head=tuple(range(n_head)), refs=refs)


def names(it: Injection) -> list[str]:
    found = block_names(it, f"head {len(it.head)}", SIZE)
    assert found is not None
    return found


def rows(it: Injection) -> list[object]:
    """What each row is: a token of the head, or one of a chunk."""
    return [*it.head, *((ref.chunk_id, i) for ref in it.refs for i in range(ref.start, ref.stop))]


@st.composite
def prefixes(draw) -> Injection:
    spans = st.builds(
        lambda chunk, start, n: SpanRef(chunk, start, start + n),
        st.sampled_from([A, B]),
        st.integers(0, 2),
        st.integers(1, 6),
    )
    return injection(draw(st.integers(0, 2)), *draw(st.lists(spans, max_size=4)))


@given(prefixes(), prefixes())
def test_equal_names_are_equal_rows(one, two):
    beginnings = zip_longest(names(one), names(two))
    for block, (a, b) in enumerate(beginnings):
        if a != b:
            break
        until = (block + 1) * SIZE
        assert rows(one)[:until] == rows(two)[:until]


def test_prefixes_share_the_blocks_before_their_first_difference():
    one = names(injection(2, SpanRef(A, 0, 7), SpanRef(B, 0, 5)))
    assert len(one) == 4
    for last, n in (
        (SpanRef(B, 1, 6), 2),  # the same chunk from another token on
        (SpanRef(A, 0, 5), 2),
        (SpanRef(B, 0, 5), 4),
    ):
        two = names(injection(2, SpanRef(A, 0, 7), last))
        assert [a == b for a, b in zip(one, two, strict=True)] == [i < n for i in range(4)]
    assert names(injection(2, SpanRef(A, 0, 7)))[:2] == one[:2]
    assert names(injection(2, SpanRef(A, 0, 7)))[2] != one[2]
    assert names(injection(1, SpanRef(A, 0, 7)))[0] != one[0]


def test_prefixes_with_slots_are_shared_as_a_whole():
    assert block_names(injection(2, SpanRef(A, 0, 7), SpanRef(B, 0, 4, 4)), "", SIZE) is None
