from __future__ import annotations

import pytest
import torch

from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.kernels import reference
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from tests.tiny import forward, supported_model

CPU = torch.device("cpu")
PLAN = PrefixPlan(n_prompt=0, segments=(), n_entries=9, length=9)
HEAD = list(range(20, 29))


@pytest.fixture(params=[0, 4, 20])
def prefix(request):
    model = supported_model("llama")
    kv = empty_kv(model.layout, len(HEAD) + request.param, CPU)
    entries = encode(model, [HEAD])[0]
    reference.place(entries, *model.rope.angles(range(len(HEAD)), CPU), kv)
    return Prefix(kv=kv, n_entries=len(HEAD), plan=PLAN)


def test_a_cache_has_the_length_of_the_entries_and_grows_with_the_question(prefix):
    cache = prefix.cache(5)
    assert cache.get_seq_length() == 9
    forward(supported_model("llama").hf, [1, 2, 3], cache)
    assert cache.get_seq_length() == 12
    assert prefix.n_entries == 9


def test_questions_one_after_the_other_get_the_logits_of_fresh_ones(prefix):
    model = supported_model("llama").hf
    for question in ([3, 4, 5], [400], [9, 9, 9, 9, 9, 9], [3, 4, 5]):
        ours = forward(model, question, prefix.cache(len(question)))
        theirs = forward(model, [*HEAD, *question])[len(HEAD) :]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_entries_are_not_touched_by_a_question(prefix):
    before = prefix.kv[:, :, :, :9].clone()
    forward(supported_model("llama").hf, [1, 2, 3, 4], prefix.cache(4))
    assert torch.equal(prefix.kv[:, :, :, :9], before)


def test_no_copy_is_made_where_there_is_room(prefix):
    cache = prefix.cache(4)
    shared = cache.layers[0].keys.data_ptr() == prefix.kv.data_ptr()
    assert shared == (prefix.room >= 4)


def test_a_question_token_by_token_is_the_question_at_once(prefix):
    model = supported_model("llama").hf
    cache = prefix.cache(4)
    single = torch.cat([forward(model, [i], cache) for i in (5, 6, 7, 8)])
    torch.testing.assert_close(
        single, forward(model, [5, 6, 7, 8], prefix.cache(4)), atol=1e-4, rtol=1e-4
    )
