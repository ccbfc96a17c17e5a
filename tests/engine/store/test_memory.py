"""Spans in memory: never more than so many bytes, the least recently used go, none outlives its file."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.store import CODECS, KVStore
from coinrag_integrations.engine.store.memory import Kept, MemoryTier
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError
from coinrag_integrations.types import Span, SpanRef
from tests.engine.store.parts import (
    LAYOUT,
    chunk_id,
    in_another_process,
    make_kv,
    n_disk,
    n_memory,
    open_store,
    poisoned,
    read,
    rows_of_span,
    same_bytes,
    whole,
)

ID = chunk_id("a")
FILE, REPLACED = (1, 2, 3), (1, 2, 4)
ENTRY = LAYOUT.bytes_per_entry
REFS = [
    SpanRef(chunk_id(name), start, stop)
    for name in "abc"
    for start, stop in ((0, 1), (0, 4), (2, 9))
]


def kept(ref: SpanRef, identity=FILE) -> Kept:
    parts = {"kv": torch.full(LAYOUT.staged(len(ref)), float(ref.start))}
    return Kept(parts=parts, stored=slice(ref.start, ref.stop), identity=identity)


def put(tier: MemoryTier, ref: SpanRef, identity=FILE) -> None:
    tier.put(ref, kept(ref, identity))


# -- the tier alone ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(
    cap=st.integers(0, 30),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from(REFS)),
            st.tuples(st.just("get"), st.sampled_from(REFS)),
            st.tuples(st.just("drop"), st.sampled_from(REFS)),
            st.tuples(st.just("replaced"), st.sampled_from(REFS)),
        ),
        max_size=40,
    ),
)
def test_what_is_kept_is_what_was_used_last_and_fits(cap, steps):
    tier = MemoryTier(max_bytes=cap * ENTRY)
    expected: OrderedDict[SpanRef, int] = OrderedDict()

    def forget(ref: SpanRef) -> None:
        for other in [r for r in expected if r.chunk_id == ref.chunk_id]:
            del expected[other]

    for step, ref in steps:
        if step == "put":
            put(tier, ref)
            if len(ref) <= cap:
                expected.pop(ref, None)
                expected[ref] = len(ref)
                while sum(expected.values()) > cap:
                    expected.popitem(last=False)
        elif step == "get":
            assert (tier.get(ref, FILE) is not None) == (ref in expected)
            if ref in expected:
                expected.move_to_end(ref)
        elif step == "drop":
            tier.drop(ref.chunk_id)
            forget(ref)
        else:
            assert tier.get(ref, REPLACED) is None
            if ref in expected:
                forget(ref)
        assert tier.n_bytes == ENTRY * sum(expected.values()) <= cap * ENTRY
    for ref in expected:
        found = tier.get(ref, FILE)
        assert found is not None
        assert same_bytes(found.parts["kv"], kept(ref).parts["kv"])


def test_threads_that_share_a_tier_find_what_was_put_and_never_fill_it_beyond_its_cap():
    tier = MemoryTier(max_bytes=20 * ENTRY)
    wrong: list[object] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(2000):
            ref = choose.choice(REFS)
            if choose.random() < 0.1:
                tier.drop(ref.chunk_id)
            elif (found := tier.get(ref, FILE)) is None:
                put(tier, ref)
            elif found.stored != slice(ref.start, ref.stop):
                wrong.append(found)
            if tier.n_bytes > tier.max_bytes + 9 * ENTRY:  # one that is being put may not fit yet
                wrong.append(tier.n_bytes)

    run_all([threading.Thread(target=work, args=(seed,)) for seed in range(6)])
    assert wrong == []
    assert tier.n_bytes <= tier.max_bytes
    left = sum(len(ref) for ref in REFS if tier.get(ref, FILE) is not None)
    assert tier.n_bytes == left * ENTRY
    for ref in REFS:
        tier.drop(ref.chunk_id)
    assert tier.n_bytes == 0


def run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- in front of a store -----------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    """Three chunks of twenty tokens, and memory for forty entries."""
    with open_store(tmp_path, memory_bytes=40 * ENTRY) as it:
        for seed, name in enumerate("abc"):
            it.put(chunk_id(name), make_kv(20, seed=seed), whole(20))
        yield it


def from_memory(store: KVStore, *refs: SpanRef) -> list[bool]:
    """Of each span whether it was found in memory; all of them are read."""
    report = store.read(poisoned(store, refs))
    assert report.errors == {}
    assert n_disk(report) + n_memory(report) == sum(map(len, refs)) * ENTRY
    return [index in report.memory for index in range(len(refs))]


def test_a_span_is_read_from_disk_once(store):
    ref = SpanRef(ID, 3, 9)
    assert from_memory(store, ref) == [False]
    assert from_memory(store, ref, SpanRef(ID, 3, 8)) == [True, False]
    assert torch.equal(read(store, ref), make_kv(20)[3:9])
    with open_store(store.root) as without:
        assert [from_memory(without, ref) for _ in range(2)] == [[False]] * 2


def test_the_span_that_was_not_used_for_longest_goes_first(store):
    a, b, c = (SpanRef(chunk_id(name), 0, 20) for name in "abc")
    assert from_memory(store, a) == from_memory(store, b) == [False]
    assert from_memory(store, a) == [True]
    assert from_memory(store, c) == [False]
    assert from_memory(store, a, c) == [True, True]
    assert from_memory(store, b) == [False]


def test_a_span_larger_than_all_memory_is_read_and_not_kept(tmp_path):
    with open_store(tmp_path, memory_bytes=19 * ENTRY) as store:
        store.put(ID, make_kv(20), whole(20))
        for _ in range(2):
            assert from_memory(store, SpanRef(ID, 0, 20)) == [False]
        assert from_memory(store, SpanRef(ID, 0, 19)) == [False]
        assert from_memory(store, SpanRef(ID, 0, 20)) == [False]
        assert from_memory(store, SpanRef(ID, 0, 19)) == [True]


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_stage_filled_from_memory_is_the_stage_read_from_disk(codec, data, tmp_path_factory):
    n = 200
    spans = st.integers(0, n - 1).flatmap(
        lambda a: st.integers(a + 1, n).map(lambda b: SpanRef(ID, a, b))
    )
    with open_store(tmp_path_factory.mktemp("kv"), codec=codec, memory_bytes=1 << 20) as store:
        store.put(ID, make_kv(n), whole(n))
        refs = data.draw(st.lists(spans, min_size=1, max_size=4, unique=True))
        stages = [poisoned(store, refs) for _ in range(2)]
        reports = [store.read(stage) for stage in stages]
        assert n_disk(reports[0]) == n_memory(reports[1]) > 0
        assert n_memory(reports[0]) == n_disk(reports[1]) == 0
        assert reports[0].disk == reports[1].memory
        # In another order, among others: a span's rows are its own wherever they lie.
        order = data.draw(st.permutations(range(len(refs))))
        turned = poisoned(store, [refs[i] for i in order])
        assert n_disk(store.read(turned)) == 0
        for place, index in enumerate(order):
            wanted = rows_of_span(stages[0], index)
            for found in (rows_of_span(stages[1], index), rows_of_span(turned, place)):
                assert all(same_bytes(found[name], wanted[name]) for name in wanted)
        assert torch.equal(stages[0].key_group, stages[1].key_group)


def test_only_what_was_verified_is_kept(store):
    path = store.path(ID)
    data = bytearray(path.read_bytes())
    data[store.header(ID).parts["kv"].offset + 4 * ENTRY] ^= 1
    path.write_bytes(bytes(data))
    for _ in range(2):
        report = store.read(poisoned(store, [SpanRef(ID, 0, 3), SpanRef(ID, 3, 6)]))
        assert {i: type(e) for i, e in report.errors.items()} == {1: CorruptChunkError}
    assert from_memory(store, SpanRef(ID, 0, 3)) == [True]


@pytest.mark.parametrize("by", ["this store", "another store", "another process"])
def test_a_file_that_was_replaced_is_not_served_from_memory(store, by):
    ref = SpanRef(ID, 2, 9)
    assert from_memory(store, ref) == [False]
    if by == "this store":
        store.put(ID, make_kv(20, seed=7), whole(20))
    elif by == "another store":
        _replace(store.root)
    else:
        in_another_process(_replace, store.root)
    assert torch.equal(read(store, ref), make_kv(20, seed=7)[2:9])
    assert from_memory(store, ref) == [True]


def _replace(root) -> None:
    with open_store(root) as store:
        store.put(ID, make_kv(20, seed=7), whole(20))


@pytest.mark.parametrize("by", ["this store", "another store", "another process"])
def test_a_file_that_was_deleted_is_not_served_from_memory(store, by):
    assert from_memory(store, SpanRef(ID, 2, 9)) == [False]
    if by == "this store":
        store.delete(ID)
    elif by == "another store":
        _delete(store.root)
    else:
        in_another_process(_delete, store.root)
    with pytest.raises(ChunkNotFoundError):
        read(store, SpanRef(ID, 2, 9))


def _delete(root) -> None:
    with open_store(root) as store:
        assert store.delete(ID)


def test_tokens_that_are_no_longer_covered_are_not_served_from_memory(store):
    assert from_memory(store, SpanRef(ID, 2, 9)) == [False]
    store.put(ID, make_kv(20), [Span(0, 5)])
    with pytest.raises(ChunkNotFoundError, match="not stored"):
        read(store, SpanRef(ID, 2, 9))


def test_what_is_read_may_be_written_over_without_changing_what_is_kept(store):
    stage = poisoned(store, [SpanRef(ID, 0, 20)])
    store.read(stage)
    stage.tensors["kv"].zero_()
    assert torch.equal(read(store, SpanRef(ID, 0, 20)), make_kv(20))
    assert from_memory(store, SpanRef(ID, 0, 20)) == [True]


def test_threads_reading_through_memory_beside_a_writer_get_one_version_or_the_other(store):
    versions = [make_kv(20, seed=seed) for seed in (0, 9)]
    refs = [SpanRef(ID, a, b) for a, b in ((0, 20), (3, 9), (5, 6), (10, 20))]
    wrong: list[object] = []
    done = threading.Event()

    def work(seed: int) -> None:
        choose = random.Random(seed)
        while not done.is_set():
            ref = choose.choice(refs)
            stage = poisoned(store, [ref])
            errors = store.read(stage).errors
            found = stage.tensors["kv"]
            if errors or not any(torch.equal(found, kv[ref.start : ref.stop]) for kv in versions):
                wrong.append(errors or ref)

    readers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for reader in readers:
        reader.start()
    for i in range(30):
        store.put(ID, versions[i % 2], whole(20))
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    for ref in refs:
        assert torch.equal(read(store, ref), versions[1][ref.start : ref.stop])
