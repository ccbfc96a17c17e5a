"""Laws of cutting: nothing is lost, nothing is too long, no character is cut, ids are stable."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace

from coinrag_integrations.engine.chunking import chunk_document
from coinrag_integrations.engine.tokens import TextTokenizer
from coinrag_integrations.errors import ConfigError, SpanError
from coinrag_integrations.types import ChunkId, Document, Scope, Span
from tests.tiny import TEXT, byte_tokenizer

MANY = settings(deadline=None, max_examples=60)
HARD = [
    "🎏",
    "👩‍👩‍👧‍👦",
    "e\u0301",
    "日本語の文",
    "\0",
    "<|im_end|>",
    " \n\t ",
    "\u2028",
    "ﬁ",
    "Å",
    "\ufeff",
]
texts = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
        st.sampled_from(HARD),
        st.sampled_from(TEXT.split()).map(lambda w: w + " "),
    ),
    max_size=14,
).map("".join)
sizes = st.integers(8, 40)


@cache
def tokenizer(kind: str) -> TextTokenizer:
    """Byte level as it is, with Qwen2's NFC normaliser, and words with marked spaces as in Llama 2."""
    if kind == "words":
        letters = [(chr(c), -5.0) for c in range(33, 127)]
        words = [(f"▁{w}", -3.0) for w in dict.fromkeys(TEXT.split())]
        core = tokenizers.Tokenizer(
            Unigram([("<unk>", 0.0), ("▁", -4.0), *letters, *words], unk_id=0)
        )
        core.pre_tokenizer = Metaspace(prepend_scheme="first")
        core.decoder = tokenizers.decoders.Metaspace()
        return TextTokenizer(
            transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
        )
    fast = byte_tokenizer()
    if kind == "bytes-nfc":
        fast.backend_tokenizer.normalizer = normalizers.NFC()
    return TextTokenizer(fast)


KINDS = ["bytes", "bytes-nfc", "words"]


def cut(text: str, n_tokens: int, kind: str = "bytes", document_id: str = "doc"):
    document = Document(document_id=document_id, text=text, metadata={"title": "t"})
    return chunk_document(document, tokenizer(kind), n_tokens)


@pytest.mark.parametrize("kind", KINDS)
@MANY
@given(text=texts, n_tokens=sizes)
@example(text="e\u0301" * 30, n_tokens=8)
@example(text="🎏" * 30, n_tokens=9)
@example(text="  \n  a  " * 10, n_tokens=8)
def test_joined_chunks_are_the_text_and_its_one_tokenisation(kind, text, n_tokens):
    chunks = cut(text, n_tokens, kind)
    encoding = tokenizer(kind).encode(text)
    assert "".join(c.text for c in chunks) == (text if encoding.ids else "")
    assert tuple(i for c in chunks for i in c.token_ids) == encoding.ids
    assert [c.char_start for c in chunks] == [
        sum(len(d.text) for d in chunks[:i]) for i in range(len(chunks))
    ]
    assert [c.index for c in chunks] == list(range(len(chunks)))


@pytest.mark.parametrize("kind", KINDS)
@MANY
@given(text=texts, n_tokens=sizes)
def test_chunks_are_full_but_for_the_last_and_where_a_character_would_be_cut(kind, text, n_tokens):
    chunks = cut(text, n_tokens, kind)
    assert all(1 <= len(c) <= n_tokens for c in chunks)
    if kind == "bytes":
        assert all(len(c) >= n_tokens - 3 for c in chunks[:-1])


@MANY
@given(text=texts, n_tokens=sizes)
def test_no_character_is_cut_so_each_chunk_reads_as_its_text(text, n_tokens):
    for chunk in cut(text, n_tokens):
        assert tokenizer("bytes").decode(chunk.token_ids) == chunk.text


@pytest.mark.parametrize("kind", KINDS)
@MANY
@given(text=texts, n_tokens=sizes)
def test_ranges_lie_in_the_chunks_text_and_are_those_of_the_document(kind, text, n_tokens):
    encoding, at = tokenizer(kind).encode(text), 0
    for chunk in cut(text, n_tokens, kind):
        assert len(chunk.offsets) == len(chunk)
        assert all(0 <= a <= b <= len(chunk.text) for a, b in chunk.offsets)
        for (a, b), (c, d) in zip(chunk.offsets, encoding.offsets[at:], strict=False):
            assert chunk.text[a:b] == text[c:d]
        at += len(chunk)


@pytest.mark.parametrize("kind", KINDS)
@MANY
@given(text=texts, n_tokens=sizes, data=st.data())
def test_a_span_of_tokens_is_found_again_by_its_characters(kind, text, n_tokens, data):
    """Triple to text to triple is the identity, but for tokens that cover no character of their own."""
    chunks = cut(text, n_tokens, kind)
    if not chunks:
        return
    chunk = data.draw(st.sampled_from(chunks))
    start = data.draw(st.integers(0, len(chunk) - 1))
    stop = data.draw(st.integers(start + 1, len(chunk)))
    (a, _), (_, b) = chunk.offsets[start], chunk.offsets[stop - 1]
    if a == b:
        with pytest.raises(SpanError):
            chunk.span_of(a, b)
        return
    found = chunk.span_of(a, b)
    assert all(x < b and y > a for x, y in chunk.offsets[found.start : found.start + 1])
    assert chunk.text_of(Span(start, stop)) in chunk.text_of(found)
    assert found.start <= start or chunk.offsets[start][0] == chunk.offsets[start][1]
    assert found.stop >= stop or chunk.offsets[stop - 1][0] == chunk.offsets[stop - 1][1]
    # Tokens that share a character with a neighbour bring it along.
    before = any(y > a for _, y in chunk.offsets[:start])
    behind = any(x < b for x, _ in chunk.offsets[stop:])
    empty = any(x == y for x, y in chunk.offsets[start:stop])
    if not (before or behind or empty):
        assert found == Span(start, stop)
    ref = chunk.ref(Span(start, stop))
    assert (ref.chunk_id, ref.start, ref.stop) == (chunk.chunk_id, start, stop)


@MANY
@given(text=texts, n_tokens=sizes)
def test_ids_are_unique_deterministic_and_of_the_form_that_the_store_takes(text, n_tokens):
    ids = [c.chunk_id for c in cut(text, n_tokens)]
    assert len(set(ids)) == len(ids)
    assert ids == [c.chunk_id for c in cut(text, n_tokens)]
    assert all(len(i) == 32 and set(i) <= set("0123456789abcdef") for i in ids)
    others = [c.chunk_id for c in cut(text, n_tokens, document_id="other")]
    assert not set(ids) & set(others)


@MANY
@given(text=texts, n_tokens=sizes)
def test_ids_of_the_same_document_differ_between_scopes_and_nothing_else_does(text, n_tokens):
    document = Document(document_id="doc", text=text)
    scopes = [
        Scope(),
        Scope(tenant="main", collection="default"),
        Scope(tenant="other"),
        Scope(collection="other"),
        Scope(tenant="other", collection="other"),
    ]
    of = {s: chunk_document(document, tokenizer("bytes"), n_tokens, s) for s in scopes}
    ids = [c.chunk_id for chunks in of.values() for c in chunks]
    assert len(set(ids)) == len(ids)
    for chunks in of.values():
        mine = [dataclasses.replace(c, chunk_id=ChunkId("")) for c in chunks]
        assert mine == [dataclasses.replace(c, chunk_id=ChunkId("")) for c in of[Scope()]]
    assert chunk_document(document, tokenizer("bytes"), n_tokens) == of[Scope()]


def test_repeated_chunks_of_one_document_have_ids_of_their_own():
    chunks = cut("ab cd ef gh " * 40, 8)
    assert len({c.token_ids for c in chunks}) < len(chunks)
    assert len({c.chunk_id for c in chunks}) == len(chunks)


def test_ids_of_chunks_before_an_edit_stay():
    before, after = cut(TEXT * 3, 16), cut(TEXT * 2 + "something else", 16)
    kept = len({c.chunk_id for c in before} & {c.chunk_id for c in after})
    assert kept >= len(before) // 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_text_has_no_chunks(kind):
    assert cut("", 8, kind) == ()


@pytest.mark.parametrize("text", ["🎏", "x", " ", "\0", "\n\n", "日"])
def test_the_smallest_texts_are_one_chunk(text):
    (chunk,) = cut(text, 8)
    assert chunk.text == text


def test_metadata_and_document_travel_with_every_chunk():
    for chunk in cut(TEXT, 8):
        assert (chunk.document_id, chunk.metadata) == ("doc", {"title": "t"})


def test_chunks_too_small_for_any_character_are_refused():
    with pytest.raises(ConfigError, match="use at least 8"):
        cut("text", 7)


def test_a_character_of_more_tokens_than_a_chunk_is_refused_with_its_place():
    """A ligature that one normaliser spells out: all eighteen letters share its range."""
    fast = byte_tokenizer()
    fast.backend_tokenizer.normalizer = normalizers.NFKC()
    document = Document(document_id="d", text="ab \ufdfa")
    with pytest.raises(ConfigError, match="a character at 3 takes more than 8 tokens"):
        chunk_document(document, TextTokenizer(fast), 8)
    assert len(chunk_document(document, TextTokenizer(fast), 64)) == 1


def test_a_span_behind_the_last_token_is_refused():
    (chunk,) = cut("one two", 64)
    with pytest.raises(SpanError, match=f"ends after the {len(chunk)} tokens"):
        chunk.ref(Span(0, len(chunk) + 1))
    assert chunk.ref() == chunk.ref(Span(0, len(chunk)))
