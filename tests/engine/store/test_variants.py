"""KV of several fingerprints side by side in one scope: each is opened, dropped and deleted alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coinrag_integrations.engine.store import Disk, KVStore, scope_folder
from coinrag_integrations.engine.store.disk import KV
from coinrag_integrations.engine.store.variants import (
    choose_variant,
    claim,
    delete_everywhere,
    drop_variant,
    sweep_variants,
    variants,
)
from coinrag_integrations.errors import ChunkNotFoundError, FingerprintMismatchError, StoreError
from coinrag_integrations.types import Scope, SpanRef
from tests.engine.store.parts import FINGERPRINT, chunk_id, make_kv, open_scoped, read, whole

SCOPE = Scope()
CODECS = ("none", "int8", "int4")
ID, OTHER = chunk_id("a"), chunk_id("b")


def fingerprint_of(codec: str):
    return replace(FINGERPRINT, codec=codec)


def name_of(codec: str) -> str:
    return fingerprint_of(codec).digest[:16]


@pytest.fixture
def disk(tmp_path) -> Disk:
    """A store with two chunks in each of three codecs."""
    disk = Disk(tmp_path)
    for codec in CODECS:
        with open_scoped(disk, codec=codec) as store:
            for seed, it in enumerate((ID, OTHER)):
                store.put(it, make_kv(9, seed=seed), whole(9))
    return disk


@pytest.fixture
def kv(disk) -> Path:
    return scope_folder(disk.root, SCOPE) / KV


def everything(store: KVStore) -> dict[str, list[object]]:
    return {it: read(store, SpanRef(it, 0, 9)).tolist() for it in store}


def contents(folder: Path) -> dict[Path, tuple[int, int, bytes]]:
    """Every file with its inode, time of change and bytes."""
    return {
        path: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_codecs_stand_side_by_side_and_each_reads_its_own(disk, kv):
    assert variants(kv) == {name_of(codec): fingerprint_of(codec) for codec in CODECS}
    with open_scoped(disk) as plain, open_scoped(disk, codec="int8") as coded:
        assert plain.path(ID) != coded.path(ID)
        exact, near = (read(store, SpanRef(ID, 0, 9)) for store in (plain, coded))
        assert torch.equal(exact, make_kv(9))
        assert not torch.equal(near, exact)
        torch.testing.assert_close(near, exact, rtol=0, atol=0.05)
        coded.delete(ID)
        assert ID in plain
        assert ID not in coded
        assert torch.equal(read(plain, SpanRef(ID, 0, 9)), exact)


def test_a_fingerprint_that_is_there_is_chosen_and_another_only_where_that_is_asked_for(kv, disk):
    before = contents(disk.root)
    for codec in CODECS:
        assert choose_variant(kv, fingerprint_of(codec)) == kv / name_of(codec)
    new = replace(FINGERPRINT, weights="other")
    with pytest.raises(FingerprintMismatchError):
        choose_variant(kv, new)
    assert choose_variant(kv, new, add=True) == kv / new.digest[:16]
    assert contents(disk.root) == before
    assert not (kv / new.digest[:16]).exists()


def test_the_first_fingerprint_of_a_store_need_not_be_added(tmp_path):
    assert choose_variant(tmp_path, FINGERPRINT) == tmp_path / FINGERPRINT.digest[:16]
    assert choose_variant(tmp_path / "nowhere", FINGERPRINT).parent == tmp_path / "nowhere"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"weights": "other"}, "weights is w, this engine has other"),
        ({"rope": "other", "codec": "int4"}, "rope is r, this engine has other"),
        ({"context": "after_prompt:1", "codec": "int8"}, "context is alone, this engine has after"),
    ],
)
def test_a_mismatch_names_the_field_that_differs_from_the_nearest(kv, changes, named):
    with pytest.raises(FingerprintMismatchError) as caught:
        choose_variant(kv, replace(FINGERPRINT, **changes))
    assert f"{named}" in str(caught.value)
    assert str(caught.value).count("this engine has") == 1
    assert "add_fingerprint=True" in str(caught.value)


def test_dropping_one_leaves_the_others_as_they_were(disk, kv):
    rest = {
        path: it for path, it in contents(disk.root).items() if name_of("int8") not in path.parts
    }
    drop_variant(kv, name_of("int8"), None, SCOPE)
    assert contents(disk.root) == rest
    assert variants(kv).keys() == {name_of("none"), name_of("int4")}
    with open_scoped(disk, codec="int8") as store:
        assert list(store) == []


@pytest.mark.parametrize("name", ["0" * 16, "", ".", "..", "../kv", "/", name_of("none")[:8]])
def test_what_is_no_fingerprint_is_not_dropped(disk, kv, name):
    before = contents(disk.root)
    with pytest.raises(StoreError, match="holds no fingerprint") as caught:
        drop_variant(kv, name, None, SCOPE)
    assert all(name_of(codec) in str(caught.value) for codec in CODECS)
    assert contents(disk.root) == before


class _Killed(BaseException):
    """What a process that dies does not survive."""


@pytest.fixture
def half_dropped(kv, monkeypatch) -> Path:
    """The folder of int8 after a process died dropping it: one of its two chunks is still there."""
    folder = kv / name_of("int8")
    remove = shutil.rmtree

    def die(path, *_: object, **__: object) -> None:
        remove(Path(path) / ID[:2])
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(_Killed):
            drop_variant(kv, name_of("int8"), None, SCOPE)
    assert [path.stem for path in folder.rglob("*.safetensors")] == [OTHER]
    return folder


def test_a_fingerprint_that_was_dropped_half_way_is_not_there(disk, kv, half_dropped):
    assert variants(kv).keys() == {name_of("none"), name_of("int4")}
    with pytest.raises(StoreError, match="holds no fingerprint"):
        drop_variant(kv, name_of("int8"), None, SCOPE)
    with pytest.raises(FingerprintMismatchError, match="codec is"):
        choose_variant(kv, fingerprint_of("int8"))
    for codec in ("none", "int4"):
        with open_scoped(disk, codec=codec) as store:
            assert everything(store).keys() == {ID, OTHER}


def test_what_is_left_of_it_is_swept_and_nothing_else(disk, kv, half_dropped):
    rest = {p: it for p, it in contents(disk.root).items() if half_dropped not in p.parents}
    sweep_variants(kv)
    assert not half_dropped.exists()
    assert contents(disk.root) == rest


def test_it_may_be_added_again_and_what_is_left_of_it_is_right_or_encoded_anew(disk, half_dropped):
    with open_scoped(disk, codec="int8") as store:
        assert list(store) == [OTHER]
        torch.testing.assert_close(
            read(store, SpanRef(OTHER, 0, 9)), make_kv(9, seed=1), rtol=0, atol=0.05
        )
        with pytest.raises(ChunkNotFoundError):
            read(store, SpanRef(ID, 0, 9))
        store.put(ID, make_kv(9), whole(9))
        assert everything(store).keys() == {ID, OTHER}


def test_a_chunk_is_deleted_from_all_of_them_and_only_that_chunk(disk, kv):
    before = contents(disk.root)
    delete_everywhere(kv, ID, None, SCOPE)
    gone = {path for path in before if path.stem == ID}
    assert len(gone) == len(CODECS)
    assert contents(disk.root) == {path: it for path, it in before.items() if path not in gone}
    delete_everywhere(kv, ID, None, SCOPE)
    delete_everywhere(kv / "nowhere", ID, None, SCOPE)


def test_a_chunk_is_deleted_from_one_scope_only(disk, kv):
    other = Scope(tenant="other")
    with open_scoped(disk, other) as theirs:
        theirs.put(ID, make_kv(9), whole(9))
        delete_everywhere(kv, ID, None, SCOPE)
        assert torch.equal(read(theirs, SpanRef(ID, 0, 9)), make_kv(9))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weights": "w"}'])
def test_a_note_that_cannot_be_read_is_an_error_that_names_it(kv, content):
    note = kv / name_of("int4") / "fingerprint.json"
    note.write_text(content)
    for use in (
        lambda: variants(kv),
        lambda: drop_variant(kv, name_of("int4"), None, SCOPE),
        lambda: choose_variant(kv, replace(FINGERPRINT, weights="other")),
    ):
        with pytest.raises(StoreError, match=str(note)):
            use()
    assert choose_variant(kv, fingerprint_of("none")) == kv / name_of("none")
    delete_everywhere(kv, ID, None, SCOPE)  # needs no note
    assert not list(kv.rglob(f"{ID}.safetensors"))


def test_entries_may_stand_beside_slots_that_were_made_of_them(tmp_path):
    """And beside no others: what slots are left of another model tells that the store is its."""
    of_it = FINGERPRINT.of_slots("abc", 4)
    claim(tmp_path / of_it.digest[:16], of_it)
    assert choose_variant(tmp_path, FINGERPRINT).name == FINGERPRINT.digest[:16]
    with pytest.raises(FingerprintMismatchError, match="weights"):
        choose_variant(tmp_path, replace(FINGERPRINT, weights="other"))
