"""Searches and answers as OpenTelemetry spans and as Prometheus metrics. Off until one of both is called.

    from coinrag_integrations.telemetry import count, trace

    stop_tracing = trace()  # the tracer of the process's own provider
    stop_counting = count()  # prometheus_client's own registry

Needs the extra `observe`. No text leaves the process by it: neither questions nor answers are recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from coinrag_integrations.engine.answer import Answer
from coinrag_integrations.engine.observers import Search, observe
from coinrag_integrations.errors import ConfigError

_PARTS = ("load", "recompute", "compose", "prefill")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


def trace(tracer: Any = None) -> Callable[[], None]:
    """Record every search and answer as a span, with the parts of its time as spans below it.

    `tracer` is one of OpenTelemetry (None: "coinrag" of the process's provider). Call what is returned to
    stop.

    Raises:
        ConfigError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import trace as api
    except ImportError as error:
        raise ConfigError(f"tracing needs the extra `observe` ({error})") from error
    return observe(_Tracing(api, tracer or api.get_tracer("coinrag")))


def count(registry: Any = None) -> Callable[[], None]:
    """Count searches and answers in Prometheus metrics, all of which begin with `coinrag_`.

    `registry` is one of prometheus_client (None: its own); names can be in it once. Call what is returned
    to stop, and to take the metrics out of the registry.

    Raises:
        ConfigError: prometheus_client is not installed, or the registry has such metrics.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise ConfigError(f"metrics need the extra `observe` ({error})") from error
    try:
        counting = _Counting(prometheus_client, registry or prometheus_client.REGISTRY)
    except ValueError as error:
        raise ConfigError(f"these metrics are counted already: {error}") from error
    stop = observe(counting)

    def end() -> None:
        stop()
        counting.unregister()

    return end


class _Tracing:
    """Spans that are written once they are over, with the times they had."""

    def __init__(self, api: Any, tracer: Any) -> None:
        self.api, self.tracer = api, tracer

    def searched(self, search: Search) -> None:
        end = time.time_ns()
        attributes = {
            "coinrag.form": search.form,
            "coinrag.n_chunks": search.n_chunks,
            "coinrag.n_spans": search.n_spans,
        }
        self._write("coinrag.retrieve", end - _ns(search.milliseconds), end, attributes)

    def answered(self, answers: Sequence[Answer]) -> None:
        end = time.time_ns()
        for answer in answers:
            timings, usage = answer.timings, answer.usage
            begin = end - _ns(timings.ttft_ms + timings.decode_ms)
            attributes = {
                "coinrag.finish_reason": answer.finish_reason,
                "coinrag.n_spans": len(answer.spans),
                "coinrag.cached_entries": usage.cached,
                "coinrag.online_tokens": usage.online,
                "coinrag.generated_tokens": usage.generated,
                "coinrag.bytes_read": timings.bytes_read,
                "coinrag.bytes_in_memory": timings.bytes_in_memory,
                "coinrag.recomputed_spans": len(answer.recomputed),
                "coinrag.ttft_ms": timings.ttft_ms,
            }
            span = self._write("coinrag.answer", begin, end, attributes)
            context = self.api.set_span_in_context(span)
            at = begin
            for part in (*_PARTS, "decode"):
                if spent := _ns(getattr(timings, f"{part}_ms")):
                    self._write(f"coinrag.{part}", at, at + spent, {}, context)
                    at += spent

    def _write(
        self, name: str, begin: int, end: int, attributes: dict[str, Any], context: Any = None
    ) -> Any:
        span = self.tracer.start_span(
            name, start_time=begin, attributes=attributes, context=context
        )
        span.end(end_time=end)
        return span


class _Counting:
    """Metrics of prometheus_client."""

    def __init__(self, client: Any, registry: Any) -> None:
        self.registry, self.made = registry, list[Any]()

        def make(kind: str, name: str, what: str, *labels: str, **options: Any) -> Any:
            metric = getattr(client, kind)(
                f"coinrag_{name}", what, labels, registry=registry, **options
            )
            self.made.append(metric)
            return metric

        try:
            self._make(make)
        except ValueError:
            self.unregister()
            raise

    def _make(self, make: Callable[..., Any]) -> None:
        seconds, counts = {"buckets": _SECONDS}, {"buckets": _COUNTS}
        self.retrieve = make("Histogram", "retrieve_seconds", "A search.", "form", **seconds)
        self.chunks = make("Histogram", "chunks", "Chunks that a search looked into.", **counts)
        self.spans = make("Histogram", "spans", "Spans that a search found.", **counts)
        self.answers = make("Counter", "answers", "Answers that have ended.", "finish_reason")
        self.ttft = make("Histogram", "ttft_seconds", "Time to the first token.", **seconds)
        self.part = make("Histogram", "ttft_part_seconds", "A part of it.", "part", **seconds)
        self.entries = make("Histogram", "cached_entries", "Entries behind a question.", **counts)
        self.online = make("Histogram", "online_tokens", "Tokens computed for one.", **counts)
        self.generated = make("Counter", "generated_tokens", "Tokens of answers.")
        self.read = make("Counter", "read_bytes", "Bytes of entries, by where they were.", "tier")
        self.missed = make("Counter", "recomputed_spans", "Spans that had to be encoded again.")
        self.declined = make("Counter", "declined_spans", "Those where reading were slower.")

    def unregister(self) -> None:
        """Take all metrics out of the registry."""
        for metric in self.made:
            self.registry.unregister(metric)
        self.made.clear()

    def searched(self, search: Search) -> None:
        self.retrieve.labels(search.form).observe(search.milliseconds / 1e3)
        self.chunks.observe(search.n_chunks)
        self.spans.observe(search.n_spans)

    def answered(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            timings, usage = answer.timings, answer.usage
            self.answers.labels(answer.finish_reason).inc()
            self.ttft.observe(timings.ttft_ms / 1e3)
            for part in _PARTS:
                self.part.labels(part).observe(getattr(timings, f"{part}_ms") / 1e3)
            self.entries.observe(usage.cached)
            self.online.observe(usage.online)
            self.generated.inc(usage.generated)
            self.read.labels("storage").inc(timings.bytes_read)
            self.read.labels("memory").inc(timings.bytes_in_memory)
            self.missed.inc(len(answer.recomputed))
            self.declined.inc(timings.n_declined)


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
