"""Slots in a store: cut, planned, composed, mended and named as spans are."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig
from coinrag_integrations.engine.c2kv import Extractor, SlotEncoder
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.handles import mark
from coinrag_integrations.engine.kernels.reference import dequantise
from coinrag_integrations.engine.plan import Text, arrange, plan_prefix, without
from coinrag_integrations.errors import (
    BudgetError,
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    SpanError,
)
from coinrag_integrations.types import ChunkId, SpanRef
from tests.engine.c2kv.parts import trained
from tests.tiny import SUPPORTED, cache_of, dynamic_cache, fill, forward, placed, supported_model

LONG = "One two three four five six seven. " * 9
SHORT = GenerationConfig(max_new_tokens=4)
A, B = ChunkId("a" * 32), ChunkId("b" * 32)


def open_engine(folder, name: str = "llama", **options) -> Engine:
    """An engine that makes slots of 4 and of 8 tokens with an extractor whose weights are random."""
    model = supported_model(name)
    config = {"chunk_tokens": 30, "coverage": "all", "c2kv": (4, 8), "load": "read"} | options
    return Engine(model, folder, EngineConfig(**config), extractor=trained(model))


def slots_of(engine: Engine, chunk, ratio: int) -> torch.Tensor:
    """What the extractor makes of a chunk, without any store."""
    (slots,) = SlotEncoder.of(engine.model, trained(engine.model))([chunk.token_ids], ratio)
    return slots


def at(chunk_id: ChunkId, start: int, stop: int, ratio: int = 1) -> SpanRef:
    return SpanRef(chunk_id, start, stop, ratio)


# -- plans -------------------------------------------------------------------------------------


def test_slots_take_a_row_each_and_as_many_positions_as_they_have_tokens():
    """400 tokens have slots at 3, 7, … 399; the next document's first stands at 403."""
    plan = plan_prefix([at(A, 0, 400, 4), at(B, 0, 9, 4), Text((1, 2))])
    assert (plan.n_entries, plan.n_rows, plan.length) == (103, 105, 411)
    logical = plan.positions() + plan.length - plan.n_rows
    assert logical.tolist() == [*range(3, 400, 4), 403, 407, 408]
    assert (plan.online_positions() + plan.length - plan.n_rows).tolist() == [409, 410]


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 40)).map(
            lambda it: at(A, 0, it[1], it[0])
        ),
        max_size=6,
    ),
    st.integers(0, 5),
)
def test_rows_and_positions_of_any_mix(refs, n_head):
    """Brute force: every token has a position, an entry stands where the last token of its block does."""
    plan = plan_prefix([Text(tuple(range(n_head))), *refs, Text((7,) * 3)])
    n_cached = n_head if refs else 0
    positions, position = list(range(n_cached)), n_head
    for ref in refs:
        tokens = range(position, position + len(ref))
        blocks = [tokens[i : i + ref.ratio] for i in range(0, len(ref), ref.ratio)]
        positions += [block[-1] for block in blocks]
        position += len(ref)
    found = plan.positions() + plan.length - plan.n_rows
    assert found.tolist() == positions
    assert plan.length == position + 3
    assert plan.n_entries == len(positions)
    assert plan.n_rows == plan.n_entries + (3 if refs else 3 + n_head)


def test_a_budget_is_of_rows_and_the_window_of_tokens():
    pieces = [at(A, 0, 400, 4)]
    assert plan_prefix(pieces, max_entries=100, window=400).n_entries == 100
    with pytest.raises(BudgetError, match="100 span entries"):
        plan_prefix(pieces, max_entries=99)
    with pytest.raises(BudgetError, match="100 rows stand for 400 tokens"):
        plan_prefix(pieces, window=399)
    with pytest.raises(ConfigError, match="5 kept rows cannot stand before slots"):
        plan_prefix(pieces, n_kept=5)


def test_spans_and_slots_of_a_chunk_stand_in_the_order_of_its_text():
    refs = [
        at(A, 8, 12, 4),
        at(B, 0, 3),
        at(A, 3, 7),
        at(A, 12, 15, 4),
        at(A, 4, 8, 4),
        at(A, 6, 9),
    ]
    assert arrange(refs) == [at(A, 3, 9), at(A, 4, 15, 4), at(B, 0, 3)]


def test_a_slot_begins_at_a_multiple_of_its_ratio():
    with pytest.raises(SpanError, match="does not begin with a slot"):
        at(A, 2, 8, 4)
    with pytest.raises(SpanError, match="ratio"):
        at(A, 0, 8, 0)
    assert [at(A, 4, stop, 4).n_entries for stop in (5, 8, 9)] == [1, 1, 2]


def test_what_is_left_behind_whole_pieces_keeps_its_ratio():
    assert without([Text((1, 2)), at(A, 0, 9, 4)], 2) == [at(A, 0, 9, 4)]


# -- stores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_slots_are_stored_beside_entries_and_read_as_they_were_made(tmp_path, codec):
    with open_engine(tmp_path, codec=codec, batch_tokens=1) as engine:
        chunks = fill(engine, LONG)
        assert [len(chunk) for chunk in chunks[:2]] == [30, 30]
        for chunk in chunks:
            for ratio in (4, 8):
                store = engine.forms.stores[ratio]
                header = store.verify(chunk.chunk_id)
                n = -(-len(chunk) // ratio)
                assert (header.n_tokens, header.n_entries) == (len(chunk), n)
                stage = store.stage([replace(chunk.ref(), ratio=ratio)])
                assert store.read(stage).errors == {}
                wanted = slots_of(engine, chunk, ratio)
                found = stage.entries(slice(0, 1))
                if codec == "none":
                    assert torch.equal(found, wanted)
                else:
                    error = (dequantise(found) - wanted).abs().max()
                    assert error < 0.02 * wanted.abs().max()
        assert len({store.root for store in engine.forms.stores.values()}) == 3
        with pytest.raises(SpanError, match="one for every 4"):
            engine.forms.stores[4].stage([chunks[0].ref()])


def test_some_slots_are_read_alone(tmp_path):
    with open_engine(tmp_path) as engine:
        chunk = fill(engine, LONG)[0]  # 30 tokens: the last slot stands for two
        slots, store = slots_of(engine, chunk, 4), engine.forms.stores[4]
        refs = [at(chunk.chunk_id, a, b, 4) for a, b in ((8, 16), (28, 30), (0, 4))]
        stage = store.stage(refs)
        assert store.read(stage).errors == {}
        found = stage.entries(slice(0, 3))
        torch.testing.assert_close(found, torch.cat((slots[2:4], slots[7:], slots[:1])))


def test_a_slot_is_not_cut(tmp_path):
    with open_engine(tmp_path) as engine:
        chunk = fill(engine, LONG)[0]
        cut = at(chunk.chunk_id, 0, 6, 4)
        stage = engine.forms.stores[4].stage([cut])
        (error,) = engine.forms.stores[4].read(stage).errors.values()
        assert isinstance(error, ChunkNotFoundError)
        with pytest.raises(SpanError, match="cuts one of its slots of 4 tokens"):
            engine.answer("Who?", [cut], SHORT)
        assert engine.is_stored(chunk)  # and nothing was written for it


def test_a_ratio_that_is_not_there_is_refused(tmp_path):
    with open_engine(tmp_path, c2kv=(4,)) as engine:
        chunk = fill(engine, LONG)[0]
        with pytest.raises(ConfigError, match="no slots for every 8 tokens, only for 4"):
            engine.answer("Who?", [replace(chunk.ref(), ratio=8)], SHORT)


@pytest.mark.parametrize("ratios", [(1,), (33,), (4, 4)])
def test_ratios_that_make_no_sense_are_refused(ratios):
    with pytest.raises(ConfigError, match="c2kv"):
        EngineConfig(c2kv=ratios)


def test_slots_of_another_extractor_are_not_used(tmp_path):
    with open_engine(tmp_path) as engine:
        chunk = fill(engine, LONG)[0]
        before = {ratio: store.root for ratio, store in engine.forms.stores.items()}
    config = EngineConfig(chunk_tokens=30, coverage="all", c2kv=(4,), load="read")
    other = Extractor.untrained(engine.model)
    with Engine(engine.model, tmp_path, config, extractor=other) as engine:
        assert engine.store.root == before[1]
        assert engine.forms.stores[4].root not in before.values()
        assert not engine.is_stored(chunk)
        ref = replace(chunk.ref(), ratio=4)
        assert engine.answer("Who?", [ref], SHORT).recomputed == (ref,)
        assert engine.answer("Who?", [ref], SHORT).recomputed == ()


@pytest.mark.parametrize("damage", ["delete", "flip"])
def test_lost_slots_are_made_again(tmp_path, damage):
    with open_engine(tmp_path, batch_tokens=1) as engine:
        chunks = fill(engine, LONG)
        refs = [
            replace(chunks[0].ref(), ratio=4),
            chunks[1].ref(),
            replace(chunks[1].ref(), ratio=8),
        ]
        good, _ = engine.compose(refs)
        path = engine.forms.stores[4].path(chunks[0].chunk_id)
        if damage == "delete":
            path.unlink()
        else:
            data = bytearray(path.read_bytes())
            data[-1000] ^= 1
            path.write_bytes(data)
        mended, recomputed = engine.compose(refs)
        assert recomputed == (refs[0],)
        assert torch.equal(mended.kv, good.kv)
        again, recomputed = engine.compose(refs)
        assert recomputed == ()
        assert torch.equal(again.kv, good.kv)


def test_who_may_not_recompute_is_told(tmp_path):
    with open_engine(tmp_path, on_miss="raise") as engine:
        chunk = fill(engine, LONG)[0]
        path = engine.forms.stores[8].path(chunk.chunk_id)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(CorruptChunkError):
            engine.answer("Who?", [replace(chunk.ref(), ratio=8)], SHORT)


def test_removed_chunks_lose_their_slots(tmp_path):
    with open_engine(tmp_path) as engine:
        chunk = fill(engine, LONG)[0]
        engine.remove_chunk(chunk.chunk_id)
        assert not any(chunk.chunk_id in store for store in engine.forms.stores.values())


def test_slots_in_memory_are_not_taken_for_entries(tmp_path):
    with open_engine(tmp_path, memory_bytes=1 << 20) as engine:
        chunk = fill(engine, LONG)[0]
        refs = [replace(chunk.ref(), ratio=ratio) for ratio in (1, 4, 8)]
        for ref in (*refs, *refs):
            prefix, _ = engine.compose([ref])
            n = len(engine.prompt.head)
            assert prefix.n_entries == n + ref.n_entries
        answers = [engine.answer("Who?", [ref], SHORT) for ref in refs]
        assert all(answer.timings.bytes_read == 0 for answer in answers)


# -- prefixes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_mix_of_spans_and_slots_gives_the_logits_of_absolute_positions(name, tmp_path):
    """Composed right-aligned, against the same entries at their own positions and explicit ids."""
    with open_engine(tmp_path, name) as engine:
        chunks = fill(engine, LONG)
        refs = [
            replace(chunks[0].ref(), ratio=4),
            at(chunks[1].chunk_id, 3, 11),
            at(chunks[2].chunk_id, 8, 24, 8),
        ]
        head, question = engine.prompt.head, [5, 6, 7, 8]
        prefix, recomputed = engine.compose(refs, room=len(question))
        assert recomputed == ()
        n, whole = len(head), encode(engine.model, [chunks[1].token_ids])[0]
        entries = torch.cat(
            (
                encode(engine.model, [head])[0],
                slots_of(engine, chunks[0], 4),
                whole[3:11],
                slots_of(engine, chunks[2], 8)[1:3],
            )
        )
        first = [n + min(4 * i + 3, 29) for i in range(8)]
        positions = [*range(n), *first, *range(n + 30, n + 38), n + 45, n + 53]
        length = n + 30 + 8 + 16
        assert (prefix.n_entries, prefix.plans[0].length) == (len(positions), length)
        absolute = dynamic_cache(placed(engine.model, entries, positions))
        theirs = forward(engine.model.hf, question, absolute, length)
        ours = forward(engine.model.hf, question, cache_of(prefix, len(question)))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_documents_in_any_order_have_the_same_slots_before_rope(tmp_path):
    """[A, B] and [B, A]: what a document's entries are does not depend on its neighbours."""
    with open_engine(tmp_path) as engine:
        chunks = fill(engine, LONG)
        refs = [replace(chunk.ref(), ratio=4) for chunk in chunks[:3]]
        n = len(engine.prompt.head)
        wanted = {chunk.chunk_id: slots_of(engine, chunk, 4) for chunk in chunks[:3]}
        for order in permutations(refs):
            prefix, _ = engine.compose(order)
            positions, row = prefix.plans[0].positions(), n
            for ref in order:
                rows = slice(row, row + ref.n_entries)
                expected = placed(engine.model, wanted[ref.chunk_id], positions[rows])
                torch.testing.assert_close(prefix.kv[..., rows, :], expected, rtol=1e-5, atol=1e-5)
                row += ref.n_entries


@settings(max_examples=25)
@given(data=st.data())
def test_prefixes_side_by_side_are_those_alone(data, tmp_path_factory):
    engine = _shared(tmp_path_factory)
    chunks = list(engine.catalog.chunks())
    ref = st.builds(
        lambda chunk, ratio: replace(chunk.ref(), ratio=ratio),
        st.sampled_from(chunks),
        st.sampled_from([1, 4, 8]),
    )
    lists = data.draw(st.lists(st.lists(ref, max_size=4), min_size=1, max_size=3))
    requests = [("Who?", refs) for refs in lists]
    for (_, refs), answer in zip(requests, engine.answer_batch(requests, SHORT), strict=True):
        assert answer.text == engine.answer("Who?", refs, SHORT).text
        assert answer.spans == tuple(arrange(refs))


_ENGINES: list[Engine] = []


def _shared(tmp_path_factory) -> Engine:
    if not _ENGINES:
        engine = open_engine(tmp_path_factory.mktemp("shared"))
        fill(engine, LONG)
        _ENGINES.append(engine)
    return _ENGINES[0]


# -- handles and conversations -----------------------------------------------------------------


def test_a_handle_says_the_ratio_and_is_believed_for_no_other(tmp_path):
    with open_engine(tmp_path) as engine:
        chunk = fill(engine, LONG)[0]
        raw, slots, fewer = (replace(chunk.ref(), ratio=ratio) for ratio in (1, 4, 8))
        handles = {ref.ratio: engine.handles.handle(ref) for ref in (raw, slots, fewer)}
        assert handles[4].startswith("⟦k4:")
        assert handles[1].startswith("⟦k:")
        for ref in (raw, slots, fewer):
            marked = mark(handles[ref.ratio], chunk.text)
            assert engine.handles.resolve(marked).pieces == (ref,)
        forged = mark(handles[4].replace("⟦k4:", "⟦k8:"), chunk.text)
        assert engine.handles.resolve(forged).refused == {"unknown": 1}
        forged = mark(handles[4].replace("⟦k4:", "⟦k:"), chunk.text)
        assert engine.handles.resolve(forged).pieces == (chunk.text,)
        altered = mark(handles[4], f"{chunk.text}!")
        assert engine.handles.resolve(altered).refused == {"altered": 1}
        assert engine.handles.handle(replace(raw, ratio=16)) == ""
        named = engine.handles.name(slots)
        assert [ref for _, ref in engine.handles.named(named)] == [slots]


def test_a_prompt_with_slots_is_answered_from_them(tmp_path):
    with open_engine(tmp_path) as engine:
        chunk = fill(engine, LONG)[0]
        ref = replace(chunk.ref(), ratio=4)
        text = f"Read: {mark(engine.handles.handle(ref), chunk.text)} Who?"
        stream = engine.complete(text, SHORT)
        "".join(stream)
        assert stream.answer.spans == (ref,)
        again = engine.complete(text, SHORT)
        assert "".join(again) == stream.answer.text
        # A prompt that ends in slots has the tokens of the last one computed.
        ends = engine.complete(f"Read: {mark(engine.handles.handle(ref), chunk.text)}", SHORT)
        "".join(ends)
        assert ends.answer.usage.online >= 2


def test_what_an_earlier_turn_left_is_not_put_before_slots(tmp_path):
    """Its rows stand at their own numbers, those before slots do not: nothing of it can be used."""
    begin = "Read this first, word by word, and then answer. " * 3
    answers = []
    for turn in ("after another turn", "alone"):
        with open_engine(tmp_path / turn) as engine:
            chunk = fill(engine, LONG)[0]
            ref = replace(chunk.ref(), ratio=8)
            if turn == "after another turn":
                "".join(engine.complete(f"{begin}Who?", SHORT))
                left = engine.complete(f"{begin}Where?", SHORT)
                "".join(left)
                assert left.answer.usage.kept > 0, "there is something that could be used"
            text = f"{begin}{mark(engine.handles.handle(ref), chunk.text)} Who?"
            stream = engine.complete(text, GenerationConfig(max_new_tokens=8))
            "".join(stream)
            assert stream.answer.spans == (ref,)
            answers.append(stream.answer)
    after, alone = answers
    assert after.text == alone.text
    assert after.usage.kept == 0
