"""Whether to read or to encode: lines fitted to what was measured, and decisions that follow them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.engine.cost import CostModel, Line
from coinrag_integrations.engine.store import ReadReport, Remote
from coinrag_integrations.types import ChunkId
from tests.tiny import fill, supported_model

seconds = st.floats(1e-5, 10.0)


@given(a=seconds, b=seconds, sizes=st.lists(st.integers(1, 1000), min_size=2, unique=True))
def test_a_line_is_found_again(a, b, sizes):
    line = Line()
    for size in sizes:
        line.observe(size, a + b * size)
    for size in (1, 77, 2000):
        assert line.predict(size) == pytest.approx(a + b * size, rel=1e-3, abs=1e-4)


@given(size=st.integers(1, 10**9), spent=seconds, n=st.integers(1, 20))
def test_one_size_alone_is_scaled_in_proportion(size, spent, n):
    line = Line()
    for _ in range(n):
        line.observe(size, spent)
    assert line.predict(size) == pytest.approx(spent, rel=1e-6)
    assert line.predict(2 * size) == pytest.approx(2 * spent, rel=1e-6)


def test_nothing_is_known_before_anything_was_observed():
    assert Line().predict(10) is None
    cost = CostModel()
    cost.observe_encode(512, 0.2)
    assert cost.estimate("remote", 10**6, 512) is None


def test_a_link_that_recovers_is_used_again():
    cost = CostModel()
    cost.observe_encode(512, 0.2)
    cost.observe(ReadReport(remote={0: 10**6}, remote_seconds=5.0), 5.0)
    assert cost.estimate("remote", 10**6, 512).prefers_encoding
    for _ in range(60):
        cost.observe(ReadReport(remote={0: 10**6}, remote_seconds=0.01), 0.01)
    assert not cost.estimate("remote", 10**6, 512).prefers_encoding


def test_what_was_measured_long_ago_counts_no_more_so_that_it_is_measured_again():
    now = [0.0]
    cost = CostModel(clock=lambda: now[0])
    cost.observe_encode(512, 0.2)
    cost.observe(ReadReport(disk={0: 10**6}), 60.0)
    chunk = ChunkId("a" * 32)
    slow = lambda: cost.slow_reads({chunk: "disk"}, {chunk: 10**6}, 512)  # noqa: E731
    assert slow().keys() == {chunk}
    now[0] = 31.0
    assert slow() == {}, "it is read, and so measured"
    cost.observe(ReadReport(disk={0: 10**6}), 60.0)
    assert slow().keys() == {chunk}


def test_what_is_slow_to_read_is_encoded_and_said_to_be(tmp_path):
    remote = Remote.open(f"file://{tmp_path}/far")
    config = EngineConfig(chunk_tokens=32, coverage="all")
    with Engine(supported_model("llama"), tmp_path / "store", config, remote=remote) as engine:
        chunks = fill(engine)
        refs = [chunk.ref() for chunk in chunks]
        before = engine.answer("Who?", refs)
        for chunk in chunks:
            engine.store.path(chunk.chunk_id).unlink()
        engine.cost.observe(ReadReport(remote={0: 1000}, remote_seconds=100.0), 100.0)
        after = engine.answer("Who?", refs)
        assert after.text == before.text
        assert after.recomputed == tuple(refs)
        assert after.timings.n_declined == len(refs)
        assert after.timings.bytes_read == 0
        assert not any(chunk.chunk_id in engine.store for chunk in chunks), "nothing was mended"


def test_who_asks_to_read_reads(tmp_path):
    remote = Remote.open(f"file://{tmp_path}/far")
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read")
    with Engine(supported_model("llama"), tmp_path / "store", config, remote=remote) as engine:
        chunks = fill(engine)
        for chunk in chunks:
            engine.store.path(chunk.chunk_id).unlink()
        engine.cost.observe(ReadReport(remote={0: 1000}, remote_seconds=100.0), 100.0)
        answer = engine.answer("Who?", [chunk.ref() for chunk in chunks])
        assert (answer.recomputed, answer.timings.n_declined) == ((), 0)
        assert answer.timings.bytes_read > 0
