"""Law: a prefix is the entries of its spans, each turned to its place, wherever they were cut from."""

from __future__ import annotations

import hashlib
from itertools import permutations

import pytest
import torch

from coinrag_integrations.engine.composer import Composer
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import choose_kernels, reference
from coinrag_integrations.engine.plan import PrefixPlan, Segment, plan_prefix
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import ChunkNotFoundError, CorruptChunkError
from coinrag_integrations.types import ChunkId, SpanRef
from tests.tiny import SUPPORTED, dynamic_cache, fill, forward, supported_model

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
    )


def compose(composer, plan, prompt, **options):
    return composer.compose(plan, prompt, Stopwatch(CPU), **options)


def prompt_of(engine) -> torch.Tensor:
    return encode(engine.model, [engine.prompt.head])[0]


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
    prompt = prompt_of(engine)
    whole = {c.chunk_id: encode(engine.model, [c.token_ids])[0] for c in chunks}
    before = digest_of(engine.store.root)
    for order in permutations(spans):
        plan = plan_prefix(order, n_prompt=len(prompt))
        prefix, recomputed = compose(composer, plan, prompt)
        assert recomputed == ()
        row = len(prompt)
        for ref in order:
            entries = whole[ref.chunk_id][ref.start : ref.stop]  # [T, L, 2, H, D]
            cos, sin = engine.model.rope.angles(range(row, row + len(ref)), CPU)
            keys, values = entries.permute(1, 2, 3, 0, 4).unbind(1)
            rows = slice(row, row + len(ref))
            torch.testing.assert_close(
                prefix.kv[:, 0, :, rows], reference.rotate(keys, cos, sin), rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(prefix.kv[:, 1, :, rows], values, rtol=1e-5, atol=1e-5)
            row += len(ref)
        assert prefix.n_entries == prefix.kv.shape[3] == row
    assert digest_of(engine.store.root) == before


def test_the_prompts_entries_come_first_and_are_the_models_own(engine, composer, chunks):
    prompt = prompt_of(engine)
    plan = plan_prefix([chunks[0].ref()], n_prompt=len(prompt))
    prefix, _ = compose(composer, plan, prompt)
    past = dynamic_cache(prefix.kv[:, :, :, : len(prompt)])
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
    plan = PrefixPlan(n_prompt=4, segments=segments, n_entries=30, length=75)
    logical = [0, 1, 2, 3, *range(9, 15), 31, *range(40, 59)]
    question = [101, 7, 300, 45, 2]

    def placed(positions) -> torch.Tensor:
        out = torch.empty(model.layout.prefix(30))
        reference.place(entries, *model.rope.angles(positions, CPU), out)
        return out

    absolute = forward(model.hf, question, dynamic_cache(placed(logical)), plan.length)
    aligned = forward(model.hf, question, dynamic_cache(placed(plan.positions())))
    packed = forward(model.hf, question, dynamic_cache(placed(range(30))))
    torch.testing.assert_close(aligned, absolute, rtol=1e-4, atol=1e-4)
    # Logits are scaled differently from family to family: Granite divides them.
    assert (packed - absolute).abs().max() > 0.05 * absolute.abs().max()


def test_a_plan_with_gaps_is_composed_right_aligned(engine, composer, chunks):
    prompt = prompt_of(engine)
    n = len(prompt)
    ref = SpanRef(chunks[0].chunk_id, 2, 9)
    segment = Segment(ref=ref, row=n, position=n + 50)
    plan = PrefixPlan(n_prompt=n, segments=(segment,), n_entries=n + 7, length=n + 80)
    assert plan.positions()[0] == -73
    prefix, _ = compose(composer, plan, prompt)
    entries = torch.cat([prompt, encode(engine.model, [chunks[0].token_ids])[0][2:9]])
    logical = [*range(n), *range(n + 50, n + 57)]
    absolute = torch.empty(engine.model.layout.prefix(n + 7))
    reference.place(entries, *engine.model.rope.angles(logical, CPU), absolute)
    question = [9, 8, 7]
    theirs = forward(engine.model.hf, question, dynamic_cache(absolute), n + 80)
    ours = forward(engine.model.hf, question, prefix.cache(3))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_room_is_kept_behind_the_entries(engine, composer, chunks):
    prompt = prompt_of(engine)
    plan = plan_prefix([chunks[0].ref()], n_prompt=len(prompt))
    prefix, _ = compose(composer, plan, prompt, room=13)
    assert prefix.room == 13
    assert prefix.n_entries == len(prompt) + len(chunks[0])


def test_bytes_read_are_those_of_the_spans_alone(engine, composer, chunks):
    watch = Stopwatch(CPU)
    refs = [SpanRef(chunks[0].chunk_id, 3, 5), SpanRef(chunks[1].chunk_id, 8, 17)]
    plan = plan_prefix(refs, n_prompt=len(prompt_of(engine)))
    composer.compose(plan, prompt_of(engine), watch)
    assert watch.bytes_read == 11 * engine.model.layout.bytes_per_entry


def test_a_prefix_without_spans_is_the_prompt(engine, composer):
    prompt = prompt_of(engine)
    prefix, _ = compose(composer, plan_prefix([], n_prompt=len(prompt)), prompt)
    assert prefix.n_entries == len(prompt)


def test_without_a_way_to_recompute_the_stores_error_is_raised(engine, composer, chunks):
    plan = plan_prefix([chunks[0].ref()], n_prompt=len(prompt_of(engine)))
    path = engine.store.path(chunks[0].chunk_id)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptChunkError):
        compose(composer, plan, prompt_of(engine))
    path.unlink()
    with pytest.raises(ChunkNotFoundError):
        compose(composer, plan, prompt_of(engine))


def test_only_what_failed_is_recomputed_and_each_chunk_once(engine, composer, chunks):
    refs = [chunks[0].ref(), SpanRef(chunks[1].chunk_id, 0, 4), SpanRef(chunks[1].chunk_id, 9, 12)]
    plan = plan_prefix(refs, n_prompt=len(prompt_of(engine)))
    whole, _ = compose(composer, plan, prompt_of(engine))
    engine.store.delete(chunks[1].chunk_id)
    asked: list[ChunkId] = []

    def recompute(chunk_id, error):
        asked.append(chunk_id)
        assert isinstance(error, ChunkNotFoundError)
        return encode(engine.model, [chunks[1].token_ids])[0]

    prefix, recomputed = compose(composer, plan, prompt_of(engine), recompute=recompute)
    assert asked == [chunks[1].chunk_id]
    assert recomputed == tuple(refs[1:])
    torch.testing.assert_close(prefix.kv, whole.kv, rtol=1e-5, atol=1e-5)
