from __future__ import annotations

import pytest
import torch

from tests.tiny import cache_of, forward, prefix_of, supported_model

HEAD = list(range(20, 29))


@pytest.fixture(params=[0, 4, 20])
def prefix(request):
    model = supported_model("llama")
    return prefix_of(model, HEAD, request.param)


def test_a_cache_has_the_length_of_the_entries_and_grows_with_the_question(prefix):
    cache = cache_of(prefix, 5)
    assert cache.get_seq_length() == 9
    forward(supported_model("llama").hf, [1, 2, 3], cache)
    assert cache.get_seq_length() == 12
    assert prefix.n_entries == 9


def test_questions_one_after_the_other_get_the_logits_of_fresh_ones(prefix):
    model = supported_model("llama").hf
    for question in ([3, 4, 5], [400], [9, 9, 9, 9, 9, 9], [3, 4, 5]):
        ours = forward(model, question, cache_of(prefix, len(question)))
        theirs = forward(model, [*HEAD, *question])[len(HEAD) :]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_entries_are_not_touched_by_a_question(prefix):
    before = prefix.kv[..., :9, :].clone()
    forward(supported_model("llama").hf, [1, 2, 3, 4], cache_of(prefix, 4))
    assert torch.equal(prefix.kv[..., :9, :], before)


def test_no_copy_is_made_where_there_is_room(prefix):
    cache = cache_of(prefix, 4)
    shared = cache.layers[0].keys.data_ptr() == prefix.kv.data_ptr()
    assert shared == (prefix.room >= 4)


def test_a_question_token_by_token_is_the_question_at_once(prefix):
    model = supported_model("llama").hf
    cache = cache_of(prefix, 4)
    single = torch.cat([forward(model, [i], cache) for i in (5, 6, 7, 8)])
    torch.testing.assert_close(
        single, forward(model, [5, 6, 7, 8], cache_of(prefix, 4)), atol=1e-4, rtol=1e-4
    )
