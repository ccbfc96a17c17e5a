"""A chunk file is a plain safetensors file that is either as it was written or refused."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store import PackedChunk
from coinrag_integrations.engine.store.codec import Codec
from coinrag_integrations.engine.store.format import read_header, row_checksums, write_chunk
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError, StoreError
from coinrag_integrations.types import Span, SpanRef
from tests.engine.store.parts import (
    FINGERPRINT,
    LAYOUT,
    chunk_id,
    make_kv,
    open_store,
    poisoned,
    read,
    rows_of_span,
    same_bytes,
    whole,
)

ID = chunk_id("a")


@pytest.fixture
def path(tmp_path):
    """The file of a chunk of three tokens in an otherwise empty store."""
    with open_store(tmp_path) as store:
        store.put(ID, make_kv(3), whole(3))
        return store.path(ID)


def test_equal_chunks_are_equal_files(tmp_path):
    """Also in their headers, where safetensors puts metadata in any order."""
    with open_store(tmp_path) as store:
        found = set()
        for _ in range(16):
            store.put(ID, make_kv(3), whole(3))
            found.add(store.path(ID).read_bytes())
        assert len(found) == 1
        with safe_open(store.path(ID), "pt") as file:
            assert set(file.metadata()) == {"coinrag", "check"}


def header_of(path, layout=LAYOUT):
    file = os.open(path, os.O_RDONLY)
    try:
        return read_header(file, path, Codec("none", layout), FINGERPRINT.digest)
    finally:
        os.close(file)


def reread(path, token: int) -> torch.Tensor:
    """One token's entry by a store that has not seen the file before."""
    with open_store(path.parent.parent) as store:
        return read(store, SpanRef(ID, token, token + 1))


def write(path, kv: torch.Tensor, ranges: list[Span]) -> None:
    """What a store writes of a chunk with codec "none"."""
    entries = torch.cat([kv[:0], *(kv[span.start : span.stop] for span in ranges)])
    parts, codec = {"kv": entries}, Codec("none", LAYOUT)
    chunk = PackedChunk(n_tokens=len(kv), ranges=tuple(ranges), parts=parts, codec=codec)
    write_chunk(path, ID, chunk, FINGERPRINT.digest)


def split(path) -> tuple[dict, bytes]:
    """The safetensors header and the bytes behind it."""
    data = path.read_bytes()
    (n,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def join(path, header: dict, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def sign(header: dict, **changes: object) -> None:
    """Change the metadata as a forger would: the check agrees."""
    meta = json.loads(header["__metadata__"]["coinrag"]) | changes
    text = json.dumps({k: v for k, v in meta.items() if v is not ...})
    header["__metadata__"] |= {
        "coinrag": text,
        "check": xxhash.xxh3_64_hexdigest(text.encode()),
    }


def test_the_file_is_a_plain_safetensors_file(path):
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"kv", "kv.xxh3"}
        assert torch.equal(file.get_tensor("kv"), make_kv(3))
        sums = file.get_tensor("kv.xxh3").numpy()
        metadata = file.metadata()
    rows = make_kv(3).reshape(3, -1).numpy()
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows]
    assert json.loads(metadata["coinrag"]) == {
        "format_version": 2,
        "fingerprint": FINGERPRINT.digest,
        "chunk_id": ID,
        "n_tokens": 3,
        "ranges": [[0, 3]],
        "checksums": xxhash.xxh3_64_hexdigest(sums.tobytes()),
    }
    described = split(path)[0]
    assert (described["kv"]["dtype"], described["kv"]["shape"]) == ("F32", [3, 2, 2, 1, 4])
    assert (described["kv.xxh3"]["dtype"], described["kv.xxh3"]["shape"]) == ("U64", [3])


def test_the_header_says_what_was_written(tmp_path):
    path = tmp_path / f"{ID}.safetensors"
    ranges = [Span(1, 3), Span(4, 9)]
    write(path, make_kv(12), ranges)
    header = header_of(path)
    assert (header.chunk_id, header.n_tokens, header.ranges) == (ID, 12, tuple(ranges))
    offset = header.parts["kv"].offset
    assert offset % 8 == 0
    stored = np.fromfile(path, np.float32, offset=offset, count=7 * 16)
    expected = torch.cat((make_kv(12)[1:3], make_kv(12)[4:9])).reshape(-1)
    assert np.array_equal(stored, expected.numpy())


def test_rows_of_spans_are_found_in_their_range_and_nowhere_else(tmp_path):
    path = tmp_path / f"{ID}.safetensors"
    write(path, make_kv(12), [Span(1, 3), Span(5, 9)])
    header = header_of(path)
    assert header.rows(Span(1, 3)) == slice(0, 2)
    assert header.rows(Span(5, 6)) == slice(2, 3)
    assert header.rows(Span(7, 9)) == slice(4, 6)
    for outside in (Span(0, 1), Span(2, 6), Span(3, 4), Span(8, 10), Span(1, 9), Span(40, 41)):
        with pytest.raises(ChunkNotFoundError, match="coverage 'all'"):
            header.rows(outside)


def test_a_chunk_of_which_nothing_is_covered_can_be_stored(tmp_path):
    path = tmp_path / f"{ID}.safetensors"
    write(path, make_kv(4), [])
    assert header_of(path).ranges == ()
    assert row_checksums(make_kv(0)).shape == (0,)


@pytest.mark.parametrize(
    ("codec", "flip"), [("none", 0x01), ("none", 0x20), ("none", 0xFF), ("int8", 0x01), ("int4", 1)]
)
def test_any_flipped_byte_gives_the_right_entries_or_a_refusal(tmp_path, codec, flip):
    """Whatever part it lies in: entries, codes, scales, checksums, metadata or header."""
    refs = [SpanRef(ID, token, token + 1) for token in range(3)]
    with open_store(tmp_path, codec=codec) as store:
        store.put(ID, make_kv(3), whole(3))
        path, right = store.path(ID), poisoned(store, refs)
        assert store.read(right).errors == {}
    good = path.read_bytes()
    refused = 0
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= flip
        path.write_bytes(bytes(bad))
        with open_store(tmp_path, codec=codec) as store:
            stage = poisoned(store, refs)
            errors = store.read(stage).errors
        refused += bool(errors)
        assert all(isinstance(error, CorruptChunkError) for error in errors.values()), at
        for index in set(range(3)) - errors.keys():
            found, wanted = rows_of_span(stage, index), rows_of_span(right, index)
            assert all(same_bytes(found[name], wanted[name]) for name in wanted), at
    assert refused > len(good) // 2


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_damage_gives_the_right_entries_or_a_refusal(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    with open_store(folder) as store:
        store.put(ID, make_kv(3), whole(3))
        path = store.path(ID)
    good = path.read_bytes()
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, len(good)))
    path.write_bytes(good[:start] + data.draw(st.binary(max_size=40)) + good[stop:])
    for token in range(3):
        try:
            assert torch.equal(reread(path, token), make_kv(3)[token][None])
        except StoreError:
            continue


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, -192, -100, -1])
def test_a_truncated_file_is_corrupt(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptChunkError, match=str(path)):
        reread(path, 0)


def test_a_longer_file_is_corrupt(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CorruptChunkError, match="bytes follow its header"):
        reread(path, 0)


@pytest.mark.parametrize(
    "start",
    [
        b"\xff" * 8,
        b"\0" * 8,
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 20) + b"[" * 20,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 3) + b"\xff\xfe\xfd",
        struct.pack("<Q", 20) + b'{"__metadata__": []}',
    ],
)
def test_a_garbage_header_is_corrupt(path, start):
    body = path.read_bytes()[len(start) :]
    path.write_bytes(start + body)
    with pytest.raises(CorruptChunkError):
        reread(path, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (ID, chunk_id("b")),
        ("[[0, 3]]", "[[1, 4]]"),
        ('\\"n_tokens\\": 3', '\\"n_tokens\\": 4'),
        ('\\"format_version\\": 2', '\\"format_version\\": 1'),
        (FINGERPRINT.digest, "0" * 64),
    ],
)
def test_metadata_edited_by_hand_does_not_match_its_check(path, old, new):
    data = path.read_bytes()
    assert len(old) == len(new)
    assert old.encode() in data
    path.write_bytes(data.replace(old.encode(), new.encode(), 1))
    with pytest.raises(CorruptChunkError, match="does not match its checksum"):
        reread(path, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_id": chunk_id("b")},
        {"fingerprint": "0" * 64},
        {"format_version": 1},
        {"ranges": [[0, 4]], "n_tokens": 4},
        {"ranges": [[0, 2]]},
    ],
)
def test_metadata_that_describes_another_file_is_refused_even_with_the_right_check(path, changes):
    header, body = split(path)
    sign(header, **changes)
    join(path, header, body)
    with pytest.raises(CorruptChunkError, match="expected"):
        reread(path, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"ranges": ...},
        {"ranges": 3},
        {"ranges": [[0]]},
        {"ranges": [[3, 0], [0, 6]]},
        {"ranges": [[0, 2], [1, 2]]},
        {"ranges": [[2, 3], [0, 2]]},
        {"ranges": [[-3, 0]]},
        {"ranges": [["a", "b"]]},
        {"ranges": [[1, 4]]},
        {"n_tokens": ...},
        {"n_tokens": "three"},
        {"n_tokens": 2},
        {"format_version": ...},
        {"chunk_id": ...},
        {"fingerprint": ...},
    ],
)
def test_metadata_of_another_form_is_refused_even_with_the_right_check(path, changes):
    header, body = split(path)
    sign(header, **changes)
    join(path, header, body)
    with pytest.raises(CorruptChunkError):
        reread(path, 0)


NAMES = ["kv", "kv.xxh3"]
ODD = [None, [], "kv", {}, 3]
OFFSETS = [None, 3, [0], ["a", "b"], [0, 1], [1 << 70, (1 << 70) + 192], [-192, 0], [192, 384]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entry", ODD, ids=repr)
def test_tensors_described_in_another_form_are_refused(path, name, entry):
    header, body = split(path)
    header[name] = entry
    join(path, header, body)
    with pytest.raises(CorruptChunkError):
        reread(path, 0)
    del header[name]
    join(path, header, body)
    with pytest.raises(CorruptChunkError, match="expected"):
        reread(path, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "changes",
    [
        *({"data_offsets": offsets} for offsets in OFFSETS),
        {"dtype": "BF16"},
        {"dtype": "F64"},
        {"dtype": None},
        {"shape": [3, 2, 2, 4, 1]},
        {"shape": [4]},
        {"shape": []},
        {"shape": None},
    ],
    ids=str,
)
def test_tensors_of_another_place_shape_or_dtype_are_refused(path, name, changes):
    header, body = split(path)
    header[name] |= changes
    join(path, header, body)
    with pytest.raises(CorruptChunkError):
        reread(path, 0)


def test_a_tensor_that_nobody_expects_is_refused(path):
    header, body = split(path)
    extra = {"dtype": "U8", "shape": [4], "data_offsets": [len(body), len(body) + 4]}
    join(path, header | {"extra": extra}, body + b"1234")
    with pytest.raises(CorruptChunkError, match=r"it holds .*extra.*expected"):
        reread(path, 0)


def test_tensors_that_share_bytes_are_refused(path):
    """Checksums that lie in the entries would be checked against themselves."""
    header, body = split(path)
    start, _ = header["kv"]["data_offsets"]
    header["kv.xxh3"]["data_offsets"] = [start, start + 24]
    join(path, header, body)
    with pytest.raises(CorruptChunkError, match="overlap"):
        reread(path, 0)


def test_another_chunks_file_under_this_name_is_refused(path, tmp_path):
    with open_store(tmp_path) as store:
        store.put(chunk_id("b"), make_kv(3, seed=1), whole(3))
        store.path(chunk_id("b")).replace(path)
    with pytest.raises(CorruptChunkError, match="chunk_id"):
        reread(path, 0)


def test_a_file_of_another_dtype_of_the_same_size_is_refused(path):
    layout = KVLayout(n_layers=2, n_kv_heads=1, head_dim=8, dtype=torch.float16)
    assert layout.bytes_per_entry == LAYOUT.bytes_per_entry
    with pytest.raises(CorruptChunkError, match=r"F32.*expected.*F16"):
        header_of(path, layout)
