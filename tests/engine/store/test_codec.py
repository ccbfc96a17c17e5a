"""What a store gives back of codes is what quantising gave, for any span of any covered ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.kernels import Quantised, choose_kernels
from coinrag_integrations.engine.kernels.reference import dequantise, quantise
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store import CODECS, KVStore, PackedChunk
from coinrag_integrations.engine.store.codec import Codec, chunk_bytes
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError, StoreError
from coinrag_integrations.types import Span, SpanRef
from tests.engine.store.parts import (
    FINGERPRINT,
    chunk_id,
    in_another_process,
    make_kv,
    n_disk,
    open_store,
    poisoned,
    read,
    read_stage,
    rows_of_span,
    same_bytes,
    whole,
)

ID = chunk_id("a")
CODED = ["int8", "int4"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FEW = settings(deadline=None, max_examples=25)
# More entries than two groups of either codec hold.
N = 300


def layout_of(dtype: torch.dtype = torch.float32, **sizes: int) -> KVLayout:
    return KVLayout(**{"n_layers": 2, "n_kv_heads": 2, "head_dim": 4, **sizes}, dtype=dtype)


def covered(kv: torch.Tensor, ranges: Sequence[Span]) -> torch.Tensor:
    return torch.cat([kv[:0], *(kv[span.start : span.stop] for span in ranges)])


@st.composite
def coverages(draw: st.DrawFn) -> list[Span]:
    """Disjoint ranges in order, some of them behind each other without a gap."""
    bounds = sorted(draw(st.sets(st.integers(0, N), min_size=2, max_size=8)))
    spans = [Span(a, b) for a, b in pairwise(bounds)]
    return draw(st.lists(st.sampled_from(spans), min_size=1, unique=True).map(sorted))


@st.composite
def inside(draw: st.DrawFn, ranges: Sequence[Span]) -> SpanRef:
    """A span of covered tokens."""
    within = draw(st.sampled_from(ranges))
    start = draw(st.integers(within.start, within.stop - 1))
    return SpanRef(ID, start, draw(st.integers(start + 1, within.stop)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODED)
@FEW
@given(data=st.data())
def test_codes_and_scales_of_any_span_are_those_of_the_covered_entries(
    codec, dtype, data, tmp_path_factory
):
    layout, ranges = layout_of(dtype), data.draw(coverages())
    kv = make_kv(N, layout, seed=data.draw(st.integers(0, 9)))
    with open_store(tmp_path_factory.mktemp("kv"), layout, codec=codec) as store:
        store.put(ID, kv, ranges)
        refs = data.draw(st.lists(inside(ranges), min_size=1, max_size=5))
        stage = read_stage(store, *refs)
        packed = PackedChunk(
            n_tokens=N,
            ranges=tuple(ranges),
            parts=store.codec.pack(covered(kv, ranges), quantise),
            codec=store.codec,
        )
        assert_holds(store, stage.entries(slice(None)), refs, packed)
        few = data.draw(st.slices(len(refs)).filter(lambda s: s.step in (None, 1)))
        few = slice(*few.indices(len(refs)))
        if few.start < few.stop:
            assert_holds(store, stage.entries(few), refs[few], packed)


def assert_holds(
    store: KVStore, found: torch.Tensor | Quantised, refs: Sequence[SpanRef], packed: PackedChunk
) -> None:
    """Each entry with its own codes, scales and zeros, as they were packed."""
    assert isinstance(found, Quantised)
    rows = [packed.rows(Span(ref.start, ref.stop)) for ref in refs]
    wanted = torch.cat([torch.arange(r.start, r.stop) for r in rows])
    group = wanted // store.codec.group
    parts = packed.parts
    assert len(found) == len(wanted)
    assert same_bytes(found.codes, parts["codes"][wanted])
    assert same_bytes(found.value_scale, parts["value_scales"][wanted, 0])
    assert same_bytes(found.value_zero, parts["value_scales"][wanted, 1])
    used = found.key_group.long()
    assert same_bytes(found.key_scale[used], parts["key_scales"][group, 0])
    assert same_bytes(found.key_zero[used], parts["key_scales"][group, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODED)
@FEW
@given(data=st.data())
def test_entries_come_back_within_half_a_scale(codec, dtype, data, tmp_path_factory):
    """And what rounding the scale and zero to fp16 adds: half a unit in their last place a level."""
    layout, ranges = layout_of(dtype), data.draw(coverages())
    size = data.draw(st.sampled_from([1e-3, 1.0, 100.0]))
    kv = (make_kv(N, layout, seed=data.draw(st.integers(0, 9))).float() * size).to(dtype)
    with open_store(tmp_path_factory.mktemp("kv"), layout, codec=codec) as store:
        store.put(ID, kv, ranges)
        refs = [SpanRef(ID, span.start, span.stop) for span in ranges]
        found = read_stage(store, *refs).entries(slice(None))
    levels = 2**found.bits - 1
    group = found.key_group.long()
    scale = torch.stack(
        (found.key_scale[group], found.value_scale[..., None].expand_as(found.key_scale[group])),
        dim=2,
    ).float()
    zero = torch.stack(
        (found.key_zero[group], found.value_zero[..., None].expand_as(found.key_zero[group])), dim=2
    ).float()
    rounding = (levels * scale + zero.abs()) * 2**-11 + levels * 2**-25
    error = (dequantise(found) - covered(kv, ranges).float()).abs()
    assert (error <= scale / 2 + rounding).all()
    # A scale is no larger than the range of what it stands for: without this, anything would do.
    assert (scale * levels <= 1.01 * 2 * kv.float().abs().max() + levels * 2**-24).all()


@pytest.mark.parametrize("codec", CODED)
def test_the_same_entries_give_the_same_codes_from_every_kernel(codec, tmp_path):
    layout = layout_of(torch.bfloat16)
    kv, device = make_kv(N, layout), torch.device("cpu")
    packed = [
        Codec(codec, layout).pack(kv, choose_kernels(name, device).quantise)
        for name in ("torch", "numba")
    ]
    assert all(same_bytes(packed[0][name], packed[1][name]) for name in packed[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 127, 129, 300])
def test_a_file_is_as_large_as_was_said(codec, dtype, n, tmp_path):
    layout = layout_of(dtype)
    with open_store(tmp_path, layout, codec=codec) as store:
        store.put(ID, make_kv(n, layout), whole(n) if n else [])
        size = store.path(ID).stat().st_size
        assert 0 < size - chunk_bytes(store.codec, n) < 4096
        assert store.header(ID).n_entries == n
        if n:
            report = store.read(poisoned(store, [SpanRef(ID, 0, n)]))
            assert n_disk(report) == store.codec.n_bytes(n)


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.53), ("int4", 0.30)])
def test_codes_of_a_usual_chunk_take_a_share_of_what_its_entries_take(codec, share, tmp_path):
    layout = layout_of(torch.bfloat16, n_layers=12, head_dim=64)
    sizes = {}
    for name in ("none", codec):
        with open_store(tmp_path / name, layout, codec=name) as store:
            store.put(ID, make_kv(512, layout), whole(512))
            sizes[name] = store.path(ID).stat().st_size
            assert chunk_bytes(store.codec, 512) <= sizes[name]
    assert sizes[codec] <= share * sizes["none"]


@pytest.mark.parametrize("implementation", ["torch", "numba"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("codec", CODED)
def test_what_codes_cannot_hold_is_refused_by_name_and_leaves_nothing(
    codec, side, value, implementation, tmp_path
):
    layout = layout_of()
    kernels = choose_kernels(implementation, torch.device("cpu"))
    with open_store(tmp_path / "a", layout, codec=codec) as store:
        store = KVStore(tmp_path / "b", layout, store.fingerprint, quantise=kernels.quantise)
    with store:
        store.put(ID, make_kv(9, layout), whole(9))
        before = {p: p.stat().st_mtime_ns for p in sorted(store.root.rglob("*"))}
        kv = make_kv(9, layout, seed=1)
        kv[5, 1, side, 0, 2] = value
        for name in ("a", "b"):
            with pytest.raises(StoreError, match=f"codec '{codec}' cannot hold"):
                store.put(chunk_id(name), kv, whole(9))
        assert {p: p.stat().st_mtime_ns for p in sorted(store.root.rglob("*"))} == before
        # Where they are not covered they do no harm.
        store.put(chunk_id("b"), kv, [Span(0, 5), Span(6, 9)])


def test_entries_that_are_not_finite_are_kept_as_they_are_without_a_codec(tmp_path):
    kv = make_kv(3, layout_of())
    kv[1] = torch.inf
    with open_store(tmp_path, layout_of(), codec="none") as store:
        store.put(ID, kv, whole(3))
        assert torch.equal(read(store, SpanRef(ID, 0, 3)), kv)


@pytest.mark.parametrize("codec", CODED)
def test_a_constant_is_itself_whatever_the_codec(codec, tmp_path):
    layout = layout_of()
    with open_store(tmp_path, layout, codec=codec) as store:
        store.put(ID, torch.full(layout.staged(70), 0.5), whole(70))
        assert (read(store, SpanRef(ID, 0, 70)) == 0.5).all()


@pytest.mark.parametrize("codec", CODED)
@FEW
@given(data=st.data())
def test_a_flipped_byte_in_any_part_is_found_by_the_spans_that_need_it(
    codec, data, tmp_path_factory
):
    """And no other span is given other bytes than before; a flipped checksum condemns the file."""
    layout = layout_of()
    with open_store(tmp_path_factory.mktemp("kv"), layout, codec=codec) as store:
        store.put(ID, make_kv(N, layout), whole(N))
        refs = [SpanRef(ID, a, b) for a, b in ((0, 1), (5, 70), (60, 140), (129, 130), (200, N))]
        right = read_stage(store, *refs)
        part = data.draw(st.sampled_from(store.codec.parts))
        row = data.draw(st.integers(0, part.n_rows(N) - 1))
        on_disk = store.header(ID).parts[part.name]
        in_checksums = data.draw(st.booleans(), label="in the checksums")
        if in_checksums:
            content = store.path(ID).read_bytes()
            at = content.index(on_disk.checksums[row].tobytes()) + data.draw(st.integers(0, 7))
        else:
            at = on_disk.offset + row * part.row_bytes
            at += data.draw(st.integers(0, part.row_bytes - 1))
        damage(store, at)
        with open_store(store.root, layout, codec=codec) as fresh:
            stage = poisoned(fresh, refs)
            errors = fresh.read(stage).errors
            with pytest.raises(CorruptChunkError):
                fresh.verify(ID)
    needs = {
        i for i, r in enumerate(refs) if r.start // part.group <= row <= (r.stop - 1) // part.group
    }
    assert errors.keys() == (set(range(len(refs))) if in_checksums else needs)
    assert all(isinstance(error, CorruptChunkError) for error in errors.values())
    for index in set(range(len(refs))) - errors.keys():
        found, wanted = rows_of_span(stage, index), rows_of_span(right, index)
        assert all(same_bytes(found[name], wanted[name]) for name in wanted)


def damage(store: KVStore, at: int) -> None:
    with store.path(ID).open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x11]))


@pytest.mark.parametrize("codec", CODED)
def test_tokens_that_are_not_covered_are_not_found_in_codes_either(codec, tmp_path):
    layout = layout_of()
    with open_store(tmp_path, layout, codec=codec) as store:
        store.put(ID, make_kv(20, layout), [Span(2, 5), Span(9, 14)])
        for outside in (SpanRef(ID, 4, 6), SpanRef(ID, 0, 1), SpanRef(ID, 2, 14)):
            with pytest.raises(ChunkNotFoundError, match="not stored"):
                read(store, outside)


@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_of_which_nothing_is_covered_can_be_stored_in_any_codec(codec, tmp_path):
    with open_store(tmp_path, layout_of(), codec=codec) as store:
        store.put(ID, make_kv(5, layout_of()), [])
        assert store.verify(ID).ranges == ()
        with pytest.raises(ChunkNotFoundError):
            read(store, SpanRef(ID, 0, 1))


def test_a_codec_that_is_not_known_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(StoreError, match="'int2' is not one of none, int8, int4"):
        open_store(tmp_path / "kv", codec="int2")
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("codec", CODED)
def test_another_process_reads_the_same_codes(codec, tmp_path):
    layout = layout_of()
    with open_store(tmp_path, layout, codec=codec) as store:
        store.put(ID, make_kv(N, layout), whole(N))
        ours = read(store, SpanRef(ID, 3, 200))
    assert in_another_process(_read_in, tmp_path, codec) == ours.tolist()


def _read_in(root, codec: str) -> list[object]:
    with open_store(root, layout_of(), codec=codec) as store:
        return read(store, SpanRef(ID, 3, 200)).tolist()


@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize(("name", "share"), [("none", 1.0), ("int8", 0.53)])
def test_files_of_slots_take_their_share_of_the_bytes_of_entries(tmp_path, name, share, ratio):
    """Of chunks of 512 tokens, in a layout of real models: 1/k, with int8 0.53/k, within 2 %."""
    layout = layout_of(torch.bfloat16, n_layers=30, n_kv_heads=3, head_dim=64)
    fingerprint = replace(FINGERPRINT, layout=str(layout), dtype="bfloat16", codec=name)
    with KVStore(tmp_path, layout, fingerprint.of_slots("abc", ratio)) as store:
        store.put(ID, make_kv(512 // ratio, layout), [Span(0, 512)], 512)
        entries = chunk_bytes(Codec("none", layout), 512)
        assert store.n_bytes() * ratio / entries == pytest.approx(share, rel=0.02)
