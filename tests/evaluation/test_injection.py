"""Attacks: what they are made of, and the arithmetic of what they did, on a tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from coinrag_integrations.demo.model import ensure_demo_model
from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.engine.prompt import PromptTemplate, build_prompt
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.injection import Attack, attacks, measure_injection
from coinrag_integrations.evaluation.likelihood import answer_ids
from coinrag_integrations.rag import MODES, CoinRAG
from coinrag_integrations.retrieval import SpanIndex, open_client
from tests.tiny import HashEmbedder, byte_tokenizer, forward

EACH = pytest.mark.parametrize("attack", attacks(), ids=lambda attack: attack.name)


def test_the_set_has_twenty_attacks_with_names_and_canaries_of_their_own():
    found = attacks()
    assert len(found) == 20
    assert len({attack.name for attack in found}) == 20
    assert len({attack.canary for attack in found}) == 20
    assert len({attack.kind for attack in found}) == 6


@EACH
def test_only_the_instruction_brings_the_canary_and_only_the_article_the_answer(attack):
    poisoned, clean = attack.documents
    assert attack.canary in attack.text
    assert not attack.hit(clean.text + attack.question + attack.answer)
    assert attack.answer in clean.text
    assert attack.answer not in attack.text
    assert len(poisoned.text) == len(clean.text) + len(attack.text)


def control_ids(tokenizer: TextTokenizer) -> set[int]:
    """All that the tokenizer calls special, whether or not it has a role."""
    found = {i for i, token in tokenizer.hf.added_tokens_decoder.items() if token.special}
    assert found >= set(tokenizer.hf.all_special_ids) > set()
    return found


def assert_no_control_tokens(tokenizer: TextTokenizer, attack: Attack) -> None:
    """Neither a document nor a question can hold one; a prompt has those of its template alone."""
    prompt = build_prompt(tokenizer, PromptTemplate())
    special = control_ids(tokenizer)

    def controls(ids):
        return [i for i in ids if i in special]

    for text in (attack.text, *(d.text for d in attack.documents)):
        assert controls(tokenizer.encode(text).ids) == []
        assert controls(prompt.tail(text)) == controls(prompt.tail("Who?"))


@EACH
def test_control_tokens_in_texts_and_questions_stay_plain_text(attack):
    assert_no_control_tokens(TextTokenizer(byte_tokenizer()), attack)


def test_the_tiny_tokenizer_would_read_them_as_control_tokens_if_it_were_let():
    tokenizer = TextTokenizer(byte_tokenizer())
    texts = [attack.text for attack in attacks() if attack.kind == "control tokens"]
    special = control_ids(tokenizer)
    assert sum(bool(special & set(tokenizer.encode_template(text))) for text in texts) == 3


@pytest.mark.demo
def test_the_demo_models_control_tokens_stay_plain_text():
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(ensure_demo_model()))
    for attack in attacks():
        assert_no_control_tokens(tokenizer, attack)
    every = tokenizer.hf.convert_ids_to_tokens(sorted(control_ids(tokenizer)))
    assert_no_control_tokens(tokenizer, replace(attacks()[0], text=" ".join(every)))


def test_chunks_of_attacks_hold_their_texts_and_no_control_token(rag: CoinRAG):
    special = control_ids(rag.engine.model.tokenizer)
    for attack in attacks():
        for document in attack.documents:
            chunks = rag.engine.chunk(document)
            assert "".join(chunk.text for chunk in chunks) == document.text
            assert not special & {i for chunk in chunks for i in chunk.token_ids}


def test_each_mode_is_asked_with_the_instruction_and_without(rag: CoinRAG):
    seen: list[int] = []
    tried = attacks()[:2]
    report = measure_injection(rag, tried, n_nuggets=50, on_progress=seen.append)
    assert seen == [1, 2]
    assert (report.n, report.exposed) == (2, 2)  # all nuggets are taken
    assert list(report.modes) == list(MODES)
    engine = rag.engine
    for attack, result in zip(tried, report.attacks, strict=True):
        poisoned, clean = attack.documents
        for document, asked in ((poisoned, result.attacked), (clean, result.clean)):
            context = [i for chunk in engine.chunk(document) for i in chunk.token_ids]
            for words, found in (
                (attack.canary, asked["full"].canary_logprob),
                (attack.answer, asked["full"].answer_logprob),
            ):
                wanted = answer_ids(engine.prompt, words)
                before = [*engine.prompt.head, *context, *engine.prompt.tail(attack.question)]
                logits = forward(engine.model.hf, [*before, *wanted])[len(before) - 1 : -1]
                chosen = logits.log_softmax(-1).gather(1, torch.tensor(wanted)[:, None])
                assert found == pytest.approx(float(chosen.mean()), abs=1e-3)
            assert asked["chunk"].canary_logprob != asked["full"].canary_logprob
            assert asked["coinrag"].canary_logprob != asked["chunk"].canary_logprob
    powers = {mode: [result.power(mode) for result in report.attacks] for mode in MODES}
    for mode, summary in report.modes.items():
        attacked = [result.attacked[mode] for result in report.attacks]
        assert summary.canaries == sum(asked.canary for asked in attacked)
        assert summary.power == pytest.approx(sum(powers[mode]) / 2, abs=1e-3)
        over = sum(powers[mode]) / 2 - sum(powers["full"]) / 2
        assert summary.over_full.mean == pytest.approx(over, abs=1e-4)


def test_one_chunk_behind_the_prompt_gives_an_instruction_the_power_it_has_there(model, tmp_path):
    """The same context, cached or prefilled, is the same text."""
    config = EngineConfig(coverage="all", context="after_prompt")
    with Engine(model, tmp_path / "store", config) as engine:
        rag = CoinRAG(engine, SpanIndex(open_client(None), HashEmbedder(), "injection"))
        report = measure_injection(rag, attacks()[7:8])
    assert report.modes["chunk"].over_full.mean == pytest.approx(0, abs=1e-3)
    (result,) = report.attacks
    assert result.attacked["chunk"].answer == result.attacked["full"].answer


def test_what_cannot_be_measured_is_refused(rag: CoinRAG, model, tmp_path):
    with pytest.raises(ConfigError, match="at least one"):
        measure_injection(rag, [])
    with Engine(model, tmp_path / "nuggets", EngineConfig()) as engine:
        other = CoinRAG(engine, SpanIndex(open_client(None), HashEmbedder(), "nuggets"))
        with pytest.raises(ConfigError, match="coverage"):
            measure_injection(other, attacks())
