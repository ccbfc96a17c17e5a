"""What answers cost from end to end, and after how many questions a cache has paid for itself."""

from __future__ import annotations

from coinrag_integrations.evaluation.cost.measure import (
    CostConfig,
    CostReport,
    Prices,
    measure_cost,
)

__all__ = ["CostConfig", "CostReport", "Prices", "measure_cost"]
