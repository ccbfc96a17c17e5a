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
from coinrag_integrations.engine.store.format import entry_checksums, read_header, write_chunk
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError, StoreError
from coinrag_integrations.types import Span, SpanRef
from tests.engine.store.parts import (
    FINGERPRINT,
    LAYOUT,
    chunk_id,
    make_kv,
    open_store,
    read,
    whole,
)

ID = chunk_id("a")


@pytest.fixture
def path(tmp_path):
    """The file of a chunk of three tokens in an otherwise empty store."""
    with open_store(tmp_path) as store:
        store.put(ID, make_kv(3), whole(3))
        return store.path(ID)


def header_of(path, layout=LAYOUT):
    file = os.open(path, os.O_RDONLY)
    try:
        return read_header(file, path, layout, FINGERPRINT.digest)
    finally:
        os.close(file)


def reread(path, token: int) -> torch.Tensor:
    """One token's entry by a store that has not seen the file before."""
    with open_store(path.parent.parent) as store:
        return read(store, SpanRef(ID, token, token + 1))


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
        assert set(file.keys()) == {"kv", "checksums"}
        assert torch.equal(file.get_tensor("kv"), make_kv(3))
        sums = file.get_tensor("checksums").numpy()
        metadata = file.metadata()
    rows = make_kv(3).reshape(3, -1).numpy()
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows]
    assert json.loads(metadata["coinrag"]) == {
        "format_version": 1,
        "fingerprint": FINGERPRINT.digest,
        "chunk_id": ID,
        "n_tokens": 3,
        "ranges": [[0, 3]],
        "dtype": "float32",
        "shape": [3, 2, 2, 1, 4],
    }


def test_the_header_says_what_was_written(tmp_path):
    path = tmp_path / f"{ID}.safetensors"
    ranges = [Span(1, 3), Span(4, 9)]
    write_chunk(path, ID, make_kv(12), ranges, FINGERPRINT.digest)
    header = header_of(path)
    assert (header.chunk_id, header.n_tokens, header.ranges) == (ID, 12, tuple(ranges))
    assert header.kv_offset % 8 == 0
    stored = np.fromfile(path, np.float32, offset=header.kv_offset, count=7 * 16)
    expected = torch.cat((make_kv(12)[1:3], make_kv(12)[4:9])).reshape(-1)
    assert np.array_equal(stored, expected.numpy())


def test_rows_of_spans_are_found_in_their_range_and_nowhere_else(tmp_path):
    path = tmp_path / f"{ID}.safetensors"
    write_chunk(path, ID, make_kv(12), [Span(1, 3), Span(5, 9)], FINGERPRINT.digest)
    header = header_of(path)
    assert header.rows(Span(1, 3)) == slice(0, 2)
    assert header.rows(Span(5, 6)) == slice(2, 3)
    assert header.rows(Span(7, 9)) == slice(4, 6)
    for outside in (Span(0, 1), Span(2, 6), Span(3, 4), Span(8, 10), Span(1, 9), Span(40, 41)):
        with pytest.raises(ChunkNotFoundError, match="coverage 'all'"):
            header.rows(outside)


def test_a_chunk_of_which_nothing_is_covered_can_be_stored(tmp_path):
    path = tmp_path / f"{ID}.safetensors"
    write_chunk(path, ID, make_kv(4), [], FINGERPRINT.digest)
    assert header_of(path).ranges == ()
    assert entry_checksums(make_kv(0)).shape == (0,)


@pytest.mark.parametrize("flip", [0x01, 0x20, 0xFF])
def test_any_flipped_byte_gives_the_right_entries_or_a_refusal(path, flip):
    good, kv = path.read_bytes(), make_kv(3)
    refs = [SpanRef(ID, token, token + 1) for token in range(3)]
    refused = 0
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= flip
        path.write_bytes(bytes(bad))
        out = torch.empty_like(kv)
        with open_store(path.parent.parent) as store:
            errors = store.read(refs, out)
        refused += bool(errors)
        assert all(isinstance(error, CorruptChunkError) for error in errors.values()), at
        for token in range(3):
            assert token in errors or torch.equal(out[token], kv[token]), at
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
    with pytest.raises(CorruptChunkError, match="bytes long"):
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
        ("[3, 2, 2, 1, 4]", "[3, 2, 2, 4, 1]"),
        ("[[0, 3]]", "[[1, 4]]"),
        ("float32", "float64"),
        ('\\"format_version\\": 1', '\\"format_version\\": 2'),
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
        {"format_version": 2},
        {"dtype": "bfloat16"},
        {"shape": [4, 2, 2, 1, 4]},
        {"shape": [3, 2, 2, 1, 8]},
        {"ranges": [[0, 4]]},
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
        {"ranges": [[-3, 0]]},
        {"ranges": [["a", "b"]]},
        {"shape": ...},
        {"n_tokens": ...},
        {"dtype": ...},
        {"format_version": ...},
    ],
)
def test_metadata_of_another_form_is_refused_even_with_the_right_check(path, changes):
    header, body = split(path)
    sign(header, **changes)
    join(path, header, body)
    with pytest.raises(CorruptChunkError):
        reread(path, 0)


@pytest.mark.parametrize("name", ["kv", "checksums"])
@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        "kv",
        {},
        {"data_offsets": None},
        {"data_offsets": 3},
        {"data_offsets": [0]},
        {"data_offsets": ["a", "b"]},
        {"data_offsets": [0, 1]},
        {"data_offsets": [1 << 70, (1 << 70) + 192]},
        {"data_offsets": [-192, 0]},
    ],
)
def test_tensors_described_in_another_form_are_refused(path, name, entry):
    header, body = split(path)
    header[name] = entry
    join(path, header, body)
    with pytest.raises(CorruptChunkError):
        reread(path, 0)
    del header[name]
    join(path, header, body)
    with pytest.raises(CorruptChunkError):
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
    with pytest.raises(CorruptChunkError, match=r"float32.*expected.*float16"):
        header_of(path, layout)
