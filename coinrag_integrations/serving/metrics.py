"""The connector's counters in vLLM's own metrics. Imported by `connector` alone."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from coinrag_integrations.serving.loads import Landed

# Sums over all workers: with tensor parallelism every one of them reads and writes each prefix.
_COUNTED = {
    "prefixes": "Composed prefixes written into the paged cache.",
    "failed": "Requests that were refused, or whose prefix could not be loaded.",
    "rows": "Tokens of composed prefixes that were written.",
    "bytes_read": "Bytes of KV read for them from disk or remote storage.",
    "load_seconds": "Seconds of reading and placing them, in threads.",
    "write_seconds": "Seconds of writing them, between two steps of the model.",
}


class CoinRAGStats(KVConnectorStats):
    """What happened to prefixes in an interval: a sum for each name."""

    def note(self, landed: Landed) -> None:
        """Add one."""
        self._add("failed" if landed.error else "prefixes", 1)
        self._add("rows", landed.n_rows)
        self._add("bytes_read", landed.bytes_read)
        self._add("load_seconds", landed.load_seconds)
        self._add("write_seconds", landed.write_seconds)

    def reset(self) -> None:
        """Forget everything."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another process's."""
        for name, value in other.data.items():
            self._add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data

    def _add(self, name: str, value: float) -> None:
        self.data[name] = self.data.get(name, 0) + value


class CoinRAGMetrics(KVConnectorPromMetrics):
    """The sums as counters `vllm:coinrag_…_total`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register them."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[int, dict[str, Any]] = {}
        metrics = {
            name: metric_types[Counter](
                name=f"vllm:coinrag_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in _COUNTED.items()
        }
        for engine, values in per_engine_labelvalues.items():
            self._counters[engine] = {it: metrics[it].labels(*values) for it in metrics}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what happened in an interval."""
        for name, value in transfer_stats_data.items():
            if counter := self._counters[engine_idx].get(name):
                counter.inc(value)
