"""Heads are encoded once, kept by their ids, and dropped oldest first."""

from __future__ import annotations

import pytest
import torch

from coinrag_integrations.engine.prompt_cache import PromptCache


@pytest.fixture
def cache():
    encoded = []

    def encode(ids):
        encoded.append(tuple(ids))
        return torch.full((len(ids), 1, 2, 1, 8), float(ids[0]))

    made = PromptCache(encode=encode, max_bytes=3 * 4 * 2 * 8 * 4)  # three heads of four tokens
    made.encoded = encoded  # type: ignore[attr-defined]
    return made


def head(n: int) -> tuple[int, ...]:
    return (n,) * 4


def test_a_head_is_encoded_once(cache):
    first = cache.get(head(1))
    assert cache.get(head(1)) is first
    assert (first == 1).all()
    assert cache.encoded == [head(1)]


def test_the_least_recently_used_goes_first(cache):
    for n in (1, 2, 3, 1, 4):  # 2 is now the oldest
        cache.get(head(n))
    assert cache.n_bytes == cache.max_bytes
    for n in (1, 3, 4):
        cache.get(head(n))
    assert cache.encoded == [head(n) for n in (1, 2, 3, 4)]
    cache.get(head(2))
    assert cache.encoded[-1] == head(2)


def test_one_head_larger_than_everything_is_kept_alone(cache):
    large = (9,) * 50
    cache.get(head(1))
    cache.get(large)
    cache.get(large)
    assert cache.encoded == [head(1), large]
    assert cache.n_bytes == 50 * 2 * 8 * 4
