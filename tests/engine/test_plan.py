"""Laws of arithmetic: nothing is lost, nothing doubled, no gaps, and order is as promised."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.plan import PrefixPlan, Segment, arrange, merge, plan_prefix
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


@MANY
@given(refs, st.integers(0, 30))
def test_positions_are_contiguous_and_end_right_before_the_question(many, n_prompt):
    plan = plan_prefix(many, n_prompt=n_prompt)
    assert plan.positions().tolist() == list(range(plan.n_entries))
    assert plan.length == plan.n_entries == n_prompt + len(tokens(many))
    assert plan.n_entries - plan.n_prompt == len(tokens(many))
    rows = [r for s in plan.segments for r in range(s.row, s.row + len(s.ref))]
    assert rows == list(range(n_prompt, plan.n_entries))


@MANY
@given(refs, st.integers(0, 30))
def test_a_budget_is_kept_to_the_entry(many, n_prompt):
    needed = plan_prefix(many, n_prompt=n_prompt).n_entries
    assert plan_prefix(many, n_prompt=n_prompt, max_entries=needed).n_entries == needed
    with pytest.raises(BudgetError):
        plan_prefix(many, n_prompt=n_prompt, max_entries=needed - 1)


def test_the_budget_error_says_all_three_numbers():
    with pytest.raises(
        BudgetError, match=r"25 span entries and 7 prompt .* budget of 31: retrieve"
    ):
        plan_prefix([SpanRef(ChunkId("a"), 5, 30)], n_prompt=7, max_entries=31)


def test_no_spans_leave_the_prompt_alone():
    plan = plan_prefix([], n_prompt=3)
    assert (plan.segments, plan.n_entries, plan.positions().tolist()) == ((), 3, [0, 1, 2])


@MANY
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=6), st.integers(0, 9))
def test_with_gaps_the_last_positions_lie_left_of_the_question_and_distances_are_kept(parts, tail):
    n_prompt, segments, row, logical = 4, [], 4, 4
    for length, gap in parts:
        logical += gap
        segments.append(Segment(ref=SpanRef(ChunkId("a"), 0, length), row=row, position=logical))
        row, logical = row + length, logical + length
    plan = PrefixPlan(
        n_prompt=n_prompt, segments=tuple(segments), n_entries=row, length=logical + tail
    )
    positions = plan.positions()
    # Distance from each entry to the question: the same by either ruler.
    logical_of_rows = [*range(n_prompt)]
    for s in segments:
        logical_of_rows += range(s.position, s.position + len(s.ref))
    assert (plan.n_entries - positions).tolist() == [plan.length - p for p in logical_of_rows]
    assert positions.max() <= plan.n_entries - 1 - tail
