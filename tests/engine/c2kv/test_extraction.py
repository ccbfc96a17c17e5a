"""Laws of C2KV: who sees whom, where slots stand, and that documents are none the wiser."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.c2kv import Blocks, Extractor, SlotEncoder
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.errors import BudgetError, ConfigError
from tests.engine.c2kv.parts import allowed, one_pass, trained
from tests.tiny import SUPPORTED, placed, supported_model, tiny_model

FEW = settings(deadline=None, max_examples=15)
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "smollm3", "gpt-neox", "qwen2-mixed"]
IDS = [3 + (37 * i) % 500 for i in range(61)]
token_ids = st.lists(st.integers(0, 511), max_size=40)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("weights", ["untrained", "low-rank", "copies"])
def test_two_passes_are_the_papers_one_pass(name: str, weights: str):
    """Document and slots in one pass, under the mask as a matrix, with projections by row."""
    model = supported_model(name)
    extractor = trained(model, copies=weights == "copies")
    if weights == "untrained":
        extractor = Extractor.untrained(model)
    blocks = Blocks(ratio=4)
    (slots,) = SlotEncoder.of(model, extractor)([IDS], 4)
    theirs = one_pass(model, extractor, IDS, blocks)
    # Angles are fp32 there; tiny models of random weights amplify that.
    torch.testing.assert_close(
        placed(model, slots, blocks.positions(61)), theirs[..., 61:, :], rtol=1e-3, atol=1e-3
    )
    (document,) = encode(model, [IDS])
    torch.testing.assert_close(
        placed(model, document, range(61)), theirs[..., :61, :], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize(("ratio", "overlap"), [(2, 0), (3, 5), (8, 2), (16, 0), (32, 64), (80, 0)])
@pytest.mark.parametrize("init", ["last", "eos", "mean"])
def test_ratios_overlaps_and_inits_are_those_of_one_pass(ratio: int, overlap: int, init: str):
    model = supported_model("llama")
    extractor = trained(model, init=init, overlap=overlap)
    blocks = Blocks(ratio=ratio, overlap=overlap)
    (slots,) = SlotEncoder.of(model, extractor)([IDS], ratio)
    theirs = one_pass(model, extractor, IDS, blocks)[..., 61:, :]
    close(placed(model, slots, blocks.positions(61)), theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_are_the_same_to_the_bit_with_and_without_slots(name: str):
    model = supported_model(name)
    (before,) = encode(model, [IDS])
    kept = before.clone()
    SlotEncoder.of(model, trained(model))([IDS], 4, [before])
    assert torch.equal(before, kept)
    assert torch.equal(encode(model, [IDS])[0], kept)


@pytest.mark.parametrize("name", ["llama", "mistral-windowed", "gemma3"])
@pytest.mark.parametrize("overlap", [0, 3])
def test_a_slot_changes_only_with_entries_that_it_sees(name: str, overlap: int):
    """Each row of the document's KV is changed in turn.

    In the second layer a slot has looked at rows once, so it changes with those that it sees; in the
    last one also with those that slots before it see; with nothing behind its block in any.
    """
    model = supported_model(name)
    blocks, n = Blocks(ratio=4, overlap=overlap), 30
    encoder = SlotEncoder.of(model, trained(model, overlap=overlap))
    (entries,) = encode(model, [IDS[:n]])
    changed = entries.repeat(n + 1, 1, 1, 1, 1, 1)
    for token in range(n):  # the last copy stays as it is
        changed[token, token] += 1.0
    *found, same = encoder([IDS[:n]] * (n + 1), 4, list(changed))
    window = next((it for it in model.layer_windows if it is not None), None)
    last = blocks.positions(n)
    for token in range(n):
        moved = (found[token] - same).abs().amax((2, 3, 4))  # [S, L]
        for slot in range(blocks.n_slots(n)):
            sees = allowed(token, slot, n, blocks)
            sees = sees and (window is None or last[slot] - token < window)
            assert (moved[slot, 1] > 1e-4) == sees, (token, slot)
            assert moved[slot, 0] < 1e-5
            if token >= (slot + 1) * 4:
                assert moved[slot].max() < 1e-5
            elif window is None:
                assert moved[slot, -1] > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_what_stands_behind_a_block_changes_no_slot_of_it(name: str):
    model = supported_model(name)
    encoder = SlotEncoder.of(model, trained(model))
    other = [*IDS[:32], *(i + 1 for i in IDS[32:])]
    a, b = encoder([IDS], 4)[0], encoder([other], 4)[0]
    assert torch.equal(a[:8], b[:8])
    assert (a[8:] - b[8:]).abs().amax((1, 2, 3, 4)).min() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
@FEW
@given(
    sequences=st.lists(token_ids, min_size=1, max_size=5),
    ratio=st.sampled_from([2, 3, 4, 8, 16, 32]),
)
def test_a_padded_batch_is_one_by_one(name: str, sequences: list[list[int]], ratio: int):
    encoder = SlotEncoder.of(supported_model(name))
    together = encoder(sequences, ratio)
    for slots, ids in zip(together, sequences, strict=True):
        (alone,) = encoder([ids], ratio)
        n_slots = -(-len(ids) // ratio)
        assert slots.shape == alone.shape == encoder.model.layout.staged(n_slots)
        close(slots, alone)


@pytest.mark.parametrize("init", ["last", "eos", "mean"])
def test_trained_slots_in_a_batch_are_those_alone(init: str):
    model = supported_model("qwen3")
    encoder = SlotEncoder.of(model, trained(model, init=init, overlap=2))
    documents = [IDS, IDS[:3], [], IDS[7:8], IDS[20:41]]
    for slots, ids in zip(encoder(documents, 4), documents, strict=True):
        close(slots, encoder([ids], 4)[0])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("overlap", [0, 7])
def test_groups_are_one_shot(name: str, group: int, overlap: int):
    model = supported_model(name)
    encoder = SlotEncoder.of(model, trained(model, overlap=overlap))
    documents = [IDS, IDS[5:20], IDS[:4]]
    for a, b in zip(encoder(documents, 4, group=group), encoder(documents, 4), strict=True):
        close(a, b)


def test_groups_never_see_all_of_a_long_document(monkeypatch: pytest.MonkeyPatch):
    model = supported_model("llama")
    sizes: list[tuple[int, ...]] = []
    seen = Blocks.seen

    def watched(self, *args):
        masks = seen(self, *args)
        sizes.extend(mask.shape for mask in masks.values())
        return masks

    monkeypatch.setattr(Blocks, "seen", watched)
    document = [3 + i % 500 for i in range(1600)]
    (slots,) = SlotEncoder.of(model)([document], 4, group=50)
    assert len(slots) == 400
    assert max(columns for *_, columns in sizes) == 4 + 50 * 4 + 400
    assert len(sizes) == 8


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ratio", [1, 2, 4, 7])
def test_untrained_slots_begin_as_the_last_tokens_of_their_blocks(name: str, ratio: int):
    """In the first layer they are these tokens' entries; deeper ones differ by what they have seen."""
    model = supported_model(name)
    (slots,), (entries,) = SlotEncoder.of(model)([IDS], ratio), encode(model, [IDS])
    strided = entries[Blocks(ratio=ratio).positions(len(IDS))]
    close(slots[:, 0], strided[:, 0])
    assert (slots[3:, 1:] - strided[3:, 1:]).abs().amax((1, 2, 3, 4)).min() > 1e-3


@pytest.mark.parametrize("name", SUPPORTED)
def test_untrained_slots_of_one_token_each_are_the_tokens_while_all_is_seen_twice(name: str):
    """Ratio 1: the first slot sees its token and itself, the second both tokens and both slots. Every key
    counts twice, so attention gives what it gives the tokens; from the third on, slots see no
    longer all tokens.
    """
    model = supported_model(name)
    (slots,), (entries,) = SlotEncoder.of(model)([IDS], 1), encode(model, [IDS])
    assert len(slots) == len(entries)
    close(slots[:2], entries[:2])
    assert (slots[2:, -1] - entries[2:, -1]).abs().amax((1, 2, 3)).min() > 1e-4


def test_orders_of_documents_give_each_the_same_slots():
    encoder = SlotEncoder.of(supported_model("llama"))
    a, b = IDS[:21], IDS[21:]
    first, second = encoder([a, b], 4)
    other_second, other_first = encoder([b, a], 4)
    close(first, other_first)
    close(second, other_second)


def test_no_documents_empty_ones_and_short_ones():
    encoder = SlotEncoder.of(supported_model("llama"))
    assert encoder([], 4) == []
    assert [len(it) for it in encoder([[], []], 4)] == [0, 0]
    lengths = [0, 1, 3, 4, 5, 8, 9]
    found = encoder([IDS[:n] for n in lengths], 4)
    assert [len(it) for it in found] == [0, 1, 1, 1, 2, 2, 3]
    assert all(it.isfinite().all() for it in found)


def test_a_document_longer_than_the_window_and_other_ratios_are_refused():
    encoder = SlotEncoder.of(tiny_model(max_position_embeddings=64))
    with pytest.raises(BudgetError, match="window of 64"):
        encoder([[1] * 65], 4)
    with pytest.raises(ConfigError, match="blocks of 0 tokens"):
        encoder([[1] * 6], 0)
    with pytest.raises(ConfigError, match="see -1 before"):
        Blocks(ratio=4, overlap=-1)


def test_a_bf16_model_makes_bf16_slots():
    model = tiny_model(dtype=torch.bfloat16)
    (slots,) = SlotEncoder.of(model, trained(model))([IDS], 4)
    assert slots.dtype == torch.bfloat16
    assert slots.isfinite().all()


# -- blocks --------------------------------------------------------------------------------------


def test_slots_stand_at_the_last_real_token_of_their_block():
    assert Blocks(ratio=4).positions(400).tolist() == list(range(3, 400, 4))
    assert Blocks(ratio=4).positions(10).tolist() == [3, 7, 9]
    assert Blocks(ratio=8).positions(3).tolist() == [2]
    assert Blocks(ratio=4).positions(0).tolist() == []


@FEW
@given(
    n=st.integers(1, 60),
    ratio=st.integers(1, 33),
    overlap=st.integers(0, 40),
    group=st.integers(1, 9),
)
def test_the_mask_is_the_papers(n: int, ratio: int, overlap: int, group: int):
    blocks, cpu = Blocks(ratio=ratio, overlap=overlap), torch.device("cpu")
    lengths = [n, n // 2 + 1]
    for first in range(0, blocks.n_slots(n), group):
        stop = min(first + group, blocks.n_slots(n))
        tokens = blocks.tokens(first, stop, n)
        assert len(set(tokens)) == len(tokens)
        assert all(0 <= token < n for token in tokens)
        seen = blocks.seen(first, stop, lengths, (None,), cpu)[None]
        for b, length in enumerate(lengths):
            for row, slot in enumerate(range(first, min(stop, blocks.n_slots(length)))):
                wanted = {t for t in range(n) if allowed(t, slot, length, blocks)}
                mine = seen[b, 0, row]
                found = {t for t, yes in zip(tokens, mine[: len(tokens)], strict=True) if yes}
                assert found == wanted
                assert mine[len(tokens) :].tolist() == [s <= slot for s in range(stop)]
        assert seen.any(-1).all(), "no row of a softmax is empty"
