"""Searches and answers are told as spans and metrics, to whoever asked for it, and to nobody else."""

from __future__ import annotations

import logging

import prometheus_client
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coinrag_integrations.engine import GenerationConfig, observers
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.retrieval import RetrievalConfig
from coinrag_integrations.telemetry import count, trace
from coinrag_integrations.types import Document

SHORT = GenerationConfig(max_new_tokens=3)
QUESTION = "Who built the tidal organ?"


@pytest.fixture
def asked(rag):
    """A store with a document, and a way to ask it."""
    rag.add([Document(document_id="a", text="The tidal organ was built by Roule. " * 6)])
    config = RetrievalConfig(n_chunks=2, n_nuggets=3)
    return lambda mode="coinrag": rag.ask(QUESTION, mode, retrieval=config, generation=SHORT)


def value(registry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(f"coinrag_{name}", labels)
    assert found is not None, name
    return found


def test_metrics_are_those_of_the_answer(asked):
    registry = prometheus_client.CollectorRegistry()
    stop = count(registry)
    reply, whole = asked(), asked("chunk")
    answers = (reply.answer, whole.answer)
    for answer in answers:
        assert answer.timings.bytes_read > 0
    assert value(registry, "retrieve_seconds_count", form="spans") == 1
    assert value(registry, "retrieve_seconds_count", form="chunks") == 1
    assert value(registry, "chunks_sum") == 4
    assert value(registry, "spans_sum") == len(reply.spans) + len(whole.spans)
    assert value(registry, "answers_total", finish_reason="length") == 2
    ttft = sum(answer.timings.ttft_ms for answer in answers) / 1e3
    assert value(registry, "ttft_seconds_sum") == pytest.approx(ttft)
    load = sum(answer.timings.load_ms for answer in answers) / 1e3
    assert value(registry, "ttft_part_seconds_sum", part="load") == pytest.approx(load)
    assert value(registry, "cached_entries_sum") == sum(a.usage.cached for a in answers)
    assert value(registry, "online_tokens_sum") == sum(a.usage.online for a in answers)
    assert value(registry, "generated_tokens_total") == 6
    n_bytes = sum(answer.timings.bytes_read for answer in answers)
    assert value(registry, "read_bytes_total", tier="storage") == n_bytes
    assert value(registry, "recomputed_spans_total") == 0
    stop()
    asked()
    assert list(registry.collect()) == []
    again = count(registry)  # the names are free again
    asked()
    assert value(registry, "answers_total", finish_reason="length") == 1
    with pytest.raises(ConfigError, match="counted already"):
        count(registry)
    again()


def test_missing_kv_is_counted(asked, rag):
    registry = prometheus_client.CollectorRegistry()
    stop = count(registry)
    for chunk_id in list(rag.engine.store):
        rag.engine.store.delete(chunk_id)
    n = len(asked().answer.recomputed)
    assert value(registry, "recomputed_spans_total") == n > 0
    assert value(registry, "ttft_part_seconds_sum", part="recompute") > 0
    stop()


def test_spans_hold_the_parts_of_the_time(asked):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    stop = trace(provider.get_tracer("test"))
    answer = asked().answer
    stop()
    asked()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    names = {"coinrag.retrieve", "coinrag.answer", "coinrag.load", "coinrag.compose"}
    assert spans.keys() >= {*names, "coinrag.prefill", "coinrag.decode"}
    assert sum(span.name == "coinrag.answer" for span in exporter.get_finished_spans()) == 1
    whole = spans["coinrag.answer"]
    assert whole.attributes["coinrag.bytes_read"] == answer.timings.bytes_read
    assert whole.attributes["coinrag.cached_entries"] == answer.usage.cached
    spent = answer.timings.ttft_ms + answer.timings.decode_ms
    assert (whole.end_time - whole.start_time) / 1e6 == pytest.approx(spent, rel=1e-3)
    for name in ("load", "compose", "prefill", "decode"):
        span = spans[f"coinrag.{name}"]
        assert span.parent.span_id == whole.context.span_id
        milliseconds = getattr(answer.timings, f"{name}_ms")
        assert (span.end_time - span.start_time) / 1e6 == pytest.approx(milliseconds, rel=1e-3)
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time + 1000
    text = str([dict(span.attributes) for span in spans.values()])
    assert "organ" not in text


def test_an_answer_that_is_stopped_is_told(asked, rag):
    registry = prometheus_client.CollectorRegistry()
    stop = count(registry)
    stream = rag.stream(QUESTION, generation=GenerationConfig(max_new_tokens=30))
    next(stream)
    stream.close()
    stop_count = value(registry, "answers_total", finish_reason="length")
    assert stop_count == 1
    stop()


def test_an_observer_that_fails_disturbs_nobody(asked, caplog):
    class Broken:
        def searched(self, search):
            raise RuntimeError("no")

        answered = searched

    quiet = asked().text
    stop = observers.observe(Broken())
    with caplog.at_level(logging.ERROR):
        assert asked().text == quiet
    stop()
    stop()
    assert caplog.text.count("an observer failed") == 2
