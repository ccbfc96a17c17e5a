"""Prefixes on their way: each lands by itself, or fails by itself."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.serving.checking import Injection
from coinrag_integrations.serving.loads import Landed, Loads, Order
from coinrag_integrations.serving.paged import Share
from coinrag_integrations.types import Scope, Span
from tests.serving.fakes import BLOCK, empty_layers, rows_in


def wait(loads: Loads, n: int) -> dict[str, Landed]:
    landed: dict[str, Landed] = {}
    deadline = time.monotonic() + 30
    while len(landed) < n and time.monotonic() < deadline:
        landed |= {it.request_id: it for it in loads.step()}
        time.sleep(0.001)
    return landed


@pytest.fixture
def layers(served):
    return empty_layers(served.loader.layout, n_blocks=200)


@pytest.fixture
def loads(served, layers):
    share = Share(layers=layers, heads=slice(0, served.loader.layout.n_kv_heads))
    made = Loads(loaders={Scope(): served.loader}, block_size=BLOCK, n_threads=2, share=share)
    yield made
    made.close()


def order(served, name: str, chunk: int, blocks=(), start: int = 0) -> Order:
    refs = (served.chunks[chunk].ref(Span(1, 11)), served.chunks[chunk + 1].ref())
    injection = Injection(scope=Scope(), head=served.engine.prompt.head, refs=refs)
    return Order(request_id=name, injection=injection, start=start, blocks=tuple(blocks))


def expected(served, it: Order) -> torch.Tensor:
    refs = it.injection.refs
    return served.engine.compose(refs, Stopwatch(served.engine.model.device))[0].kv[:, :, 0]


def test_a_prefix_lands_in_its_blocks(served, loads, layers):
    it = order(served, "a", 0, range(40, 60))
    loads.start([it])
    landed = wait(loads, 1)["a"]
    n = it.injection.n_entries
    assert (landed.error, landed.n_rows) == ("", n)
    assert landed.bytes_read == 42 * served.loader.layout.bytes_per_entry
    assert torch.equal(rows_in(layers, it.blocks, n), expected(served, it))
    assert loads.step() == []


def test_many_land_beside_each_other(served, loads, layers):
    orders = [order(served, f"{i}", i, range(20 * i, 20 * i + 20)) for i in range(6)]
    loads.start(orders)
    landed = wait(loads, 6)
    assert not any(it.error for it in landed.values())
    for it in orders:
        rows = rows_in(layers, it.blocks, it.injection.n_entries)
        assert torch.equal(rows, expected(served, it))


def test_the_rest_of_a_prefix_leaves_the_first_blocks_alone(served, loads, layers):
    it = order(served, "a", 0, range(30), start=2 * BLOCK)
    loads.start([it])
    assert wait(loads, 1)["a"].error == ""
    n = it.injection.n_entries
    rows = rows_in(layers, it.blocks, n)
    assert rows[..., : 2 * BLOCK, :].isnan().all()
    assert torch.equal(rows[..., 2 * BLOCK :, :], expected(served, it)[..., 2 * BLOCK :, :])


def test_one_that_cannot_be_read_fails_alone(served, loads):
    good, bad = order(served, "good", 0, range(20)), order(served, "bad", 3, range(20, 40))
    served.engine.store.path(bad.injection.refs[0].chunk_id).unlink()
    loads.start([bad, good])
    landed = wait(loads, 2)
    assert not landed["good"].error
    assert landed["bad"].error.startswith("ChunkNotFoundError")
    assert landed["bad"].n_rows == 0


def test_one_that_was_refused_fails_at_once(loads):
    loads.start([Order(request_id="a", injection=None)])
    (landed,) = loads.step()
    assert landed.error == "refused"


def test_a_writer_that_raises_fails_one_request(served, loads, layers):
    it = order(served, "a", 0, blocks=(0,))  # too few blocks
    loads.start([it, order(served, "b", 1, range(20))])
    landed = wait(loads, 2)
    assert landed["a"].error
    assert not landed["b"].error


def test_nothing_is_waited_for(served, loads, monkeypatch):
    gate = threading.Event()
    load = type(served.loader).load

    def slow(self, injection, start=0):
        gate.wait(30)
        return load(self, injection, start)

    monkeypatch.setattr(type(served.loader), "load", slow)
    loads.start([order(served, "a", 0, range(20))])
    begin = time.monotonic()
    assert loads.step() == []
    assert time.monotonic() - begin < 5
    gate.set()
    assert wait(loads, 1)["a"].error == ""


def test_loaders_may_be_used_by_many_threads(served):
    orders = [order(served, f"{i}", i % 5) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda it: served.loader.load(it.injection).kv, orders))
    for it, kv in zip(orders, rows, strict=True):
        assert torch.equal(kv, expected(served, it))
