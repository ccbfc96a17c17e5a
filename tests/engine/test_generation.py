"""Decoding behind a prefix is what transformers' own generate() does; stops cut where they should."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.generation import (
    GenerationConfig,
    check_room,
    generate,
)
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.text import StopText
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import BudgetError, ConfigError
from tests.tiny import SUPPORTED, cache_of, forward, prefix_of, supported_model, tiny_model

CPU = torch.device("cpu")
HEAD, QUESTION = list(range(20, 45)), [7, 301, 44, 90]


def decode(model, prefix=None, question=QUESTION, **options) -> list[int]:
    prefix = prefix or prefix_of(model, HEAD)
    config = GenerationConfig(**options)
    return [token for (token,) in generate(model, prefix, [question], config, Stopwatch(CPU))]


@pytest.mark.parametrize("room", [0, 64])
@pytest.mark.parametrize("name", SUPPORTED)
def test_greedy_decoding_is_that_of_transformers(name, room):
    model = supported_model(name)
    theirs = model.hf.generate(
        torch.tensor([[*HEAD, *QUESTION]]), do_sample=False, max_new_tokens=24
    )
    ours = decode(model, prefix_of(model, HEAD, room), max_new_tokens=24)
    assert ours == theirs[0, len(HEAD) + len(QUESTION) :].tolist()


@pytest.mark.parametrize("name", SUPPORTED)
def test_greedy_decoding_in_bf16_is_that_of_transformers_but_for_near_ties(name):
    """Random models have many: a token must be within rounding of the best, and most must be it."""
    config_class, options = SUPPORTED[name]
    options = {**options, "initializer_range": 0.1}
    model = tiny_model(config_class, dtype=torch.bfloat16, **options)
    model = dataclasses.replace(model, stop_ids=frozenset())
    tokens = decode(model, prefix_of(model, HEAD), max_new_tokens=32)
    logits = forward(model.hf, [*HEAD, *QUESTION, *tokens[:-1]])[-32:].float()
    lost = logits.amax(-1) - logits[range(32), tokens]
    assert (lost <= 0.01 * logits.abs().amax(-1)).all()
    assert (lost == 0).sum() >= 30


@pytest.mark.parametrize("name", SUPPORTED)
def test_transformers_itself_can_generate_from_a_prefix(name):
    model = supported_model(name)
    ids = torch.tensor([[*HEAD, *QUESTION]])
    plain = model.hf.generate(ids, do_sample=False, max_new_tokens=12)
    cache = cache_of(prefix_of(model, HEAD), len(QUESTION) + 12)
    ours = model.hf.generate(ids, do_sample=False, max_new_tokens=12, past_key_values=cache)
    assert torch.equal(ours, plain)


def test_a_stop_id_ends_the_answer_and_is_its_last_token():
    model = supported_model("llama")
    free = decode(dataclasses.replace(model, stop_ids=frozenset()), max_new_tokens=20)
    assert len(free) == 20
    for at in (0, 3, 19):
        stopping = dataclasses.replace(model, stop_ids=frozenset({free[at]}))
        assert decode(stopping, max_new_tokens=20) == free[: free.index(free[at]) + 1]


def test_as_many_tokens_are_decoded_as_asked_for():
    model = dataclasses.replace(supported_model("llama"), stop_ids=frozenset())
    longest = decode(model, max_new_tokens=9)
    for n in range(1, 9):
        assert decode(model, max_new_tokens=n) == longest[:n]


def test_two_questions_to_one_prefix_are_answered_as_to_fresh_ones():
    model, questions = supported_model("llama"), [QUESTION, [3, 3], list(range(200, 230))]
    shared = prefix_of(model, HEAD, room=64)
    alone = [decode(model, question=q, max_new_tokens=16) for q in questions]
    assert [decode(model, shared, q, max_new_tokens=16) for q in questions] == alone


def test_sampling_with_a_seed_repeats_and_differs_from_greedy_when_hot():
    model = dataclasses.replace(supported_model("llama"), stop_ids=frozenset())
    hot = {"temperature": 5.0, "max_new_tokens": 24}
    first = decode(model, seed=1, **hot)
    assert decode(model, seed=1, **hot) == first
    assert decode(model, seed=2, **hot) != first
    assert first != decode(model, max_new_tokens=24)


def test_sampling_without_a_seed_does_not_touch_the_callers_random_state():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    decode(supported_model("llama"), temperature=2.0, max_new_tokens=4)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_sampling_narrowed_to_the_best_token_is_greedy(narrow):
    model = supported_model("llama")
    options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 16, **narrow}
    assert decode(model, **options) == decode(model, max_new_tokens=16)


def test_nothing_is_computed_before_the_first_token_and_closing_stops():
    model = dataclasses.replace(supported_model("llama"), stop_ids=frozenset())
    watch = Stopwatch(CPU)
    config = GenerationConfig(max_new_tokens=9)
    tokens = generate(model, prefix_of(model, HEAD), [QUESTION], config, watch)
    assert watch.parts == {}
    next(tokens)
    assert set(watch.parts) == {"prefill", "ttft"}
    next(tokens)
    assert "decode" in watch.parts
    tokens.close()
    assert list(tokens) == []


def test_what_the_window_cannot_hold_is_refused_with_the_numbers():
    model = tiny_model(max_position_embeddings=64)
    plan = PrefixPlan(head=(1,) * 40, segments=(), online=(), n_entries=40, length=40)
    check_room(model, plan, 14, 10)
    with pytest.raises(BudgetError, match=r"40 cached entries, 15 online .* 10 answer .* of 64"):
        check_room(model, plan, 15, 10)
    with pytest.raises(BudgetError):
        decode(model, question=[1] * 30, max_new_tokens=10)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"stop": "text"},
        {"stop": ("", "a")},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        GenerationConfig(**options)


letters = st.text(st.sampled_from("ab\n é"), max_size=24)
stops = st.lists(st.text(st.sampled_from("ab\n é"), min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first (the longest of those, if several)."""
    for end in range(len(text) + 1):
        complete = [len(s) for s in stop if text[:end].endswith(s)]
        if complete:
            return text[: end - max(complete)]
    return text


@settings(deadline=None, max_examples=200)
@given(text=letters, stop=stops, cuts=st.lists(st.integers(0, 24), max_size=8))
@example(text="aab", stop=["ab"], cuts=[1, 2])
@example(text="aéb", stop=["aéb", "é"], cuts=[1, 2])
@example(text="aéb", stop=["aéb", "é"], cuts=[])
@example(text="aab", stop=["aab", "ab"], cuts=[])
def test_any_split_of_a_text_is_cut_as_the_whole_text(text, stop, cuts):
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    watch, shown = StopText(stop), ""
    for piece in pieces:
        shown += watch.push(piece)
        assert first_stop(text, stop).startswith(shown)
        if watch.hit:
            break
    shown += watch.flush()
    assert shown == first_stop(text, stop)
    assert watch.hit == (shown != text or any(text[len(shown) :].startswith(s) for s in stop))


@settings(deadline=None, max_examples=60)
@given(text=letters, stop=stops)
def test_text_is_shown_as_soon_as_it_cannot_belong_to_a_stop(text, stop):
    watch = StopText(stop)
    for character in text:
        watch.push(character)
        if watch.hit:
            break
        held = watch._held
        assert held == "" or any(s.startswith(held) and s != held for s in stop)
