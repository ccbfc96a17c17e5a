"""How sure a mean is, and a difference of two: the bootstrap, seeded. Knows no method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coinrag_integrations.errors import ConfigError

RESAMPLES = 10_000
_AT_ONCE = 1_000  # resamples held in memory together


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean and its 95 % interval from the percentiles of bootstrap means."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """The mean of some measurements, each of another question.

    Raises:
        ConfigError: no values.
    """
    if not values:
        raise ConfigError("nothing was measured: a mean needs at least one value")
    found = np.asarray(values, dtype=np.float64)
    low, high = np.percentile(_means(found, seed, resamples), (2.5, 97.5)).tolist()
    return Estimate(mean=float(found.mean()), low=low, high=high)


def paired_bootstrap(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """How much larger ours is than theirs on average, both measured on the same questions in order.

    Questions are drawn, not answers: what makes a question hard for both does not count.

    Raises:
        ConfigError: no values, or not as many of the one as of the other.
    """
    if len(ours) != len(theirs):
        raise ConfigError(
            f"{len(ours)} values cannot be paired with {len(theirs)}: measure the same questions"
        )
    return bootstrap([a - b for a, b in zip(ours, theirs, strict=True)], seed, resamples)


def _means(values: NDArray[np.float64], seed: int, resamples: int) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    means = []
    for first in range(0, resamples, _AT_ONCE):
        shape = (min(_AT_ONCE, resamples - first), len(values))
        means.append(values[random.integers(0, len(values), shape)].mean(axis=1))
    return np.concatenate(means)
