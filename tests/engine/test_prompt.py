from __future__ import annotations

import pytest

from coinrag_integrations.engine import PromptTemplate
from coinrag_integrations.engine.prompt import build_prompt
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import ConfigError
from tests.tiny import byte_tokenizer

CHAT, PLAIN = TextTokenizer(byte_tokenizer()), TextTokenizer(byte_tokenizer(chat=False))


def test_head_and_tail_around_a_context_are_the_rendered_chat():
    template = PromptTemplate(answer="It is")
    prompt = build_prompt(CHAT, template)
    text = CHAT.hf.decode([*prompt.head, *prompt.tail("  Who?\n")])
    user = template.user.replace("{context}", "").replace("{question}", "Who?")
    assert text == (
        f"<|im_start|>system\n{template.system}<|im_end|>\n"
        f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\nIt is"
    )


def test_without_a_chat_template_the_prompt_is_plain_text_after_the_first_token():
    template = PromptTemplate()
    prompt = build_prompt(PLAIN, template)
    assert prompt.head[0] == PLAIN.hf.bos_token_id
    text = PLAIN.decode([*prompt.head, *prompt.tail("Who?")])
    user = template.user.replace("{context}", "").replace("{question}", "Who?")
    assert text == f"{template.system}\n\n{user}"


def test_the_head_is_the_same_for_every_question_and_is_in_the_digest():
    prompt = build_prompt(CHAT, PromptTemplate())
    assert prompt.digest == build_prompt(CHAT, PromptTemplate()).digest
    assert prompt.digest != build_prompt(CHAT, PromptTemplate(system="Other.")).digest
    tail = PromptTemplate(user="Passages:\n{context}\nAsk: {question}")
    assert prompt.digest == build_prompt(CHAT, tail).digest


def test_control_tokens_in_a_question_are_words():
    prompt = build_prompt(CHAT, PromptTemplate())
    control = CHAT.hf.convert_tokens_to_ids("<|im_end|>")
    assert prompt.tail("a<|im_end|>b").count(control) == prompt.tail("ab").count(control)


@pytest.mark.parametrize("question", ["", " ", "\n"])
def test_an_empty_question_is_refused(question):
    with pytest.raises(ConfigError, match="empty"):
        build_prompt(CHAT, PromptTemplate()).tail(question)


@pytest.mark.parametrize(
    "user",
    [
        "",
        "{context}",
        "{question}",
        "{question} {context}",
        "{context}{context}{question}",
        "{context}{question}{question}",
        "{question}{context}{question}",
    ],
)
def test_a_template_needs_its_two_slots_once_and_in_order(user):
    with pytest.raises(ConfigError, match="once each"):
        PromptTemplate(user=user)


def test_braces_in_a_template_are_plain_text():
    template = PromptTemplate(user='{"x": 1} {context} {other} {question}')
    prompt = build_prompt(PLAIN, template)
    assert '{"x": 1} ' in PLAIN.decode(prompt.head)
    assert " {other} " in PLAIN.decode(prompt.before_question)


@pytest.mark.parametrize(
    "chat_template",
    [
        "{{ messages[1]['content'][:9] }}",
        "{{ messages[1]['content'] | upper | replace('CONTEXT', 'x') }}",
        "nothing of the user's",
    ],
)
def test_a_chat_template_that_changes_the_users_text_is_refused(chat_template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    with pytest.raises(ConfigError, match="does not keep the user's text"):
        build_prompt(TextTokenizer(tokenizer), PromptTemplate())


def test_a_chat_template_that_refuses_a_system_role_gets_the_system_text_in_the_users_turn():
    """Gemma's and older Mistral's templates raise on the role "system"."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    prompt = build_prompt(TextTokenizer(tokenizer), PromptTemplate())
    assert PromptTemplate().system in CHAT.decode(prompt.head)


def test_a_chat_template_that_refuses_everything_is_an_error_of_ours():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ConfigError, match="never"):
        build_prompt(TextTokenizer(tokenizer), PromptTemplate())
