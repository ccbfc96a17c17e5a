"""Laws of arithmetic: nothing is lost, nothing doubled, no gaps, and order is as promised."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.plan import PrefixPlan, Segment, Text, arrange, merge, plan_prefix
from coinrag_integrations.errors import BudgetError
from coinrag_integrations.types import ChunkId, Span, SpanRef

MANY = settings(deadline=None, max_examples=60)
spans = st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda p: Span(p[0], p[0] + p[1]))
refs = st.lists(
    st.tuples(st.sampled_from("abcd"), spans).map(
        lambda p: SpanRef(ChunkId(p[0]), p[1].start, p[1].stop)
    ),
    max_size=14,
)


def tokens(items) -> set:
    return {(getattr(i, "chunk_id", ""), t) for i in items for t in range(i.start, i.stop)}


@MANY
@given(st.lists(spans, max_size=14))
def test_merged_spans_are_the_union_in_order_with_gaps_between(many):
    merged = merge(many)
    assert tokens(merged) == tokens(many)
    assert all(a.stop < b.start for a, b in pairwise(merged))


@MANY
@given(st.lists(spans, max_size=14), st.randoms())
def test_merging_does_not_depend_on_the_order_and_is_done_once(many, random):
    shuffled = many.copy()
    random.shuffle(shuffled)
    assert merge(shuffled) == merge(many) == merge(merge(many))


@MANY
@given(refs)
def test_arranged_spans_hold_the_same_tokens_each_once(many):
    arranged = arrange(many)
    assert tokens(arranged) == tokens(many)
    assert sum(map(len, arranged)) == len(tokens(many))


@MANY
@given(refs)
def test_chunks_come_in_the_order_of_their_first_span_and_spans_in_the_order_of_the_text(many):
    arranged = arrange(many)
    first_seen = list(dict.fromkeys(ref.chunk_id for ref in many))
    assert list(dict.fromkeys(ref.chunk_id for ref in arranged)) == first_seen
    expected = sorted(arranged, key=lambda ref: (first_seen.index(ref.chunk_id), ref.start))
    assert arranged == expected


heads = st.integers(0, 30).map(lambda n: Text(tuple(range(n))))
pieces = st.lists(
    st.one_of(
        refs.filter(bool).map(lambda many: many[0]),
        st.integers(0, 6).map(lambda n: Text(tuple(range(n)))),
    ),
    max_size=12,
)


@MANY
@given(refs, heads)
def test_positions_are_contiguous_and_end_right_before_the_question(many, head):
    plan = plan_prefix([head, *many])
    n_spans = sum(map(len, many))
    assert plan.refs == tuple(many)
    assert plan.length == plan.n_rows == len(head) + n_spans
    assert [*plan.positions(), *plan.online_positions()] == list(range(plan.length))
    rows = [r for s in plan.segments for r in range(s.row, s.row + len(s.ref))]
    assert rows == list(range(len(plan.head), plan.n_entries))


@MANY
@given(pieces)
def test_pieces_in_any_order_take_every_position_once_and_in_order(many):
    plan = plan_prefix(many)
    spans = [p for p in many if isinstance(p, SpanRef)]
    assert plan.refs == tuple(spans)
    assert sorted([*plan.positions(), *plan.online_positions()]) == list(range(plan.length))
    # Which token stands where, by the plan and by going through the pieces.
    found = dict(zip(plan.online_positions(), plan.online_ids, strict=True))
    found |= {s.position + i: (s.ref, i) for s in plan.segments for i in range(len(s.ref))}
    found |= dict(enumerate(plan.head))
    expected = [
        token
        for p in many
        for token in (p.ids if isinstance(p, Text) else [(p, i) for i in range(len(p))])
    ]
    assert [found[i] for i in range(plan.length)] == expected


@MANY
@given(pieces)
def test_the_head_is_the_text_before_the_first_span_and_no_other(many):
    plan = plan_prefix(many)
    first = next((i for i, p in enumerate(many) if isinstance(p, SpanRef)), 0)
    assert plan.head == tuple(i for p in many[:first] for i in p.ids)
    assert plan.n_online == sum(len(p) for p in many[first:] if isinstance(p, Text))
    assert plan.n_entries == plan.length - plan.n_online


@MANY
@given(refs, heads)
def test_a_budget_is_kept_to_the_entry(many, head):
    needed = plan_prefix([head, *many]).n_rows
    assert plan_prefix([head, *many], max_entries=needed).n_rows == needed
    with pytest.raises(BudgetError):
        plan_prefix([head, *many], max_entries=needed - 1)


def test_the_budget_error_says_all_three_numbers():
    with pytest.raises(
        BudgetError, match=r"25 span entries and 7 tokens of other .* budget of 31: retrieve"
    ):
        plan_prefix([Text((1,) * 7), SpanRef(ChunkId("a"), 5, 30)], max_entries=31)


def test_no_spans_leave_the_text_to_be_computed():
    plan = plan_prefix([Text((7, 8)), Text(()), Text((9,))])
    assert (plan.head, plan.segments, plan.n_entries) == ((), (), 0)
    assert plan.online_ids == (7, 8, 9)
    assert plan.online_positions().tolist() == [0, 1, 2]
    assert plan.positions().tolist() == []


@MANY
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=6), st.integers(0, 9))
def test_with_gaps_the_last_positions_lie_left_of_the_question_and_distances_are_kept(parts, tail):
    segments, row, logical = [], 4, 4
    for length, gap in parts:
        logical += gap
        segments.append(Segment(ref=SpanRef(ChunkId("a"), 0, length), row=row, position=logical))
        row, logical = row + length, logical + length
    plan = PrefixPlan(
        head=(1,) * 4, segments=tuple(segments), online=(), n_entries=row, length=logical + tail
    )
    positions = plan.positions()
    # Distance from each entry to the question: the same by either ruler.
    logical_of_rows = [*range(4)]
    for s in segments:
        logical_of_rows += range(s.position, s.position + len(s.ref))
    assert (plan.n_rows - positions).tolist() == [plan.length - p for p in logical_of_rows]
    assert positions.max() <= plan.n_rows - 1 - tail
