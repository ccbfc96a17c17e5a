"""Typed control tokens are words; streamed text is decoded text."""

from __future__ import annotations

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import UnsupportedModelError
from tests.tiny import byte_tokenizer, supported_model

TOKENIZER = TextTokenizer(byte_tokenizer())
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MANY = settings(deadline=None, max_examples=60)
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
typed = st.lists(st.one_of(unicode_text, st.sampled_from(SPECIAL)), max_size=5).map("".join)


def special_ids() -> set[int]:
    return {TOKENIZER.hf.convert_tokens_to_ids(s) for s in SPECIAL}


@pytest.mark.parametrize("special", SPECIAL)
def test_a_typed_control_token_is_ordinary_text_and_in_a_template_it_is_control(special):
    written = TOKENIZER.encode(f"a{special}b").ids
    assert special_ids().isdisjoint(written)
    assert TOKENIZER.decode(written) == f"a{special}b"
    template = TOKENIZER.encode_template(f"a{special}b")
    assert len(special_ids().intersection(template)) == 1
    assert TOKENIZER.decode(template) == "ab"


@MANY
@given(typed)
def test_decoding_what_was_encoded_gives_the_text(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@MANY
@given(typed)
def test_no_text_of_a_user_ever_becomes_a_control_token(text):
    assert special_ids().isdisjoint(TOKENIZER.encode(text).ids)


@MANY
@given(typed)
def test_every_token_has_a_range_in_the_text_and_ranges_are_in_order(text):
    encoding = TOKENIZER.encode(text)
    assert len(encoding.ids) == len(encoding.offsets)
    assert all(0 <= a <= b <= len(text) for a, b in encoding.offsets)
    assert list(encoding.offsets) == sorted(encoding.offsets)


@MANY
@given(typed)
def test_a_streamed_answer_is_the_decoded_answer(text):
    ids = TOKENIZER.encode(text).ids
    stream = TOKENIZER.decode_stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == TOKENIZER.decode(ids) == text


def test_half_a_character_is_never_shown():
    ids = TOKENIZER.encode("né 日本 🎏!").ids
    stream = TOKENIZER.decode_stream()
    for i in ids:
        assert "\ufffd" not in stream.push(i)


def test_control_tokens_are_not_shown_in_a_stream():
    stream = TOKENIZER.decode_stream()
    ids = TOKENIZER.encode_template("yes<|im_end|>\n")
    assert "".join(stream.push(i) for i in ids) == "yes\n"


def test_padding_and_truncation_of_the_callers_tokenizer_do_not_matter():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    frozen = TextTokenizer(tokenizer)
    text = "The tidal organ of Marenqué"
    assert frozen.encode(text) == TOKENIZER.encode(text)
    tokenizer.backend_tokenizer.enable_truncation(1)
    assert frozen.encode(text) == TOKENIZER.encode(text)


def test_the_digest_tells_tokenizers_apart():
    assert TextTokenizer(byte_tokenizer()).digest == TOKENIZER.digest
    other = byte_tokenizer()
    other.add_tokens(["<extra>"])
    assert TextTokenizer(other).digest != TOKENIZER.digest


def test_the_digest_does_not_depend_on_the_callers_padding():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert TextTokenizer(tokenizer).digest == TOKENIZER.digest


def test_a_slow_tokenizer_is_refused_with_the_way_out(tmp_path):
    class Slow(transformers.PythonBackend):
        vocab_size = 1

        def get_vocab(self):
            return {"a": 0}

    with pytest.raises(UnsupportedModelError, match=r"Slow gives no character ranges: convert"):
        TextTokenizer(Slow())


def test_a_model_carries_the_tokenizers_stop_ids():
    assert TOKENIZER.hf.eos_token_id in supported_model("llama").stop_ids


@pytest.mark.parametrize("markup", ["<tool_call>", "</think>", "[INST]", "[/INST]"])
def test_markup_that_was_added_as_ordinary_is_no_control_token_in_words(markup):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(markup, special=False), AddedToken("Marenque", special=False)])
    (control,) = tokenizer.convert_tokens_to_ids([markup])
    ours = TextTokenizer(tokenizer)
    text = f"a {markup} b Marenque"
    words = ours.encode(text)
    assert control not in words.ids
    assert text[words.offsets[0][0] : words.offsets[-1][1]] == text
    assert tokenizer.convert_tokens_to_ids("Marenque") in words.ids, "words stay words"
    assert control in ours.encode_template(text)
