"""Codes against entries: the arithmetic, on a tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.engine.chunking import chunk_document
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.plan import PrefixPlan, arrange
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.prompt import PromptTemplate, build_prompt
from coinrag_integrations.errors import BudgetError, ConfigError
from coinrag_integrations.evaluation.codecs import (
    CODINGS,
    CodecConfig,
    Coding,
    measure_codecs,
    nearest_spans,
)
from coinrag_integrations.evaluation.data import demo_examples
from coinrag_integrations.evaluation.likelihood import answer_ids, answer_logits, losses
from coinrag_integrations.nuggets import RuleProposer, extract_nuggets
from coinrag_integrations.retrieval import SpanIndex, open_client
from coinrag_integrations.types import ScoredSpan
from tests.evaluation.example import EXAMPLE
from tests.tiny import HashEmbedder, placed, tiny_model

SHORT = CodecConfig(chunk_tokens=64, n_nuggets=4)


def chunks_of(model, *, nuggets: bool):
    found = [c for d in EXAMPLE.documents for c in chunk_document(d, model.tokenizer, 64)]
    return [extract_nuggets(chunk, RuleProposer()) if nuggets else chunk for chunk in found]


@pytest.mark.parametrize("pieces", ["spans", "chunks"])
def test_raw_entries_give_the_likelihood_behind_the_same_spans_placed_by_hand(model, pieces):
    report = measure_codecs(model, [EXAMPLE], HashEmbedder(), replace(SHORT, pieces=pieces))
    chunks = {c.chunk_id: c for c in chunks_of(model, nuggets=pieces == "spans")}
    refs = arrange(nearest_spans(EXAMPLE.question, list(chunks.values()), HashEmbedder(), 4))
    prompt = build_prompt(model.tokenizer, PromptTemplate())
    n = len(prompt.head)
    parts = [placed(model, encode(model, [prompt.head])[0], range(n))]
    for ref in refs:
        entries = encode(model, [chunks[ref.chunk_id].token_ids])[0][ref.start : ref.stop]
        parts.append(placed(model, entries, range(n, n + len(ref))))
        n += len(ref)
    plan = PrefixPlan(head=(), n_kept=n, segments=(), online=(), n_entries=n, length=n)
    prefix = Prefix(kv=torch.cat(parts, dim=4), plans=(plan,))
    answer = answer_ids(prompt, EXAMPLE.answers[0])
    found = losses(answer_logits(model, prefix, prompt.tail(EXAMPLE.question), answer), answer)
    raw = report.codecs["raw"]
    assert raw.nll == pytest.approx(float(found.mean()), abs=1e-4)
    assert raw.nll_sum == pytest.approx(float(found.sum()), abs=1e-3)
    assert (report.n, report.entries, report.answer_tokens) == (1, n, len(answer))
    assert len({ref.chunk_id for ref in refs}) > 1, "spans of several chunks"


def test_raw_entries_are_their_own_measure_and_codes_are_not(model):
    report = measure_codecs(model, [EXAMPLE] * 2, HashEmbedder(), SHORT)
    raw, int8, int4 = report.codecs.values()
    assert (raw.nll_ratio, raw.nll_sum_ratio, raw.bytes_ratio, raw.first_token) == (1, 1, 1, 1)
    assert (raw.difference.mean, raw.difference.p95) == (0, 0)
    assert int8.nll_sum == pytest.approx(raw.nll_sum * int8.nll_sum_ratio, rel=1e-4)
    assert int8.difference.mean == pytest.approx(int8.nll - raw.nll, abs=1e-5)
    assert 0 < abs(int8.difference.mean) < abs(int4.difference.mean)


@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("pieces", ["spans", "chunks"])
def test_codes_are_those_that_a_store_of_that_codec_reads(model, tmp_path, codec, pieces):
    report = measure_codecs(model, [EXAMPLE], HashEmbedder(), replace(SHORT, pieces=pieces))
    config = EngineConfig(codec=codec, chunk_tokens=64, on_miss="raise")
    with Engine(model, tmp_path, config) as engine:
        chunks = chunks_of(model, nuggets=pieces == "spans")
        for chunk in chunks:
            engine.store_chunk(*next(engine.encode([chunk])))
        refs = nearest_spans(EXAMPLE.question, chunks, HashEmbedder(), 4)
        prefix, _ = engine.compose(refs)
        answer = answer_ids(engine.prompt, EXAMPLE.answers[0])
        tail = engine.prompt.tail(EXAMPLE.question)
        found = losses(answer_logits(model, prefix, tail, answer), answer)
    assert report.codecs[codec].nll == pytest.approx(float(found.mean()), abs=1e-5)


def test_bytes_are_those_of_codes_and_scales(model):
    """Of fp32 entries with 3 layers, 2 heads and 16 dimensions; here no chunk fills a group."""
    report = measure_codecs(model, [EXAMPLE], HashEmbedder(), replace(SHORT, pieces="chunks"))
    sizes = [len(chunk) for chunk in chunks_of(model, nuggets=False)]
    for coding in CODINGS:
        an_entry = 3 * 2 * 2 * 16 * coding.bits // 8 + 2 * 3 * 2 * 2  # codes; value scale and zero
        a_group = 2 * 3 * 2 * 16 * 2
        ours = sum(sizes) * an_entry + len(sizes) * a_group
        found = report.codecs[coding.name]
        assert found.bytes_ratio == pytest.approx(ours / (sum(sizes) * 768), abs=1e-6)
        full = (64 * an_entry + a_group) / (64 * 768)
        assert found.full_bytes_ratio == pytest.approx(full, abs=1e-6)


def test_finer_scales_come_nearer_to_raw_entries(model):
    fine = Coding(name="fine", bits=8, group=1, scale_dtype=torch.float32)
    coarse = Coding(name="coarse", bits=4, group=64)
    report = measure_codecs(model, [EXAMPLE], HashEmbedder(), SHORT, codings=(coarse, fine))
    assert list(report.codecs) == ["raw", "coarse", "fine"]
    assert abs(report.codecs["fine"].difference.mean) < abs(report.codecs["coarse"].difference.mean)


def test_spans_are_those_that_the_index_finds(model):
    chunks = chunks_of(model, nuggets=True)
    chunks[1] = replace(chunks[1], nuggets=())
    index = SpanIndex(open_client(None), HashEmbedder(), "codecs")
    index.put(chunks)
    whole = [
        ScoredSpan(ref=c.ref(), text=c.text, score=s, document_id="d", char_start=0, char_stop=1)
        for c, s in zip(chunks, [span.score for span in scores(index, chunks)], strict=True)
    ]
    for n in (1, 3, 50):
        expected = [span.ref for span in index.search_nuggets(EXAMPLE.question, whole, n)]
        assert nearest_spans(EXAMPLE.question, chunks, HashEmbedder(), n) == expected


def scores(index: SpanIndex, chunks) -> list[ScoredSpan]:
    """The chunks as stage one finds them, in their own order."""
    found = {s.ref.chunk_id: s for s in index.search_chunks(EXAMPLE.question, len(chunks))}
    return [found[chunk.chunk_id] for chunk in chunks]


def test_what_cannot_be_measured_is_refused(model):
    with pytest.raises(ConfigError, match="at least one"):
        measure_codecs(model, [], HashEmbedder())
    for name in ("raw", "int8"):
        codings = (*CODINGS, Coding(name=name, bits=8, group=8))
        with pytest.raises(ConfigError, match=name):
            measure_codecs(model, [EXAMPLE], HashEmbedder(), codings=codings)
    with pytest.raises(ConfigError, match="spans, chunks"):
        CodecConfig(pieces="words")
    with pytest.raises(ConfigError, match="at least 1"):
        CodecConfig(n_documents=0)
    with pytest.raises(BudgetError):
        measure_codecs(
            tiny_model(max_position_embeddings=64), demo_examples(1), HashEmbedder(), SHORT
        )


def test_entries_too_large_for_the_scales_are_refused():
    huge = tiny_model()
    with torch.no_grad():
        huge.hf.model.layers[0].self_attn.v_proj.weight.mul_(1e6)
    with pytest.raises(ConfigError, match=r"int8.*too large"):
        measure_codecs(huge, [EXAMPLE], HashEmbedder(), SHORT)
