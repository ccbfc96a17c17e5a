"""The cross-encoder scores pairs, alone and together the same."""

from __future__ import annotations

import math

import pytest
import transformers

from coinrag_integrations.errors import ModelError
from coinrag_integrations.retrieval import CrossEncoder
from tests.tiny import save_tiny_reranker

TEXTS = ["It was built in 1923.", "Rye bread is baked with sourdough.", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_reranker(tmp_path_factory.mktemp("reranker"))


def test_scores_are_those_of_the_model_between_0_and_1(folder):
    found = CrossEncoder(folder, device="cpu").score("When was it built?", TEXTS)
    model = transformers.XLMRobertaForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, score in zip(TEXTS, found, strict=True):
        logit = model(**tokenizer("When was it built?", text, return_tensors="pt")).logits.item()
        assert score == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-4)


def test_a_text_alone_scores_as_among_others(folder):
    encoder = CrossEncoder(folder, device="cpu")
    together = encoder.score("When?", TEXTS)
    assert [encoder.score("When?", [text])[0] for text in TEXTS] == pytest.approx(
        together, abs=1e-5
    )
    assert encoder.score("When?", []) == []


def test_a_model_that_is_not_there_is_named(tmp_path):
    assert CrossEncoder("no/such-model").name == "no/such-model"  # nothing is loaded yet
    with pytest.raises(ModelError, match="no/such-model"):
        CrossEncoder("no/such-model", device="cpu").score("When?", TEXTS)
