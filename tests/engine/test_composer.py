"""Law: a prefix is the entries of its spans, each turned to its place, wherever they were cut from."""

from __future__ import annotations

import hashlib
from itertools import permutations

import pytest
import torch
import transformers

from coinrag_integrations.engine import composer as composer_module
from coinrag_integrations.engine.composer import Composer, _cut
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.engine.plan import PrefixPlan, Segment, Text, plan_prefix
from coinrag_integrations.engine.prompt_cache import PromptCache
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.upload import Uploader
from coinrag_integrations.engine.visibility import HIDDEN
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError
from coinrag_integrations.types import ChunkId, SpanRef
from tests.tiny import (
    SUPPORTED,
    cache_of,
    dynamic_cache,
    fill,
    forward,
    placed,
    supported_model,
)

CPU = torch.device("cpu")


@pytest.fixture
def chunks(engine):
    return fill(engine, "One two three four five six seven. " * 9)


@pytest.fixture
def composer(engine):
    return Composer(
        layout=engine.model.layout,
        rope=engine.model.rope,
        kernels=choose_kernels("torch", CPU),
        device=CPU,
        store=engine.store,
        prompts=PromptCache(encode=lambda ids: encode(engine.model, [ids])[0]),
        uploader=Uploader.of(CPU),
    )


def plan_of(engine, refs) -> PrefixPlan:
    return plan_prefix([Text(engine.prompt.head), *refs])


def compose(composer, plan, **options):
    composed = composer.compose([plan], Stopwatch(CPU), **options)
    return composed.prefix, composed.recomputed[0]


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
    watch = Stopwatch(CPU)
    refs = [SpanRef(chunks[0].chunk_id, 3, 5), SpanRef(chunks[1].chunk_id, 8, 17)]
    composer.compose([plan_of(engine, refs)], watch)
    assert watch.bytes_read == 11 * engine.model.layout.bytes_per_entry


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


@pytest.mark.parametrize("piece_bytes", [1, 5000, None])
def test_pieces_are_consecutive_and_together_everything(piece_bytes):
    refs = [SpanRef(ChunkId("a" * 32), 0, n) for n in (3, 1, 7, 2, 2)]
    pieces = list(_cut(refs, 4, 1000, piece_bytes))
    assert [i for p in pieces for i in range(len(refs))[p.refs]] == list(range(5))
    assert [r for p in pieces for r in range(p.read.start, p.read.stop)] == list(range(4, 19))
    assert [r for p in pieces for r in range(p.place.start, p.place.stop)] == list(range(19))
    assert len(pieces) == {1: 5, 5000: 2, None: 1}[piece_bytes]
    (only,) = _cut([], 4, 1000, piece_bytes)
    assert (only.read, only.place) == (slice(4, 4), slice(0, 4))


def test_a_prefix_made_in_pieces_is_the_prefix_made_at_once(engine, composer, chunks, monkeypatch):
    refs = [SpanRef(c.chunk_id, a, a + 5) for a in (0, 9, 20) for c in chunks[:3]]
    plan = plan_of(engine, refs)
    whole, _ = compose(composer, plan)
    cut = composer_module._cut
    monkeypatch.setattr(composer_module, "_cut", lambda a, b, c, _: cut(a, b, c, 1))
    engine.store.delete(chunks[1].chunk_id)
    prefix, recomputed = compose(
        composer, plan, recompute=lambda *_: encode(engine.model, [chunks[1].token_ids])[0]
    )
    torch.testing.assert_close(prefix.kv, whole.kv, rtol=1e-5, atol=1e-5)
    assert recomputed == tuple(ref for ref in refs if ref.chunk_id == chunks[1].chunk_id)


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

    def recompute(chunk_id, error):
        asked.append(chunk_id)
        assert isinstance(error, ChunkNotFoundError)
        return encode(engine.model, [chunks[1].token_ids])[0]

    prefix, recomputed = compose(composer, plan, recompute=recompute)
    assert asked == [chunks[1].chunk_id]
    assert recomputed == tuple(refs[1:])
    torch.testing.assert_close(prefix.kv, whole.kv, rtol=1e-5, atol=1e-5)
