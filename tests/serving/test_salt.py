"""Salts: equal for equal prefixes, different for everything that differs, and nobody's to guess."""

from __future__ import annotations

from itertools import combinations

from coinrag_integrations.serving.salt import is_ours, salt_of
from coinrag_integrations.types import ChunkId, Scope, SpanRef

A, B = ChunkId("a" * 32), ChunkId("b" * 32)
SLOTS = (SpanRef(A, 0, 4, 4), SpanRef(B, 2, 3))
BASE = {
    "key": b"secret",
    "forms": {1: "f" * 64, 4: "4" * 64},
    "scope": Scope(),
    "head": (1, 2),
    "refs": (SpanRef(A, 0, 4), SpanRef(B, 2, 3)),
}


def test_whatever_differs_gives_another_salt():
    changes = [
        {},
        {"key": b"another"},
        {"forms": {1: "e" * 64}},
        {"scope": Scope(tenant="acme")},
        {"head": (2, 1)},
        {"head": ()},
        {"refs": BASE["refs"][::-1]},
        {"refs": BASE["refs"][:1]},
        {"refs": SLOTS},
        {"refs": SLOTS, "forms": {1: "f" * 64, 4: "5" * 64}},
    ]
    salts = [salt_of(**{**BASE, **change}) for change in changes]
    assert all(a != b for a, b in combinations(salts, 2))
    assert salts[0] == salt_of(**BASE)


def test_a_salt_is_one_that_a_server_takes():
    salt = salt_of(**BASE)
    assert is_ours(salt)
    assert len(salt) <= 128
    assert not set(salt) & set("@/\\\0")
    assert not any(map(is_ours, ("", None, 3, "mine", "Coinrag-x")))
