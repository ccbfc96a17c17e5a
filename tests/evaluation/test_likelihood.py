"""Law: the likelihood of an answer is that of a plain forward pass over everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.plan import OnlineText
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.prompt import PromptTemplate, build_prompt
from coinrag_integrations.errors import BudgetError, ConfigError
from coinrag_integrations.evaluation.likelihood import (
    Paired,
    answer_ids,
    answer_logits,
    losses,
    no_prefix,
)
from tests.tiny import forward, prefix_of, supported_model, tiny_model

ids = st.lists(st.integers(3, 511), min_size=1, max_size=30)
FEW = settings(deadline=None, max_examples=8)


def direct(model, before: list[int], answer: list[int]) -> torch.Tensor:
    """The losses of `answer` behind `before`, from one pass over all tokens."""
    logits = forward(model.hf, [*before, *answer])[len(before) - 1 : -1].float()
    return -logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3", "cohere", "mistral-windowed"])
def test_losses_are_those_of_a_plain_forward_pass(name):
    model = supported_model(name)

    @FEW
    @given(context=ids, question=ids, answer=ids, room=st.sampled_from([0, 70]))
    def law(context, question, answer, room):
        expected = direct(model, [*context, *question], answer)
        for prefix, online in (
            (prefix_of(model, context, room), question),
            (no_prefix(model), [*context, *question]),
        ):
            for _ in range(2):  # a prefix is not used up
                found = losses(answer_logits(model, prefix, online, answer), answer)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    law()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-windowed"])
def test_text_that_is_not_cached_is_computed_in_its_place(name):
    """Nothing but text between the entries and the question: the same as text that is cached."""
    model = supported_model(name)
    text, question, answer = list(range(10, 60)), [7, 8, 9], [5, 6]
    expected = direct(model, [*text, *question], answer)
    for n in (1, 20, 49):
        cached = prefix_of(model, text[:n], room=90)
        online = (OnlineText(ids=tuple(text[n:]), position=n),)
        plan = replace(cached.plans[0], online=online, length=len(text))
        logits = answer_logits(model, Prefix(kv=cached.kv, plans=(plan,)), question, answer)
        torch.testing.assert_close(losses(logits, answer), expected, rtol=1e-4, atol=1e-4)


def test_an_answer_begins_where_the_models_turn_or_the_words_leave_off(model):
    chat = build_prompt(model.tokenizer, PromptTemplate())
    assert answer_ids(chat, " Bastien Roule ") == model.tokenizer.encode("Bastien Roule").ids
    plain = tiny_model(chat=False)
    opened = build_prompt(plain.tokenizer, PromptTemplate())
    assert answer_ids(opened, "Bastien") == plain.tokenizer.encode(" Bastien").ids
    assert answer_ids(chat, "<|im_end|>")[0] not in model.tokenizer.hf.all_special_ids


def test_what_has_no_likelihood_is_refused(model):
    prompt = build_prompt(model.tokenizer, PromptTemplate())
    prefix = prefix_of(model, [5, 6, 7])
    with pytest.raises(ConfigError, match="empty"):
        answer_ids(prompt, " ")
    for question, answer in (([], [5]), ([5], [])):
        with pytest.raises(ConfigError, match="at least one token"):
            answer_logits(model, prefix, question, answer)
    with pytest.raises(ConfigError, match="one prefix"):
        answer_logits(model, Prefix(kv=prefix.kv, plans=prefix.plans * 2), [5], [6])
    with pytest.raises(BudgetError):
        answer_logits(model, prefix, [5] * model.window, [6])


def test_paired_differences_are_summed_up():
    found = Paired.of([0.0, 1.0, 2.0, 3.0])
    assert (found.mean, found.p50) == (1.5, 1.5)
    assert found.p95 == pytest.approx(2.85)
    assert found.stderr == pytest.approx((5 / 3) ** 0.5 / 2, abs=1e-6)
    assert Paired.of([0.5]) == Paired(mean=0.5, stderr=0.0, p50=0.5, p95=0.5)
