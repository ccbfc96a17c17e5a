"""Intervals: seeded, and as wide as they ought to be."""

from __future__ import annotations

import numpy as np
import pytest

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.statistics import bootstrap, paired_bootstrap

VALUES = np.random.default_rng(3).random(200).tolist()


def test_intervals_are_those_of_the_normal_distribution_for_many_values():
    found = bootstrap(VALUES)
    error = float(np.std(VALUES)) / len(VALUES) ** 0.5
    assert found.mean == pytest.approx(np.mean(VALUES))
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.1 * error)


def test_the_same_seed_gives_the_same_interval():
    assert bootstrap(VALUES, 1) == bootstrap(VALUES, 1) != bootstrap(VALUES, 2)


def test_pairs_are_kept_together():
    """Hard questions are hard for both: a constant difference is certain, however much both vary."""
    found = paired_bootstrap([v + 0.1 for v in VALUES], VALUES)
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    wide = paired_bootstrap(VALUES, VALUES[::-1])
    assert wide.low < 0 < wide.high


def test_one_value_is_its_own_interval_and_none_have_none():
    found = bootstrap([0.5])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ConfigError, match="at least one"):
        bootstrap([])
    with pytest.raises(ConfigError, match="paired"):
        paired_bootstrap([1.0], [1.0, 2.0])
