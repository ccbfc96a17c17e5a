import dataclasses
import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.errors import ProposalError
from coinrag_integrations.nuggets import LLMProposer, RuleProposer, coverage, extract_nuggets
from coinrag_integrations.types import Chunk, ChunkId, Span

REFRAIN = "The sea took all of them. Nobody came back to us. The sea took all of them."


def chunk_of(text: str) -> Chunk:
    offsets = tuple(match.span() for match in re.finditer(r"\w+|[^\w\s]", text))
    return Chunk(
        chunk_id=ChunkId("c1"),
        document_id="d1",
        index=3,
        text=text,
        char_start=7,
        token_ids=tuple(range(len(offsets))),
        offsets=offsets,
        metadata={"title": "t"},
    )


@dataclasses.dataclass(frozen=True)
class FixedProposer:
    """Proposes what it was given."""

    candidates: object
    proposer_id: str = "fixed"

    def propose(self, text):
        return self.candidates


def test_only_the_nuggets_of_the_chunk_change():
    chunk = chunk_of(REFRAIN)
    extracted = extract_nuggets(chunk, RuleProposer())
    assert extracted.nuggets
    assert chunk.nuggets == ()
    assert dataclasses.replace(extracted, nuggets=()) == chunk


def test_a_repeated_sentence_is_found_at_its_own_place():
    first, _, last = extract_nuggets(chunk_of(REFRAIN), RuleProposer()).nuggets
    assert first.text == last.text
    assert (first.span, last.span) == (Span(0, 7), Span(13, 20))


def test_earlier_nuggets_are_replaced():
    once = extract_nuggets(chunk_of(REFRAIN), RuleProposer())
    assert extract_nuggets(once, FixedProposer([])).nuggets == ()
    assert extract_nuggets(once, RuleProposer()) == once


def test_an_llms_rewrite_is_abandoned_and_logged(caplog):
    reply = '["The sea took all of them", "Bananas grow quickly under tropical sun"]'
    proposer = LLMProposer(complete=lambda prompt: reply, model_id="tiny")
    with caplog.at_level(logging.DEBUG, logger="coinrag_integrations.nuggets.extract"):
        chunk = extract_nuggets(chunk_of(REFRAIN), proposer)
    assert [nugget.text for nugget in chunk.nuggets] == ["The sea took all of them"]
    (record,) = caplog.records
    assert "Bananas" in record.getMessage()
    assert "similar enough" in record.getMessage()


def test_the_threshold_reaches_the_alignment():
    proposer = FixedProposer(["The sea took most of them"])
    assert extract_nuggets(chunk_of(REFRAIN), proposer).nuggets
    assert not extract_nuggets(chunk_of(REFRAIN), proposer, threshold=0.99).nuggets


@pytest.mark.parametrize("candidates", ["The sea", ["The sea", 3], [b"The sea"]])
def test_a_proposer_that_returns_no_strings_is_refused(candidates):
    with pytest.raises(ProposalError, match="must return a list of strings"):
        extract_nuggets(chunk_of(REFRAIN), FixedProposer(candidates))


def test_coverage_counts_each_token_once():
    chunk = chunk_of("one two three four five six seven eight nine ten")
    assert coverage(chunk) == 0.0
    overlapping = FixedProposer(["one two three", "two three four", "nine"])
    assert coverage(extract_nuggets(chunk, overlapping)) == 0.5
    assert coverage(chunk_of("")) == 0.0


@given(st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_text_gives_nuggets_that_point_at_it(text):
    chunk = extract_nuggets(chunk_of(text), RuleProposer())
    for nugget in chunk.nuggets:
        assert nugget.text == text[nugget.char_start : nugget.char_stop]
        assert nugget.match == "exact"
        assert chunk.offsets[nugget.span.start][0] <= nugget.char_start
        assert chunk.offsets[nugget.span.stop - 1][1] >= nugget.char_stop
    assert 0.0 <= coverage(chunk) <= 1.0
