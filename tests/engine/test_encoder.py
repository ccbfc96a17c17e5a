"""Law: entries encoded once, alone, and placed anywhere are what the model computes there."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine import hf
from coinrag_integrations.engine.encoder import batches, encode
from coinrag_integrations.engine.prefix import empty_kv
from coinrag_integrations.errors import BudgetError
from tests.tiny import SUPPORTED, forward, own_kv, placed, supported_model, tiny_model

CPU = torch.device("cpu")
FEW = settings(deadline=None, max_examples=25)
token_ids = st.lists(st.integers(0, 511), min_size=1, max_size=40)


def placed_at(model, entries: torch.Tensor, start: int) -> torch.Tensor:
    return placed(model, entries, range(start, start + len(entries)))


@pytest.mark.parametrize("name", SUPPORTED)
@FEW
@given(ids=token_ids, offset=st.integers(0, 2000))
def test_entries_placed_at_an_offset_are_the_models_own_there(name, ids, offset):
    model = supported_model(name)
    ours = placed_at(model, encode(model, [ids])[0], offset)
    theirs = own_kv(model.hf, ids, offset)
    # transformers takes its angles in fp32: at 2,000 they are off by 1e-4, which attention amplifies
    # from layer to layer. A wrong position gives an error of about 1.
    # (The padding token's embedding, and with it its KV, is zero in some models.)
    size = theirs.flatten(2).norm(dim=-1).clamp_min(1e-3)
    error = (ours - theirs).flatten(2).norm(dim=-1) / size
    assert error.shape == (model.layout.n_layers, 2)
    assert error.max() < 3e-3


@pytest.mark.parametrize("name", SUPPORTED)
def test_entries_placed_at_another_offset_are_not_the_models_own(name):
    model = supported_model(name)
    ids = list(range(3, 30))
    wrong = placed_at(model, encode(model, [ids])[0], 100)
    assert (wrong[:, 0] - own_kv(model.hf, ids, 101)[:, 0]).abs().max() > 0.1


@pytest.mark.parametrize("name", SUPPORTED)
@FEW
@given(sequences=st.lists(token_ids, min_size=1, max_size=5))
def test_a_padded_batch_equals_encoding_one_by_one(name, sequences):
    model = supported_model(name)
    together = encode(model, sequences)
    for entries, ids in zip(together, sequences, strict=True):
        alone = encode(model, [ids])[0]
        assert entries.shape == alone.shape == model.layout.staged(len(ids))
        assert (entries - alone).norm() <= 2e-5 * alone.norm()


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_padded_batch_behind_a_prefix_equals_one_forward_pass(name):
    model = supported_model(name)
    head, sequences = list(range(40, 59)), [list(range(5, 30)), [7, 8, 9], list(range(90, 101))]
    behind = placed_at(model, encode(model, [head])[0], 0)
    for entries, ids in zip(encode(model, sequences, behind), sequences, strict=True):
        theirs = own_kv(model.hf, [*head, *ids])[..., len(head) :, :]
        ours = placed_at(model, entries, len(head))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def test_sequences_do_not_change_the_prefix_they_are_encoded_behind():
    model = supported_model("llama")
    behind = placed_at(model, encode(model, [[4, 5, 6]])[0], 0)
    before = behind.clone()
    encode(model, [[7, 8], [9]], behind)
    assert torch.equal(behind, before)


def test_no_sequences_and_empty_sequences_are_encoded_to_nothing():
    model = supported_model("llama")
    assert encode(model, []) == []
    assert [e.shape for e in encode(model, [[], []])] == [model.layout.staged(0)] * 2
    mixed = encode(model, [[], [5, 6]])
    assert [len(e) for e in mixed] == [0, 2]


def test_a_chunk_longer_than_the_window_is_refused_with_the_numbers():
    model = tiny_model(max_position_embeddings=64)
    behind = placed_at(model, encode(model, [[1] * 10])[0], 0)
    with pytest.raises(BudgetError, match=r"55 tokens behind 10 prompt tokens.* window of 64"):
        encode(model, [[1] * 55], behind)
    assert len(encode(model, [[1] * 54], behind)[0]) == 54


def test_the_models_module_is_as_before_after_encoding():
    model = supported_model("qwen2")
    module = __import__("sys").modules[type(model.hf).__module__]
    before = module.apply_rotary_pos_emb
    encode(model, [[1, 2, 3]])
    assert module.apply_rotary_pos_emb is before
    with pytest.raises(IndexError):
        encode(model, [[10_000]])
    assert module.apply_rotary_pos_emb is before


def test_encoding_and_generating_in_many_threads_do_not_mix():
    model = supported_model("llama")
    sequences = [[i + 3] * (i + 2) for i in range(8)]
    expected = [encode(model, [ids])[0] for ids in sequences]
    logits = forward(model.hf, sequences[-1])[-1]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(5):
            if not torch.allclose(encode(model, [sequences[i]])[0], expected[i], atol=1e-5):
                wrong.append(i)
            cache = hf.prefix_cache(empty_kv(model.layout, 16, CPU), 0)
            ours = hf.next_logits(model.hf, torch.tensor([sequences[-1]]), cache)
            if not torch.allclose(ours, logits, atol=1e-4):
                wrong.append(-i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sequences))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@given(lengths=st.lists(st.integers(1, 60), max_size=30), max_tokens=st.integers(1, 200))
def test_batches_are_consecutive_complete_and_bounded(lengths, max_tokens):
    runs = list(batches(lengths, max_tokens))
    assert [i for run in runs for i in run] == list(range(len(lengths)))
    for run in runs:
        padded = len(run) * max(lengths[i] for i in run)
        assert len(run) == 1 or padded <= max_tokens


@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=30), max_tokens=st.integers(1, 200)
)
def test_a_batch_ends_only_where_one_more_chunk_would_not_fit(lengths, max_tokens):
    runs = list(batches(lengths, max_tokens))
    for run in runs[:-1]:
        longest = max(lengths[i] for i in (*run, run.stop))
        assert longest * (len(run) + 1) > max_tokens
