"""Packing and truncating: everything fits, nothing is lost, and no marked passage is cut."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.prompts import PromptTemplate

from coinrag_integrations.engine import mark, split_marked, strip_handles
from coinrag_integrations.errors import BudgetError
from coinrag_integrations.llamaindex import MarkedPromptHelper
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import ChunkId, SpanRef

PROMPT = PromptTemplate("Read {context_str} and say {query_str}")
words = st.text(alphabet="abc \n", min_size=1, max_size=40)
# A node's text: perhaps metadata, then a passage with a handle, or plain words.
parts = st.tuples(words, words.filter(lambda text: text.strip()), st.booleans())


@pytest.fixture
def helper(rag: CoinRAG) -> MarkedPromptHelper:
    return MarkedPromptHelper.from_rag(rag, context_window=120, num_output=8)


@pytest.fixture
def handle(rag: CoinRAG) -> str:
    return rag.engine.handles.handle(SpanRef(ChunkId("0" * 32), 1, 3))


def text_of(part: tuple[str, str, bool], handle: str) -> str:
    before, passage, marked = part
    return f"{before}\n\n{mark(handle, passage)}" if marked else before + passage


def passages(texts: list[str]) -> list[str]:
    return [part for text in texts for part, is_marked in split_marked(text) if is_marked]


FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@FIXTURES
@given(given_=st.lists(parts, max_size=8))
def test_packed_texts_fit_and_hold_every_passage_whole(helper, handle, given_):
    texts = [text_of(part, handle) for part in given_]
    packed = helper.repack(PROMPT, texts)
    size = helper._get_available_chunk_size(PROMPT)
    assert all(helper._count(text) <= size for text in packed)
    assert passages(packed) == passages(texts)
    together = "".join("".join(map(strip_handles, packed)).split())
    assert together == "".join("".join(map(strip_handles, texts)).split())


@FIXTURES
@given(given_=st.lists(parts, min_size=1, max_size=3))
def test_truncated_texts_fit_and_begin_as_they_did(helper, handle, given_):
    texts = [text_of(part, handle) for part in given_]
    cut = helper.truncate(PROMPT, texts)
    size = helper._get_available_chunk_size(PROMPT, num_chunks=len(texts))
    for before, after in zip(texts, cut, strict=True):
        assert helper._count(after) <= size
        assert (
            strip_handles(before).split()[: len(after.split()) - 1]
            == (strip_handles(after).split()[: len(after.split()) - 1])
        )
        kept = passages([after])
        assert kept == passages([before])[: len(kept)]
        assert "⟦" not in "".join(part for part, is_marked in split_marked(after) if not is_marked)


def test_a_passage_longer_than_the_window_is_read_as_text(helper, handle):
    long = mark(handle, "lamp " * 200)
    packed = helper.repack(PROMPT, ["a", long, "b"])
    assert passages(packed) == []
    assert "".join(packed).count("lamp") == 200
    assert all("⟦" not in text for text in packed)


def test_handles_cost_nothing(helper, handle):
    assert helper._count(mark(handle, "lamp")) == helper._count("lamp")


def test_no_room_is_named_with_the_numbers(rag: CoinRAG):
    helper = MarkedPromptHelper.from_rag(rag, context_window=20, num_output=8)
    for call in (helper.repack, helper.truncate):
        with pytest.raises(BudgetError, match="a window of 20 tokens has no room"):
            call(PROMPT, ["text"])
    assert helper.truncate(PROMPT, []) == []


def test_it_can_be_written_down(helper):
    assert helper.to_dict()["class_name"] == "MarkedPromptHelper"
