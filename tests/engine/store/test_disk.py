"""A store never takes more than its cap on disk; what was not used for longest goes first."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.store import Catalog, Disk, KVStore, Limits, scope_folder
from coinrag_integrations.errors import ChunkNotFoundError, ConfigError, StoreError
from coinrag_integrations.types import Chunk, ChunkId, Scope, SpanRef
from tests.engine.store.parts import (
    chunk_id,
    in_another_process,
    make_kv,
    open_scoped,
    read,
    whole,
)

KB = 1024
N = 1000  # tokens of a chunk of 76 KB
A, B = Scope(tenant="a"), Scope(tenant="b")


def used(folder: Path) -> int:
    """Bytes on disk, as `du` counts them."""
    paths = [folder, *folder.rglob("*")]
    return sum(path.lstat().st_blocks * 512 for path in paths)


def put(store: KVStore, name: object, n_tokens: int = N, *, seconds_ago: float = 0.0) -> ChunkId:
    """Store a chunk, as if it had been used for the last time so long ago."""
    it = chunk_id(name)
    store.put(it, make_kv(n_tokens), whole(n_tokens))
    was_used(store, it, seconds_ago)
    return it


def was_used(store: KVStore, it: ChunkId, seconds_ago: float) -> None:
    path = store.path(it)
    os.utime(path, ns=(time.time_ns() - int(seconds_ago * 1e9), path.stat().st_mtime_ns))


def size_on_disk(n_tokens: int = N) -> int:
    with tempfile.TemporaryDirectory() as folder, open_scoped(Disk(Path(folder))) as store:
        return store.path(put(store, "x", n_tokens)).stat().st_blocks * 512


def capped(folder: Path, n_chunks: float, scope: Scope | None = None, n_tokens: int = N) -> Disk:
    """A folder with room for so many chunks beside its folders, small files, and what stays free."""
    with open_scoped(Disk(folder), scope) as store:
        for name in range(20):
            store.path(chunk_id(name)).parent.mkdir(exist_ok=True)
    room = 24 * KB + n_chunks * size_on_disk(n_tokens)
    return Disk(folder, Limits(max_bytes=int((used(folder) + room) / 0.95) + 1))


def pin(disk: Disk, scope: Scope, chunk_ids: Iterable[ChunkId]) -> None:
    """One pinned document that consists of these chunks."""
    with Catalog(scope_folder(disk.root, scope) / "catalog.sqlite") as catalog:
        catalog.begin_document("d", "0", [_chunk(it, i) for i, it in enumerate(chunk_ids)])
        catalog.finish_document("d", "0")
        catalog.pin(["d"])


def _chunk(it: ChunkId, index: int) -> Chunk:
    return Chunk(
        chunk_id=it,
        document_id="d",
        index=index,
        text="x",
        char_start=0,
        token_ids=(1,),
        offsets=((0, 1),),
    )


# -- caps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0, -1])
def test_caps_of_nothing_are_refused(cap):
    with pytest.raises(ConfigError, match=f"the cap max_bytes is {cap} bytes"):
        Limits(max_bytes=cap)
    with pytest.raises(ConfigError, match=f"the cap t is {cap} bytes"):
        Limits(tenant_bytes={"t": cap})
    assert not Limits()
    assert Limits(max_bytes=1)
    assert Limits(tenant_bytes={"t": 1})


def test_what_is_used_is_what_du_counts_also_by_tenant(tmp_path):
    disk = Disk(tmp_path)
    for scope in (A, B, Scope(tenant="a", collection="other")):
        with open_scoped(disk, scope) as store:
            put(store, "x", 300)
    (tmp_path / "store.json").write_text("x" * 10_000)
    usage = disk.usage()
    assert usage[""] == used(tmp_path)
    for tenant in ("a", "b"):
        assert usage[tenant] == used(tmp_path / "tenants" / tenant)
    assert usage.keys() == {"", "a", "b"}


@settings(deadline=None, max_examples=20)
@given(
    cap=st.integers(250 * KB, 500 * KB),
    puts=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 1000)), min_size=5, max_size=20),
)
def test_a_store_never_takes_more_than_its_cap_and_holds_what_was_put_last(cap, puts):
    with tempfile.TemporaryDirectory() as name:
        disk = Disk(Path(name), Limits(max_bytes=cap))
        with open_scoped(disk) as store, disk.writing():
            for number, n_tokens in puts:
                put(store, number, n_tokens)
                assert used(disk.root) <= cap
                assert disk.usage()[""] == used(disk.root)
                it = SpanRef(chunk_id(number), 0, n_tokens)
                assert torch.equal(read(store, it), make_kv(n_tokens))


@settings(deadline=None, max_examples=15)
@given(
    caps=st.tuples(st.integers(120 * KB, 250 * KB), st.integers(300 * KB, 600 * KB)),
    puts=st.lists(
        st.tuples(st.sampled_from([A, B]), st.integers(0, 3), st.integers(1, 400)),
        min_size=5,
        max_size=20,
    ),
)
def test_neither_a_tenant_nor_all_of_them_take_more_than_their_caps(caps, puts):
    ours, everybodys = caps
    with tempfile.TemporaryDirectory() as name:
        disk = Disk(Path(name), Limits(max_bytes=everybodys, tenant_bytes={"a": ours}))
        with open_scoped(disk, A) as a, open_scoped(disk, B) as b, disk.writing():
            for scope, number, n_tokens in puts:
                put(a if scope == A else b, number, n_tokens)
                assert used(disk.root) <= everybodys
                assert used(disk.root / "tenants" / "a") <= ours


def test_without_a_cap_nothing_is_ever_evicted(tmp_path):
    with open_scoped(Disk(tmp_path)) as store, store.disk.writing():
        ids = [put(store, i, 300, seconds_ago=9999) for i in range(20)]
        assert sorted(ids) == list(store)
        assert store.disk.enforce() == 0


# -- who goes ----------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    disk = capped(tmp_path, 3)
    with open_scoped(disk) as store, disk.writing():
        a, b, c = (put(store, i, seconds_ago=s) for i, s in enumerate((100, 300, 200)))
        d = put(store, 3)
        assert set(store) == {a, c, d}
        e = put(store, 4)
        assert set(store) == {a, d, e}
        assert b not in store


@pytest.mark.parametrize("how", ["read", "header", "verify"])
def test_using_a_chunk_keeps_it(tmp_path, how):
    disk = capped(tmp_path, 3)
    with open_scoped(disk) as store, disk.writing():
        a, b, c = (put(store, i, seconds_ago=s) for i, s in enumerate((300, 200, 100)))
        written = store.path(a).stat().st_mtime_ns
        if how == "read":
            read(store, SpanRef(a, 5, 6))
        else:
            getattr(store, how)(a)
        assert store.path(a).stat().st_mtime_ns == written
        d = put(store, 3)
        assert set(store) == {a, c, d}
        assert b not in store


def test_using_a_chunk_from_memory_keeps_it_too(tmp_path):
    disk = capped(tmp_path, 3)
    with open_scoped(disk) as plain:
        store = KVStore(
            plain.root, plain.layout, plain.fingerprint, disk=disk, memory_bytes=1 << 20
        )
    with store, disk.writing():
        a, _, c = (put(store, i) for i in range(3))
        read(store, SpanRef(a, 0, N))
        for i, it in enumerate((a, chunk_id(1), c)):
            was_used(store, it, 300 - i)
        read(store, SpanRef(a, 0, N))
        d = put(store, 3)
        assert set(store) == {a, c, d}


def test_chunks_of_pinned_documents_stay(tmp_path):
    pin(capped(tmp_path, 0), Scope(), [chunk_id(0)])
    disk = capped(tmp_path, 3)
    with open_scoped(disk) as store, disk.writing():
        a, b, c = (put(store, i, seconds_ago=s) for i, s in enumerate((300, 200, 100)))
        d = put(store, 3, seconds_ago=50)
        assert set(store) == {a, c, d}
        assert b not in store
        with Catalog(scope_folder(tmp_path, Scope()) / "catalog.sqlite") as catalog:
            catalog.pin(["d"], pinned=False)
        e = put(store, 4)
        assert set(store) == {c, d, e}


def test_where_everything_is_pinned_there_is_no_room_and_nothing_is_left_behind(tmp_path):
    disk = capped(tmp_path, 3)
    with open_scoped(disk) as store, disk.writing():
        ids = [put(store, i, seconds_ago=100) for i in range(2)]
    pin(disk, Scope(), ids)
    disk = Disk(tmp_path, Limits(max_bytes=used(tmp_path) + KB))
    with open_scoped(disk) as store, disk.writing():
        before = sorted(tmp_path.rglob("*.safetensors"))
        with pytest.raises(StoreError, match=r"leaves no room .*texts, the index and pinned KV"):
            put(store, 5)
        assert sorted(tmp_path.rglob("*.safetensors")) == before
        assert not list(tmp_path.rglob("*.tmp"))
        for it in ids:
            assert torch.equal(read(store, SpanRef(it, 0, N)), make_kv(N))


def test_pins_of_every_collection_count(tmp_path):
    other = Scope(collection="other")
    for scope in (Scope(), other):
        with open_scoped(Disk(tmp_path), scope) as store:
            put(store, "x", seconds_ago=500)
            pin(store.disk, scope, [chunk_id("x")])
    disk = capped(tmp_path, 1)
    with open_scoped(disk) as store, open_scoped(disk, other) as theirs, disk.writing():
        for i in range(4):
            put(store, i, seconds_ago=100 - i)
        assert chunk_id("x") in store
        assert chunk_id("x") in theirs
        assert len(list(store)) < 5


def test_a_tenant_at_its_cap_evicts_its_own_and_nobody_elses(tmp_path):
    with open_scoped(Disk(tmp_path), B) as theirs:
        old = [put(theirs, i, seconds_ago=9999) for i in range(5)]
    capped(tmp_path, 0, A)
    cap = used(tmp_path / "tenants" / "a") + 300 * KB
    disk = Disk(tmp_path, Limits(tenant_bytes={"a": int(cap / 0.95) + 1}))
    with open_scoped(disk, A) as ours, open_scoped(disk, B) as theirs, disk.writing():
        for i in range(12):
            put(ours, i, seconds_ago=12 - i)
        assert 0 < len(list(ours)) < 12
        assert chunk_id(11) in ours
        put(theirs, 5)
        assert list(theirs) == sorted([*old, chunk_id(5)])


def test_the_cap_of_the_whole_store_evicts_whatever_was_not_used_whose_ever_it_is(tmp_path):
    disk = capped(tmp_path, 5, A)
    with open_scoped(disk, A) as ours, open_scoped(disk, B) as theirs, disk.writing():
        ids = [put(theirs, i, seconds_ago=100) for i in range(2)]
        for i in range(6):
            put(ours, i, seconds_ago=50 - i)
        assert not any(it in theirs for it in ids)


@pytest.mark.parametrize("kind", ["whole", "tenant"])
def test_a_cap_that_is_too_small_is_an_error_that_says_what_is_in_the_way(tmp_path, kind):
    limits = Limits(max_bytes=50 * KB) if kind == "whole" else Limits(tenant_bytes={"a": 50 * KB})
    disk = Disk(tmp_path, limits)
    with open_scoped(disk, A) as store, disk.writing():
        with pytest.raises(StoreError) as caught:
            put(store, "x", 2000)
        assert list(store) == []
        assert not list(tmp_path.rglob("*.tmp"))
    whose = f"of the store {tmp_path}" if kind == "whole" else "of tenant 'a'"
    assert f"the cap {whose}, {50 * KB:,} bytes, leaves no room for" in str(caught.value)
    assert "Raise the cap, unpin or delete documents" in str(caught.value)


def test_a_cap_that_was_lowered_is_enforced_when_that_is_asked_for(tmp_path):
    with open_scoped(Disk(tmp_path)) as store:
        ids = [put(store, i, seconds_ago=100 - i) for i in range(10)]
        disk = Disk(tmp_path, Limits(max_bytes=used(tmp_path) // 2))
        with disk.writing():
            before = used(tmp_path)
            assert disk.enforce() == before - used(tmp_path)
        assert used(tmp_path) <= before // 2
        left = [it in store for it in ids]
        assert left == sorted(left)
        assert any(left)


def test_the_caps_of_tenants_are_enforced_too(tmp_path):
    with open_scoped(Disk(tmp_path), A) as ours, open_scoped(Disk(tmp_path), B) as theirs:
        mine = [put(ours, i, seconds_ago=100 - i) for i in range(6)]
        other = [put(theirs, i, seconds_ago=999) for i in range(6)]
        cap = used(tmp_path / "tenants" / "a") // 2
        disk = Disk(tmp_path, Limits(max_bytes=1 << 30, tenant_bytes={"a": cap}))
        with disk.writing():
            assert disk.enforce() > 0
        assert used(tmp_path / "tenants" / "a") <= cap
        assert 0 < len(list(ours)) < len(mine)
        assert list(theirs) == sorted(other)


def test_a_chunk_for_which_no_eviction_makes_room_evicts_nothing(tmp_path):
    disk = capped(tmp_path, 3)
    with open_scoped(disk) as store, disk.writing():
        ids = [put(store, i, seconds_ago=100) for i in range(3)]
        with pytest.raises(StoreError, match="leaves no room"):
            put(store, 3, 20 * N)
        assert sorted(ids) == list(store)


def test_two_writers_are_not_given_the_same_room(tmp_path):
    """As in an ingestion, which writes two chunks at a time."""
    disk = capped(tmp_path, 3)
    with open_scoped(disk) as store, disk.writing():
        ids = [put(store, i, seconds_ago=100) for i in range(3)]
        ours = disk.room(Scope().tenant, size_on_disk())
        with ours, disk.room(Scope().tenant, size_on_disk()):  # each for one that is being written
            assert sum(it in store for it in ids) <= 1


# -- other processes ---------------------------------------------------------------------------


def _fill(root: Path, max_bytes: int | None, first: int, n: int) -> None:
    disk = Disk(root, Limits(max_bytes=max_bytes))
    with open_scoped(disk) as store, disk.writing():
        for i in range(first, first + n):
            put(store, i)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_what_another_process_evicted_is_not_found(tmp_path, memory_bytes):
    disk = capped(tmp_path, 3)
    with open_scoped(disk) as plain:
        it = put(plain, 0, seconds_ago=100)
        store = KVStore(
            plain.root, plain.layout, plain.fingerprint, disk=disk, memory_bytes=memory_bytes
        )
    with store:
        assert torch.equal(read(store, SpanRef(it, 0, N)), make_kv(N))
        was_used(store, it, 100)
        in_another_process(_fill, tmp_path, disk.limits.max_bytes, 1, 3)
        with pytest.raises(ChunkNotFoundError):
            read(store, SpanRef(it, 0, 100))
        assert torch.equal(read(store, SpanRef(chunk_id(3), 0, N)), make_kv(N))


@pytest.mark.parametrize("theirs", ["the same cap", "no cap"])
@pytest.mark.parametrize("who", ["another process", "another object"])
def test_what_others_wrote_is_counted(tmp_path, who, theirs):
    """A count is good for a twentieth of the cap: all of it may be gone when we write again."""
    cap = 4000 * KB
    disk, promised = Disk(tmp_path, Limits(max_bytes=cap)), cap - cap // 20
    with open_scoped(disk) as store:
        with disk.writing():
            put(store, 0)
        n = (promised - used(tmp_path)) // (size_on_disk() + 4 * KB)
        work = (tmp_path, cap if theirs == "the same cap" else None, 1, n)
        if who == "another process":
            in_another_process(_fill, *work)
        else:
            _fill(*work)
        with disk.writing():
            for i in range(n + 1, n + 5):
                put(store, i)
                assert used(tmp_path) <= promised


def _read_as_nobody(root: Path, cap: int) -> list[object]:
    os.setuid(65534)
    with open_scoped(Disk(root, Limits(max_bytes=cap))) as store:
        return read(store, SpanRef(chunk_id(0), 0, 2)).tolist()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_reader_without_the_right_to_note_what_it_uses_reads_all_the_same():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        root = Path(name, "store")
        with open_scoped(Disk(root)) as store:
            put(store, 0, seconds_ago=1000)
        found = in_another_process(_read_as_nobody, root, 1 << 30)
    assert found == make_kv(N)[:2].tolist()
