"""A store gives back the bytes it was given, verified, or says why not."""

from __future__ import annotations

import os
import random
import resource
import signal
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    FingerprintMismatchError,
    StoreError,
)
from coinrag_integrations.files import sweep
from coinrag_integrations.types import ChunkId, Span, SpanRef
from tests.engine.store.parts import (
    LAYOUT,
    PROCESSES,
    chunk_id,
    in_another_process,
    make_kv,
    n_disk,
    open_store,
    poisoned,
    read,
    same_bytes,
    whole,
)

ID = chunk_id("a")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FEW = settings(deadline=None, max_examples=40)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "kv") as it:
        yield it


def layout_of(dtype: torch.dtype) -> KVLayout:
    return KVLayout(n_layers=2, n_kv_heads=3, head_dim=8, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_gives_the_same_bytes(tmp_path, dtype):
    layout = layout_of(dtype)
    kv = make_kv(9, layout)
    kv.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    with open_store(tmp_path, layout) as store:
        store.put(ID, kv, whole(9))
        assert same_bytes(read(store, SpanRef(ID, 0, 9)), kv)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@FEW
@given(data=st.data())
def test_a_slice_of_what_is_read_is_what_reading_the_slice_gives(dtype, data, tmp_path_factory):
    layout, n = layout_of(dtype), data.draw(st.integers(1, 30))
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    with open_store(tmp_path_factory.mktemp("kv"), layout) as store:
        store.put(ID, make_kv(n, layout), whole(n))
        part, everything = read(store, SpanRef(ID, start, stop)), read(store, SpanRef(ID, 0, n))
    assert same_bytes(part, everything[start:stop])


@FEW
@given(data=st.data())
def test_reading_a_span_touches_only_its_bytes(data, tmp_path_factory):
    n = data.draw(st.integers(2, 20))
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    kv = make_kv(n)
    with open_store(tmp_path_factory.mktemp("kv")) as store:
        store.put(ID, kv, whole(n))
        offset, size = store_offset(store), LAYOUT.bytes_per_entry
        with store.path(ID).open("r+b") as file:
            for token in range(n):
                if not start <= token < stop:
                    file.seek(offset + token * size)
                    damaged = bytes(255 - b for b in file.read(size))
                    file.seek(offset + token * size)
                    file.write(damaged)
        assert torch.equal(read(store, SpanRef(ID, start, stop)), kv[start:stop])
        for token in range(n):
            if not start <= token < stop:
                with pytest.raises(CorruptChunkError):
                    read(store, SpanRef(ID, token, token + 1))


def store_offset(store) -> int:
    return store.header(ID).parts["kv"].offset


@FEW
@given(
    refs=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 10), st.integers(1, 10)), max_size=12
    )
)
def test_spans_lie_one_behind_the_other_in_the_order_asked_for(refs, shared_store):
    store, kvs = shared_store
    spans = [SpanRef(chunk_id(name), start, start + n) for name, start, n in refs]
    expected = [kvs[name][start : start + n] for name, start, n in refs]
    assert torch.equal(read(store, *spans), torch.cat([make_kv(0), *expected]))


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    kvs = {name: make_kv(20, seed=seed) for seed, name in enumerate("abc")}
    with open_store(tmp_path_factory.mktemp("kv")) as store:
        for name, kv in kvs.items():
            store.put(chunk_id(name), kv, whole(20))
        yield store, kvs


def test_eight_threads_reading_random_spans_get_the_right_bytes(shared_store):
    store, kvs = shared_store
    wrong: list[str] = []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(50):
            spans, expected = [], []
            for _ in range(choose.randint(1, 5)):
                name, start = choose.choice("abc"), choose.randrange(20)
                stop = choose.randint(start + 1, 20)
                spans.append(SpanRef(chunk_id(name), start, stop))
                expected.append(kvs[name][start:stop])
            if not torch.equal(read(store, *spans), torch.cat(expected)):
                wrong.append(str(spans))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_readers_beside_a_writer_get_one_version_or_the_other(store):
    versions = [make_kv(20, seed=seed) for seed in range(2)]
    store.put(ID, versions[0], whole(20))
    wrong: list[str] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            stage = poisoned(store, [SpanRef(ID, 0, 20)])
            errors = store.read(stage).errors
            if errors or not any(torch.equal(stage.tensors["kv"], kv) for kv in versions):
                wrong.append(str(errors))

    readers = [threading.Thread(target=work) for _ in range(3)]
    for reader in readers:
        reader.start()
    for i in range(30):
        store.put(ID, versions[i % 2], whole(20))
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_only_covered_tokens_are_stored_and_found(store):
    kv = make_kv(20)
    store.put(ID, kv, [Span(2, 5), Span(9, 14)])
    assert torch.equal(read(store, SpanRef(ID, 2, 5)), kv[2:5])
    assert torch.equal(read(store, SpanRef(ID, 10, 14)), kv[10:14])
    assert store.header(ID).ranges == (Span(2, 5), Span(9, 14))
    assert store.header(ID).n_tokens == 20
    for outside in (SpanRef(ID, 4, 6), SpanRef(ID, 0, 1), SpanRef(ID, 13, 15), SpanRef(ID, 2, 14)):
        with pytest.raises(ChunkNotFoundError, match="not stored"):
            read(store, outside)
    # 8 entries and a header, but not the other 12 entries.
    assert store.n_bytes() < 8 * LAYOUT.bytes_per_entry + 1000


@FEW
@given(token=st.integers(0, 9), byte=st.integers(0, LAYOUT.bytes_per_entry - 1))
def test_a_flipped_byte_is_found_in_that_token_and_only_that(token, byte, tmp_path_factory):
    kv = make_kv(10)
    with open_store(tmp_path_factory.mktemp("kv")) as store:
        store.put(ID, kv, whole(10))
        at = store_offset(store) + token * LAYOUT.bytes_per_entry + byte
        data = bytearray(store.path(ID).read_bytes())
        data[at] ^= 0x10
        store.path(ID).write_bytes(bytes(data))
        stage = poisoned(store, [SpanRef(ID, i, i + 1) for i in range(10)])
        errors = store.read(stage).errors
    assert list(errors) == [token]
    assert isinstance(errors[token], CorruptChunkError)
    rest = [i for i in range(10) if i != token]
    assert torch.equal(stage.tensors["kv"][rest], kv[rest])


def test_a_flipped_checksum_condemns_the_file(store):
    kv = make_kv(4)
    store.put(ID, kv, whole(4))
    data = bytearray(store.path(ID).read_bytes())
    checksums = store.header(ID).parts["kv"].checksums[2].tobytes()
    data[data.index(checksums)] ^= 1
    store.path(ID).write_bytes(bytes(data))
    with open_store(store.root) as fresh:
        report = fresh.read(poisoned(fresh, [SpanRef(ID, i, i + 1) for i in range(4)]))
    assert list(report.errors) == [0, 1, 2, 3]


def test_a_file_with_another_chunks_rows_and_their_checksums_is_not_believed(store):
    """Rows and checksums fit each other; the header knows that they are not its own."""
    files = {}
    for seed, name in enumerate("ab"):
        store.put(chunk_id(name), make_kv(4, seed=seed), whole(4))
        files[name] = store.path(chunk_id(name)).read_bytes()
    length = 8 + int.from_bytes(files["a"][:8], "little")
    assert len(files["a"]) == len(files["b"])
    store.path(chunk_id("a")).write_bytes(files["a"][:length] + files["b"][length:])
    refused = pytest.raises(CorruptChunkError, match="checksums are not its own")
    with open_store(store.root) as fresh, refused:
        fresh.header(chunk_id("a"))


def test_one_bad_chunk_does_not_spoil_the_others_when_threads_read(store, monkeypatch):
    monkeypatch.setattr("coinrag_integrations.engine.store.near._MUCH", 0)
    test_one_bad_chunk_does_not_spoil_the_others(store)


def test_one_bad_chunk_does_not_spoil_the_others(store):
    kvs = {name: make_kv(6, seed=seed) for seed, name in enumerate("abc")}
    for name, kv in kvs.items():
        store.put(chunk_id(name), kv, whole(6))
    store.path(chunk_id("b")).write_bytes(b"")
    stage = poisoned(store, [SpanRef(chunk_id(name), 1, 4) for name in "abcx"])
    report, out = store.read(stage), stage.tensors["kv"]
    errors = {index: type(error) for index, error in report.errors.items()}
    assert errors == {1: CorruptChunkError, 3: ChunkNotFoundError}
    assert n_disk(report) == 6 * LAYOUT.bytes_per_entry
    assert torch.equal(out[:3], kvs["a"][1:4])
    assert torch.equal(out[6:9], kvs["c"][1:4])


def test_a_missing_chunk_is_not_found(store):
    assert ID not in store
    with pytest.raises(ChunkNotFoundError, match=ID):
        read(store, SpanRef(ID, 0, 1))
    with pytest.raises(ChunkNotFoundError):
        store.header(ID)
    assert isinstance(ChunkNotFoundError("gone"), KeyError)
    assert str(ChunkNotFoundError("gone")) == "gone"


@pytest.mark.parametrize(
    "evil",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "",
        ".",
        "a" * 31,
        "a" * 33,
        "A" * 32,
        "a" * 32 + "\n",
        "a" * 31 + "\n",
        "\u0661" * 32,
        "aa/" + "a" * 29,
        "a" * 31 + "\0",
    ],
)
def test_ids_that_are_not_ours_are_refused_before_they_become_paths(store, evil):
    for use in (store.path, store.header, store.delete, store.__contains__):
        with pytest.raises(ChunkNotFoundError, match="not a chunk id"):
            use(ChunkId(evil))
    with pytest.raises(ChunkNotFoundError, match="not a chunk id"):
        store.put(ChunkId(evil), make_kv(1), whole(1))
    with pytest.raises(ChunkNotFoundError, match="not a chunk id"):
        read(store, SpanRef(ChunkId(evil), 0, 1))


def test_a_file_replaced_under_an_open_store_is_noticed(store):
    old, new = make_kv(5), make_kv(5, seed=1)
    store.put(ID, old, whole(5))
    assert torch.equal(read(store, SpanRef(ID, 0, 5)), old)
    with open_store(store.root) as other:
        other.put(ID, new, whole(5))
    assert torch.equal(read(store, SpanRef(ID, 0, 5)), new)
    with open_store(store.root) as other:
        other.put(ID, new, [Span(0, 2)])
    with pytest.raises(ChunkNotFoundError):
        read(store, SpanRef(ID, 2, 3))


def test_bytes_overwritten_in_place_are_noticed_even_if_the_files_times_are_kept(store):
    old, new = make_kv(5), make_kv(5, seed=1)
    store.put(ID, old, whole(5))
    read(store, SpanRef(ID, 0, 5))
    path, offset = store.path(ID), store_offset(store)
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(new.numpy().tobytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CorruptChunkError):
        read(store, SpanRef(ID, 0, 5))


def test_a_file_deleted_under_an_open_store_is_noticed(store):
    store.put(ID, make_kv(5), whole(5))
    read(store, SpanRef(ID, 0, 5))
    store.path(ID).unlink()
    with pytest.raises(ChunkNotFoundError):
        read(store, SpanRef(ID, 0, 5))


def test_putting_again_replaces_and_deleting_removes(store):
    store.put(ID, make_kv(5), whole(5))
    store.put(ID, make_kv(7, seed=3), [Span(1, 7)])
    assert torch.equal(read(store, SpanRef(ID, 1, 7)), make_kv(7, seed=3)[1:])
    assert list(store) == [ID]
    assert store.delete(ID)
    assert not store.delete(ID)
    assert list(store) == []
    assert store.n_bytes() == 0


def test_all_chunks_are_listed_also_by_another_store(store):
    ids = sorted(chunk_id(i) for i in range(20))
    for i in ids:
        store.put(i, make_kv(1), whole(1))
    with open_store(store.root) as other:
        assert list(other) == ids
        assert all(i in other for i in ids)


def test_only_the_spans_asked_for_are_read_and_those_left_out_are_not(store):
    kvs = {name: make_kv(6, seed=seed) for seed, name in enumerate("abc")}
    for name, kv in kvs.items():
        store.put(chunk_id(name), kv, whole(6))
    stage = poisoned(store, [SpanRef(chunk_id(name), 1, 4) for name in "abca"])
    report = store.read(stage, slice(1, 4), without={chunk_id("c")})
    assert (report.errors, n_disk(report)) == ({}, 6 * LAYOUT.bytes_per_entry)
    out = stage.tensors["kv"]
    assert out[:3].isnan().all()
    assert out[6:9].isnan().all()
    assert torch.equal(out[3:6], kvs["b"][1:4])
    assert torch.equal(out[9:], kvs["a"][1:4])
    assert store.read(poisoned(store, [])).errors == {}


def test_reads_that_were_started_give_what_reading_gives(store):
    for i in range(6):
        store.put(chunk_id(i), make_kv(6, seed=i), whole(6))
    stage = poisoned(store, [SpanRef(chunk_id(i), 0, 6) for i in range(6)])
    started = [store.start_read(stage, slice(i, i + 2)) for i in (0, 2, 4)]
    assert [future.result().errors for future in started] == [{}] * 3
    assert torch.equal(stage.tensors["kv"], torch.cat([make_kv(6, seed=i) for i in range(6)]))


def test_verifying_finds_what_reading_a_span_does_not_look_at(store):
    store.put(ID, make_kv(6), whole(6))
    assert store.verify(ID) == store.header(ID)
    data = bytearray(store.path(ID).read_bytes())
    data[store_offset(store) + 5 * LAYOUT.bytes_per_entry] ^= 1
    store.path(ID).write_bytes(bytes(data))
    assert torch.equal(read(store, SpanRef(ID, 0, 3)), make_kv(6)[:3])
    with pytest.raises(CorruptChunkError):
        store.verify(ID)
    with pytest.raises(ChunkNotFoundError):
        store.verify(chunk_id("b"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights", "other"),
        ("tokenizer", "other"),
        ("rope", "other"),
        ("dtype", "bfloat16"),
        ("context", "after_prompt:123"),
        ("codec", "int8"),
        ("extractor", "x"),
    ],
)
def test_a_store_of_another_fingerprint_is_refused_and_the_field_named(tmp_path, field, value):
    open_store(tmp_path).close()
    with pytest.raises(FingerprintMismatchError, match=rf"{field} is .*has {value}") as caught:
        open_store(tmp_path, **{field: value})
    others = {"weights", "tokenizer", "rope", "dtype", "context", "codec", "extractor"} - {field}
    assert not any(f"{other} is" in str(caught.value) for other in others)
    open_store(tmp_path).close()


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", '{"weights": "w"}', "\udcff"])
def test_an_unreadable_fingerprint_is_an_error_of_the_store(tmp_path, content):
    (tmp_path / "fingerprint.json").write_text(content, errors="surrogateescape")
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(tmp_path)


def test_a_chunk_written_for_another_fingerprint_is_refused(store, tmp_path):
    with open_store(tmp_path / "other", weights="other") as other:
        other.put(ID, make_kv(2), whole(2))
        store.put(ID, make_kv(2), whole(2))
        other.path(ID).replace(store.path(ID))
    with pytest.raises(CorruptChunkError, match="fingerprint"):
        read(store, SpanRef(ID, 0, 1))


def test_a_root_that_is_a_file_is_an_error_of_the_store(tmp_path):
    (tmp_path / "kv").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot open"):
        open_store(tmp_path / "kv")


def test_a_folder_in_the_place_of_a_chunk_is_an_error_of_the_store(store):
    store.path(ID).mkdir(parents=True)
    with pytest.raises(StoreError):
        read(store, SpanRef(ID, 0, 1))
    with pytest.raises(StoreError):
        store.put(ID, make_kv(1), whole(1))


def test_a_refused_write_is_an_error_of_the_store_and_leaves_nothing(store):
    store.path(ID).parent.write_text("a file where a folder should be")
    with pytest.raises(StoreError, match="cannot write"):
        store.put(ID, make_kv(1), whole(1))
    assert list(store) == []


def put_on_a_full_disk(root: Path) -> str:
    """The size limit of a process refuses a write half way, as a full disk does."""
    with open_store(root) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            store.put(ID, make_kv(900), whole(900))
        except StoreError as error:
            return str(error)
    return "nothing was refused"


def test_a_disk_without_space_keeps_the_old_file_and_leaves_nothing(store):
    store.put(ID, make_kv(3), whole(3))
    before = sorted(store.root.rglob("*"))
    refusal = in_another_process(put_on_a_full_disk, store.root)
    assert sorted(store.root.rglob("*")) == before
    assert torch.equal(read(store, SpanRef(ID, 0, 3)), make_kv(3))
    assert f"cannot write {store.path(ID)}" in refusal


def put_as_nobody(root: Path) -> list[str]:
    """What refuses a user without rights to put into an old folder, and into a new one."""
    refusals = []
    with open_store(root) as store:
        if os.geteuid() == 0:
            os.setuid(65534)
        for name in ("a", "b"):
            try:
                store.put(chunk_id(name), make_kv(2), whole(2))
            except StoreError as error:
                refusals.append(str(error))
    return refusals


def test_a_folder_without_permission_is_an_error_of_the_store():
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "kv")
        with open_store(root) as store:
            store.put(ID, make_kv(3), whole(3))
        for folder, mode in ((Path(name), 0o755), (store.path(ID).parent, 0o555), (root, 0o555)):
            folder.chmod(mode)
        try:
            refusals = in_another_process(put_as_nobody, root)
        finally:
            for folder in (root, store.path(ID).parent):
                folder.chmod(0o755)
        assert sorted(path.name for path in root.rglob("*.*")) == [
            f"{ID}.safetensors",
            "fingerprint.json",
        ]
    assert [refusal.split()[:2] for refusal in refusals] == [["cannot", "write"]] * 2


def put_for_ever(root: Path, told: Connection) -> None:
    with open_store(root) as store:
        for i in range(100_000):
            store.put(chunk_id(i % 50), make_kv(200, seed=i % 50), whole(200))
            told.send(i)


def test_a_writer_killed_in_the_middle_leaves_whole_files_and_crumbs_that_are_swept(tmp_path):
    open_store(tmp_path).close()
    ours, theirs = PROCESSES.Pipe(duplex=False)
    child = PROCESSES.Process(target=put_for_ever, args=(tmp_path, theirs))
    child.start()
    try:
        for _ in range(20):
            ours.recv()
    finally:
        child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    with open_store(tmp_path) as store:
        sweep(tmp_path)
        assert not list(tmp_path.rglob("*.tmp"))
        seeds = {chunk_id(seed): seed for seed in range(50)}
        stored = list(store)
        assert len(stored) >= 20
        for found in stored:
            expected = make_kv(200, seed=seeds[found])
            assert torch.equal(read(store, SpanRef(found, 0, 200)), expected)


def put_until_it_is_too_large(root: Path) -> None:
    """The system ends a process without a word once it has written so many bytes of a file."""
    with open_store(root) as store:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        store.put(ID, make_kv(900), whole(900))


def test_of_a_file_whose_writer_died_in_the_middle_of_it_nothing_is_left(store):
    store.put(chunk_id("b"), make_kv(3), whole(3))
    before = sorted(store.root.rglob("*.*"))
    child = PROCESSES.Process(target=put_until_it_is_too_large, args=(store.root,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGXFSZ
    assert ID not in store
    assert sorted(store.root.rglob("*.*")) != before
    assert sweep(store.root) == 1
    assert sorted(store.root.rglob("*.*")) == before


def test_a_chunk_may_be_read_by_whoever_may_read_its_folder(store):
    store.put(ID, make_kv(3), whole(3))
    path = store.path(ID)
    assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o666
    path.parent.chmod(0o700)
    store.put(ID, make_kv(3), whole(3))
    assert path.stat().st_mode & 0o777 == 0o600


def test_sweeping_removes_leftovers_and_nothing_else(store):
    store.put(ID, make_kv(2), whole(2))
    leftover = store.path(ID).with_name(f".{ID}.0123.tmp")
    leftover.write_bytes(b"half")
    assert list(store) == [ID]
    assert sweep(store.root) == 1
    assert not leftover.exists()
    assert sweep(store.root) == 0
    assert torch.equal(read(store, SpanRef(ID, 0, 2)), make_kv(2))


def test_more_chunks_than_headers_are_remembered_are_still_read(store, monkeypatch):
    monkeypatch.setattr("coinrag_integrations.engine.store.near._MAX_HEADERS", 3)
    for i in range(10):
        store.put(chunk_id(i), make_kv(2, seed=i), whole(2))
    for _ in range(2):
        for i in range(10):
            assert torch.equal(read(store, SpanRef(chunk_id(i), 0, 2)), make_kv(2, seed=i))
    assert len(store._near._headers) <= 3
