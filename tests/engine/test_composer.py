"""Law: a prefix is the entries of its spans, each turned to its place, wherever they were cut from."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import permutations

import pytest
import torch
import transformers
from safetensors.torch import load_file

from coinrag_integrations.engine import Engine, EngineConfig, describe_model
from coinrag_integrations.engine import composer as composer_module
from coinrag_integrations.engine.composer import Composer, _cut, _rows
from coinrag_integrations.engine.cost import CostModel
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.engine.kernels.reference import dequantise
from coinrag_integrations.engine.plan import PrefixPlan, Segment, Text, plan_prefix
from coinrag_integrations.engine.prompt_cache import PromptCache
from coinrag_integrations.engine.source import Source
from coinrag_integrations.engine.store import CODECS, PackedChunk
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.upload import Uploader
from coinrag_integrations.engine.visibility import HIDDEN
from coinrag_integrations.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    SlowReadError,
    SpanError,
)
from coinrag_integrations.types import ChunkId, Span, SpanRef
from tests.tiny import (
    SUPPORTED,
    byte_tokenizer,
    cache_of,
    dynamic_cache,
    fill,
    forward,
    placed,
    supported_model,
    tiny_hf,
)

CPU = torch.device("cpu")
LONG = "One two three four five six seven. " * 9


@pytest.fixture
def chunks(engine):
    return fill(engine, LONG)


@pytest.fixture
def composer(engine):
    return Composer(
        layout=engine.model.layout,
        rope=engine.model.rope,
        kernels=choose_kernels("torch", CPU),
        device=CPU,
        sources={1: Source(store=engine.store, cost=CostModel())},
        prompts=PromptCache(encode=lambda ids: encode(engine.model, [ids])[0]),
        uploader=Uploader.of(CPU),
    )


def mending(composer, **how) -> Composer:
    """The composer, with `recompute` or `decline` of its only source."""
    return replace(composer, sources={1: replace(composer.sources[1], **how)})


def plan_of(engine, refs) -> PrefixPlan:
    return plan_prefix([Text(engine.prompt.head), *refs])


def compose(composer, plan, **options):
    composed = composer.compose([plan], Stopwatch(CPU), **options)
    return composed.prefix, composed.loaded[0].recomputed


def encoded(engine, chunk) -> PackedChunk:
    """What the engine's store would hold of a chunk that is encoded again, all of it."""
    kv = encode(engine.model, [chunk.token_ids])[0]
    return engine.store.pack(kv, [Span(0, len(kv))])


def digest_of(folder) -> str:
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def test_spans_in_any_order_are_their_slices_turned_to_their_rows(engine, composer, chunks):
    spans = [
        SpanRef(chunks[0].chunk_id, 3, 11),
        SpanRef(chunks[1].chunk_id, 0, 5),
        SpanRef(chunks[2].chunk_id, 20, 32),
    ]
    whole = {c.chunk_id: encode(engine.model, [c.token_ids])[0] for c in chunks}
    before = digest_of(engine.store.root)
    for order in permutations(spans):
        prefix, recomputed = compose(composer, plan_of(engine, order))
        assert recomputed == ()
        row = len(engine.prompt.head)
        for ref in order:
            entries = whole[ref.chunk_id][ref.start : ref.stop]  # [T, L, 2, H, D]
            expected = placed(engine.model, entries, range(row, row + len(ref)))
            found = prefix.kv[..., row : row + len(ref), :]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            row += len(ref)
        assert prefix.n_entries == prefix.kv.shape[4] == row
    assert digest_of(engine.store.root) == before


def test_the_prompts_entries_come_first_and_are_the_models_own(engine, composer, chunks):
    prefix, _ = compose(composer, plan_of(engine, [chunks[0].ref()]))
    past = dynamic_cache(prefix.kv[..., : len(engine.prompt.head), :])
    question = [5, 6, 7]
    theirs = forward(engine.model.hf, [*engine.prompt.head, *question])[-3:]
    ours = forward(engine.model.hf, question, past)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SUPPORTED)
def test_right_aligned_rows_give_the_logits_of_absolute_positions(name, tmp_path):
    """Entries with gaps between their positions, like slots that each stand for several tokens.

    1. Absolute: keys turned at their logical positions in a plain DynamicCache, the question with
       explicit position ids from `length`.
    2. Right-aligned: what the composer lays out, the question without position ids.
    3. Packed: the gaps ignored. Must differ, or the first two prove nothing.
    """
    model = supported_model(name)
    entries = encode(model, [list(range(30, 60))])[0]
    segments = (
        Segment(ref=SpanRef(ChunkId("a" * 32), 0, 6), row=4, position=9),
        Segment(ref=SpanRef(ChunkId("a" * 32), 6, 7), row=10, position=31),
        Segment(ref=SpanRef(ChunkId("a" * 32), 7, 26), row=11, position=40),
    )
    plan = PrefixPlan(head=(1,) * 4, segments=segments, online=(), n_entries=30, length=75)
    logical = [0, 1, 2, 3, *range(9, 15), 31, *range(40, 59)]
    question = [101, 7, 300, 45, 2]

    def cache(positions) -> transformers.DynamicCache:
        return dynamic_cache(placed(model, entries, positions))

    absolute = forward(model.hf, question, cache(logical), plan.length)
    aligned = forward(model.hf, question, cache(plan.positions()))
    packed = forward(model.hf, question, cache(range(30)))
    torch.testing.assert_close(aligned, absolute, rtol=1e-4, atol=1e-4)
    # Logits are scaled differently from family to family: Granite divides them.
    assert (packed - absolute).abs().max() > 0.05 * absolute.abs().max()


def test_a_plan_with_gaps_is_composed_right_aligned(engine, composer, chunks):
    head = engine.prompt.head
    n = len(head)
    ref = SpanRef(chunks[0].chunk_id, 2, 9)
    segment = Segment(ref=ref, row=n, position=n + 50)
    plan = PrefixPlan(head=head, segments=(segment,), online=(), n_entries=n + 7, length=n + 80)
    assert plan.positions()[0] == -73
    prefix, _ = compose(composer, plan)
    chunk = encode(engine.model, [chunks[0].token_ids])[0]
    entries = torch.cat([encode(engine.model, [head])[0], chunk[2:9]])
    absolute = placed(engine.model, entries, [*range(n), *range(n + 50, n + 57)])
    question = [9, 8, 7]
    theirs = forward(engine.model.hf, question, dynamic_cache(absolute), n + 80)
    ours = forward(engine.model.hf, question, cache_of(prefix, 3))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_room_is_kept_behind_the_entries(engine, composer, chunks):
    prefix, _ = compose(composer, plan_of(engine, [chunks[0].ref()]), room=13)
    assert prefix.room == 13
    assert prefix.n_entries == len(engine.prompt.head) + len(chunks[0])


def test_bytes_read_are_those_of_the_spans_alone(engine, composer, chunks):
    refs = [SpanRef(chunks[0].chunk_id, 3, 5), SpanRef(chunks[1].chunk_id, 8, 17)]
    plans = [plan_of(engine, refs), plan_of(engine, refs[:1]), plan_of(engine, [])]
    loaded = composer.compose(plans, Stopwatch(CPU)).loaded
    n_bytes = engine.model.layout.bytes_per_entry
    assert [it.bytes_read for it in loaded] == [11 * n_bytes, 2 * n_bytes, 0]
    assert [it.bytes_in_memory for it in loaded] == [0, 0, 0]


def test_a_plan_without_spans_has_no_entries(engine, composer):
    prefix, _ = compose(composer, plan_of(engine, []), room=3)
    assert (prefix.n_entries, prefix.room) == (0, 3)
    assert prefix.plans[0].online_ids == engine.prompt.head


def test_plans_side_by_side_are_the_prefixes_of_each(engine, composer, chunks):
    plans = [
        plan_of(engine, refs)
        for refs in (
            [chunks[0].ref()],
            [],
            [SpanRef(chunks[1].chunk_id, 0, 4), SpanRef(chunks[0].chunk_id, 5, 31)],
            [SpanRef(chunks[2].chunk_id, 1, 2)],
        )
    ]
    plans.append(plan_prefix([SpanRef(chunks[0].chunk_id, 2, 9)]))  # no head
    together = composer.compose(plans, Stopwatch(CPU), room=5).prefix
    assert together.n_entries == max(plan.n_entries for plan in plans)
    for b, plan in enumerate(plans):
        alone, _ = compose(composer, plan)
        n = plan.n_entries
        assert torch.equal(together.kv[:, :, b, :, :n], alone.kv[:, :, 0])
        assert (together.kv[:, :, b, :, n : together.n_entries] == 0).all()
        positions = together.positions()[b]
        assert positions[:n].tolist() == plan.positions().tolist()
        assert (positions[n:] == HIDDEN).all()


@pytest.mark.parametrize(("piece_bytes", "n_pieces"), [(1, 5), (5 * 1536, 2), (1 << 30, 1)])
def test_pieces_are_consecutive_and_together_everything(engine, piece_bytes, n_pieces):
    assert engine.model.layout.bytes_per_entry == 768
    stage = engine.store.stage([SpanRef(ChunkId("a" * 32), 0, n) for n in (3, 1, 7, 2, 2)])
    pieces = list(_cut(stage, piece_bytes))
    assert [i for piece in pieces for i in range(5)[piece]] == list(range(5))
    rows = [_rows(stage, piece, 4) for piece in pieces]
    assert [r for piece in rows for r in range(piece.start, piece.stop)] == list(range(4, 19))
    assert len(pieces) == n_pieces
    assert all(piece.start < piece.stop for piece in pieces)
    assert list(_cut(engine.store.stage([]), piece_bytes)) == []


@pytest.mark.parametrize("codec", CODECS)
def test_spans_placed_in_pieces_are_the_spans_placed_at_once(tmp_path, codec):
    """What a GPU's composer does, one piece behind the other."""
    with open_coded(tmp_path, codec) as engine:
        chunks = fill(engine, LONG)
        refs = [SpanRef(c.chunk_id, a, a + 5) for a in (0, 9, 20) for c in chunks[:3]]
        plan = plan_prefix(refs)
        whole = engine._asking.composer.compose([plan], Stopwatch(CPU)).prefix.kv
        stage, found = engine.store.stage(refs), torch.full_like(whole, torch.nan)
        pieces = list(_cut(stage, 1))
        reads = [engine.store.start_read(stage, piece) for piece in pieces]
        rotation = engine.model.rope.rotation(plan.positions(), CPU)
        for piece, read in zip(pieces, reads, strict=True):
            assert read.result().errors == {}
            rows = _rows(stage, piece, 0)
            slots = torch.arange(rows.start, rows.stop)
            engine.kernels.place(stage.entries(piece), rotation[rows], found, slots)
        assert torch.equal(found, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("codec", CODECS)
def test_a_prefix_made_in_pieces_is_the_prefix_made_at_once(tmp_path, codec, monkeypatch):
    model = tiny_hf(dtype=torch.float32).cuda()
    config = EngineConfig(chunk_tokens=32, coverage="all", codec=codec, load="read")
    with Engine(describe_model("tiny", model, byte_tokenizer()), tmp_path, config) as engine:
        chunks = fill(engine, LONG)
        refs = [SpanRef(c.chunk_id, a, a + 5) for a in (0, 9, 20) for c in chunks[:3]]
        whole, _ = engine.compose(refs)
        monkeypatch.setattr(composer_module, "PIECE_BYTES", 1)
        pieces, _ = engine.compose(refs)
        assert torch.equal(pieces.kv, whole.kv)
        engine.store.delete(chunks[1].chunk_id)
        mended, recomputed = engine.compose(refs)
        torch.testing.assert_close(mended.kv, whole.kv, rtol=1e-3, atol=1e-3)
        assert {ref.chunk_id for ref in recomputed} == {chunks[1].chunk_id}


def test_without_a_way_to_recompute_the_stores_error_is_raised(engine, composer, chunks):
    plan = plan_of(engine, [chunks[0].ref()])
    path = engine.store.path(chunks[0].chunk_id)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptChunkError):
        compose(composer, plan)
    path.unlink()
    with pytest.raises(ChunkNotFoundError):
        compose(composer, plan)


def test_only_what_failed_is_recomputed_and_each_chunk_once(engine, composer, chunks):
    refs = [chunks[0].ref(), SpanRef(chunks[1].chunk_id, 0, 4), SpanRef(chunks[1].chunk_id, 9, 12)]
    plan = plan_of(engine, refs)
    whole, _ = compose(composer, plan)
    engine.store.delete(chunks[1].chunk_id)
    asked: list[ChunkId] = []

    def recompute(chunk_id, spans, error):
        asked.append(chunk_id)
        assert spans == [Span(0, 4), Span(9, 12)]
        assert isinstance(error, ChunkNotFoundError)
        return encoded(engine, chunks[1])

    prefix, recomputed = compose(mending(composer, recompute=recompute), plan)
    assert asked == [chunks[1].chunk_id]
    assert recomputed == tuple(refs[1:])
    torch.testing.assert_close(prefix.kv, whole.kv, rtol=1e-5, atol=1e-5)


def test_a_span_that_what_was_recomputed_does_not_hold_ends_behind_its_chunk(
    engine, composer, chunks
):
    beyond = SpanRef(chunks[0].chunk_id, 3, 99)
    with pytest.raises(SpanError, match=rf"\[3, 99\) ends after the {len(chunks[0])} tokens"):
        compose(
            mending(composer, recompute=lambda *_: encoded(engine, chunks[0])),
            plan_of(engine, [beyond]),
        )


def test_chunks_that_are_declined_are_encoded_and_not_read(engine, composer, chunks):
    refs = [chunks[0].ref(), SpanRef(chunks[1].chunk_id, 0, 4), SpanRef(chunks[0].chunk_id, 2, 5)]
    plans = [plan_of(engine, refs[:2]), plan_of(engine, refs[2:])]
    whole = composer.compose(plans, Stopwatch(CPU)).prefix
    n_bytes = engine.model.layout.bytes_per_entry
    asked: list[dict[ChunkId, int]] = []

    def decline(wanted):
        asked.append(dict(wanted))
        return {chunks[0].chunk_id: SlowReadError("slow")}

    def recompute(chunk_id, spans, error):
        assert (chunk_id, type(error)) == (chunks[0].chunk_id, SlowReadError)
        return encoded(engine, chunks[0])

    able = mending(composer, recompute=recompute, decline=decline)
    composed = able.compose(plans, Stopwatch(CPU))
    assert asked == [
        {chunks[0].chunk_id: (len(chunks[0]) + 3) * n_bytes, chunks[1].chunk_id: 4 * n_bytes}
    ]
    assert [it.recomputed for it in composed.loaded] == [(refs[0],), (refs[2],)]
    assert [it.n_declined for it in composed.loaded] == [1, 1]
    assert [it.bytes_read for it in composed.loaded] == [4 * n_bytes, 0]
    torch.testing.assert_close(composed.prefix.kv, whole.kv, rtol=1e-5, atol=1e-5)
    # Who may not encode has to read.
    only_read = mending(composer, decline=decline).compose(plans, Stopwatch(CPU))
    assert torch.equal(only_read.prefix.kv, whole.kv)
    assert [it.n_declined for it in only_read.loaded] == [0, 0]


# -- codecs ------------------------------------------------------------------------------------


def open_coded(folder, codec: str, **options) -> Engine:
    """An engine that encodes one chunk at a time, so that the same chunk gives the same bits."""
    config = {"chunk_tokens": 32, "coverage": "all", "batch_tokens": 1, "load": "read"} | options
    return Engine(supported_model("llama"), folder, EngineConfig(codec=codec, **config))


def tensors(engine, chunk) -> dict[str, bytes]:
    """The tensors of a chunk's file."""
    found = load_file(engine.store.path(chunk.chunk_id))
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_prefix_of_head_and_codes_is_that_of_the_entries_the_codes_stand_for(
    tmp_path, codec, kernels
):
    """The head's entries are raw, those of spans are codes; they lie in one prefix."""
    with open_coded(tmp_path, codec, kernels=kernels) as engine:
        chunks, head = fill(engine, LONG), engine.prompt.head
        refs = [SpanRef(chunks[i].chunk_id, a, b) for i, a, b in ((1, 3, 31), (0, 0, 1), (2, 7, 9))]
        prefix, recomputed = engine.compose(refs)
        stage = engine.store.stage(refs)
        assert engine.store.read(stage).errors == {}
        entries = torch.cat(
            (encode(engine.model, [head])[0], dequantise(stage.entries(slice(0, 3))))
        )
        expected = placed(engine.model, entries, range(len(entries)))
        torch.testing.assert_close(prefix.kv, expected, rtol=1e-5, atol=1e-5)
        assert recomputed == ()
        # And not that of the entries themselves: something was quantised.
        exact = torch.cat([encode(engine.model, [c.token_ids])[0] for c in chunks[:3]])
        n = len(head)
        assert (prefix.kv[0, 1, 0, :, n] - exact[len(chunks[0]) + 3, 0, 1]).abs().max() > 1e-6


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_prefix_of_chunks_that_are_encoded_again_is_the_one_that_was_stored(
    tmp_path, codec, kernels
):
    """Recomputing gives the codes that are stored: what a chunk is does not depend on where it lies."""
    with open_coded(tmp_path, codec, kernels=kernels) as engine:
        chunks = fill(engine, LONG)
        refs = [c.ref() for c in chunks] + [SpanRef(chunks[0].chunk_id, 5, 9)]
        stored, recomputed = engine.compose(refs)
        files = {c.chunk_id: tensors(engine, c) for c in chunks}
        assert recomputed == ()
        for chunk in chunks:
            assert engine.store.delete(chunk.chunk_id)
        again, recomputed = engine.compose(refs)
        assert len(recomputed) == len(again.plans[0].refs) > 0
        assert torch.equal(again.kv, stored.kv)
        assert {c.chunk_id: tensors(engine, c) for c in chunks} == files


@pytest.mark.parametrize("codec", CODECS)
def test_a_prefix_from_memory_is_the_prefix_from_disk(tmp_path, codec):
    with open_coded(tmp_path, codec, memory_bytes=1 << 20) as engine:
        chunks = fill(engine, LONG)
        plan = engine.plan([SpanRef(c.chunk_id, 3, 20) for c in chunks[:3]])
        first, second = (engine._asking.composer.compose([plan], Stopwatch(CPU)) for _ in range(2))
        assert torch.equal(first.prefix.kv, second.prefix.kv)
        n_bytes = 3 * engine.store.codec.n_bytes(17)
        for composed, read, remembered in ((first, n_bytes, 0), (second, 0, n_bytes)):
            (loaded,) = composed.loaded
            assert (loaded.bytes_read, loaded.bytes_in_memory) == (read, remembered)
