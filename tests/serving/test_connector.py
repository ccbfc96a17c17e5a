"""The connector's side of vLLM's contract, without a server: requests and caches are stand-ins.

Needs vLLM, which has an environment of its own: `make serving`.
"""

from __future__ import annotations

import pickle
import time
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import ConfigError, StoreError
from coinrag_integrations.serving.launch import transfer_config
from coinrag_integrations.types import Scope, Span
from tests.serving.fakes import BLOCK, empty_layers, rows_in

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vllm is not installed: make serving"
)


def server(served, layers=None, **changes):
    """The options of a server for a store, as vLLM hands them to a connector."""
    from vllm.config import KVTransferConfig

    layout = served.loader.layout
    options = {**transfer_config(served.config.store), **changes.pop("transfer", {})}
    model = {
        "get_total_num_hidden_layers": lambda: layout.n_layers,
        "get_total_num_kv_heads": lambda: layout.n_kv_heads,
        "get_head_size": lambda: layout.head_dim,
        "dtype": layout.dtype,
        "use_mla": False,
        **changes.pop("model", {}),
    }
    names = {f"model.layers.{i}.self_attn.attn": layer for i, layer in (layers or {}).items()}
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**options),
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=changes.pop("speculative_config", None),
        cache_config=SimpleNamespace(block_size=BLOCK, prefix_caching_hash_algo="sha256"),
        compilation_config=SimpleNamespace(static_forward_context=names),
    )


def caches(n_groups: int = 1, window: int | None = None):
    spec = SimpleNamespace(sliding_window=window, attention_chunk_size=None)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * n_groups)


@pytest.fixture
def scheduler(served):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from coinrag_integrations.serving.connector import CoinRAGConnector

    init_none_hash(get_hash_fn_by_name("sha256"))  # as an engine does when it starts
    made = CoinRAGConnector(server(served), KVConnectorRole.SCHEDULER, caches())
    yield made
    made.shutdown()


@pytest.fixture
def layers(served):
    return empty_layers(served.loader.layout, n_blocks=60)


@pytest.fixture
def worker(served, layers, monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from coinrag_integrations.serving import connector

    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(connector, "get_tensor_model_parallel_world_size", lambda: 1)
    options = server(served, layers)
    made = connector.CoinRAGConnector(options, KVConnectorRole.WORKER, caches())
    names = options.compilation_config.static_forward_context
    made.register_kv_caches({name: layer.kv_cache for name, layer in names.items()})
    yield made
    made.shutdown()


def request(served, name: str = "a", **changes):
    refs = (served.chunks[0].ref(Span(3, 9)), served.chunks[1].ref())
    written = served.written(*refs)
    values = {
        "block_hashes": [],
        "update_block_hashes": lambda: None,
        "request_id": name,
        "kv_transfer_params": written.params,
        "prompt_token_ids": list(written.prompt),
        "cache_salt": written.salt,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "resumable": False,
        "num_tokens": len(written.prompt),
        **changes,
    }
    return SimpleNamespace(**values)


def blocks(*ids: int):
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def step(scheduler, worker):
    """One step of the model: what was ordered is handed over, through a pickle, and what landed."""
    orders = pickle.loads(pickle.dumps(scheduler.build_connector_meta(None)))
    worker.bind_connector_metadata(orders)
    worker.start_load_kv(None)
    worker.clear_connector_metadata()
    return worker.get_transfer_results(set())


def until(scheduler, worker, name: str):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        results = step(scheduler, worker)
        if name in results.finished_recving:
            return results
        time.sleep(0.01)
    raise AssertionError(f"{name} has not landed")


def test_a_prefix_goes_from_a_request_into_its_blocks(served, scheduler, worker, layers):
    it = request(served)
    n = served.written(served.chunks[0].ref(Span(3, 9)), served.chunks[1].ref()).n_entries
    scheduler.on_new_request(it)
    assert scheduler.get_num_new_matched_tokens(it, 0) == (n, True)
    assert scheduler.get_num_new_matched_tokens(it, 2 * BLOCK) == (n - 2 * BLOCK, True)
    assert scheduler.get_num_new_matched_tokens(it, n + 3) == (0, False)
    ids = tuple(range(20, 40))
    scheduler.update_state_after_alloc(it, blocks(*ids), n - 2 * BLOCK)
    assert until(scheduler, worker, "a").failed_recving == set()
    refs = (served.chunks[0].ref(Span(3, 9)), served.chunks[1].ref())
    expected = served.engine.compose(refs, Stopwatch(torch.device("cpu")))[0].kv[:, :, 0]
    rows = rows_in(layers, ids, n)
    assert torch.equal(rows[..., 2 * BLOCK :, :], expected[..., 2 * BLOCK :, :])
    assert rows[..., : 2 * BLOCK, :].isnan().all()
    scheduler.update_state_after_alloc(it, blocks(*ids), 0)  # asked again, once it runs
    assert scheduler.build_connector_meta(None).orders == []
    assert scheduler.request_finished(it, list(ids)) == (False, {"coinrag": {"n_entries": n}})


def hashed(request, scheduler):
    """The hashes of a request's blocks after the connector has seen it, and after three more tokens."""
    found = []
    request.all_token_ids = [*request.prompt_token_ids]
    request.update_block_hashes = lambda: request.block_hashes.extend(
        request._block_hasher(request)
    )
    scheduler.on_new_request(request)
    for token in (None, 1, 2, 3):
        if token is not None:
            request.all_token_ids.append(token)
            request.num_tokens += 1
            request.update_block_hashes()
        found.append(list(request.block_hashes))
    return found


def test_blocks_are_named_also_those_that_an_answer_fills(served, scheduler):
    refs = (served.chunks[0].ref(Span(3, 9)), served.chunks[1].ref())
    cut = (refs[0], served.chunks[1].ref(Span(0, 20)))
    made = {}
    for name, spans in (("whole", refs), ("again", refs), ("cut", cut)):
        written = served.written(*spans)
        changes = {"kv_transfer_params": written.params, "cache_salt": written.salt}
        prompt = list(written.prompt[: written.n_entries + 1])
        it = request(served, name, **changes, prompt_token_ids=prompt, num_tokens=len(prompt))
        made[name] = hashed(it, scheduler)
    first, last = made["whole"][0], made["whole"][-1]
    assert len(last) == (served.written(*refs).n_entries + 4) // BLOCK
    assert made["again"] == made["whole"]
    assert last[: len(first)] == first
    n_same = (served.written(*cut).n_entries) // BLOCK
    assert made["cut"][0][:n_same] == first[:n_same]
    assert not set(made["cut"][-1][n_same:]) & set(last)


def test_plain_requests_are_left_alone(served, scheduler):
    it = request(served, kv_transfer_params=None, cache_salt=None)
    scheduler.on_new_request(it)
    assert scheduler.get_num_new_matched_tokens(it, 0) == (0, False)
    scheduler.update_state_after_alloc(it, blocks(1), 0)
    assert scheduler.build_connector_meta(None).orders == []
    assert scheduler.request_finished(it, [1]) == (False, None)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": None},
        {"kv_transfer_params": "text"},
        {"kv_transfer_params": [1]},
        {"kv_transfer_params": {"path": "/etc/passwd"}},
        {"kv_transfer_params": None},
        {"prompt_token_ids": [5], "num_tokens": 1},
        {"prompt_token_ids": None},
        {"sampling_params": None},
        {"sampling_params": SimpleNamespace(prompt_logprobs=1), "skip_reading_prefix_cache": True},
        {"skip_reading_prefix_cache": True},
        {"lora_request": object()},
        {"mm_features": [object()]},
        {"resumable": True},
    ],
    ids=str,
)
def test_bad_requests_wait_for_a_prefix_that_fails(served, scheduler, worker, change):
    it = request(served, **change)
    scheduler.on_new_request(it)
    if it.kv_transfer_params is not None:
        it.kv_transfer_params.get("do_remote_prefill")  # as the scheduler does
    assert it.skip_reading_prefix_cache is False  # else it would be answered as text
    for n_computed in (0, it.num_tokens - 1):
        n_new = it.num_tokens - n_computed
        assert scheduler.get_num_new_matched_tokens(it, n_computed) == (n_new, True)
    scheduler.update_state_after_alloc(it, blocks(1), 1)
    results = until(scheduler, worker, "a")
    assert results.failed_recving == results.finished_recving == {"a"}
    assert scheduler.request_finished(it, [1]) == (False, None)


def test_one_that_cannot_be_read_fails_alone(served, scheduler, worker):
    good = request(served, "good")
    bad = request(served, "bad")
    other = served.written(served.chunks[5].ref())
    bad.kv_transfer_params, bad.cache_salt = other.params, other.salt
    bad.prompt_token_ids = list(other.prompt)
    served.engine.store.path(served.chunks[5].chunk_id).unlink()
    for i, it in enumerate((good, bad)):
        scheduler.on_new_request(it)
        n, _ = scheduler.get_num_new_matched_tokens(it, 0)
        scheduler.update_state_after_alloc(it, blocks(*range(20 * i, 20 * i + 20)), n)
    landed, failed = set(), set()
    deadline = time.monotonic() + 60
    while landed != {"good", "bad"} and time.monotonic() < deadline:
        results = step(scheduler, worker)
        landed |= results.finished_recving
        failed |= results.failed_recving
    assert (landed, failed) == ({"good", "bad"}, {"bad"})
    stats = worker.get_kv_connector_stats()
    assert (stats.data["prefixes"], stats.data["failed"]) == (1, 1)
    assert stats.data["rows"] > 0
    assert worker.get_kv_connector_stats() is None


@pytest.mark.parametrize(
    ("change", "groups", "said"),
    [
        ({"transfer": {"kv_role": "kv_both"}}, caches(), "kv_role"),
        ({"transfer": {"kv_load_failure_policy": "recompute"}}, caches(), "failure_policy"),
        ({"model": {"use_mla": True}}, caches(), "MLA"),
        ({"model": {"dtype": torch.bfloat16}}, caches(), "serve the model"),
        ({"model": {"get_head_size": lambda: 128}}, caches(), "serve the model"),
        ({"speculative_config": object()}, caches(), "speculative"),
        ({}, caches(n_groups=2), "different caches"),
        ({}, caches(window=64), "windows"),
        ({"transfer": {"kv_connector_extra_config": {}}}, caches(), "needs 'store'"),
        ({"transfer": {"kv_connector_extra_config": {"path": "x"}}}, caches(), "unknown options"),
    ],
)
def test_servers_that_cannot_serve_a_store_do_not_start(served, change, groups, said):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from coinrag_integrations.serving.connector import CoinRAGConnector

    with pytest.raises(ConfigError, match=said):
        CoinRAGConnector(server(served, **change), KVConnectorRole.SCHEDULER, groups)


def test_a_server_for_a_scope_that_was_not_prepared_does_not_start(served):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from coinrag_integrations.serving.connector import CoinRAGConnector

    extra = {"store": str(served.config.store), "scopes": [str(Scope(tenant="nobody"))]}
    options = server(served, transfer={"kv_connector_extra_config": extra})
    with pytest.raises(StoreError, match="prepare"):
        CoinRAGConnector(options, KVConnectorRole.SCHEDULER, caches())


def test_counters_add_up(served):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from coinrag_integrations.serving.connector import CoinRAGConnector
    from coinrag_integrations.serving.loads import Landed
    from coinrag_integrations.serving.metrics import CoinRAGStats

    first, second = CoinRAGStats(), CoinRAGStats()
    first.note(Landed(request_id="a", n_rows=5, bytes_read=100, load_seconds=0.5))
    second.note(Landed(request_id="b", error="gone"))
    both = CoinRAGConnector.build_kv_connector_stats(first.to_dict()).aggregate(second)
    assert both.reduce() == {
        "prefixes": 1,
        "failed": 1,
        "rows": 5,
        "bytes_read": 100,
        "load_seconds": 0.5,
        "write_seconds": 0,
    }
    registry = CollectorRegistry()  # an engine in this process has registered its own
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = CoinRAGConnector.build_prom_metrics(server(served), kinds, ["engine"], {0: ["0"]})
    for _ in range(2):
        metrics.observe(both.to_dict())
    counter = metrics._counters[0]["rows"]
    assert counter._value.get() == 10
    both.reset()
    assert both.is_empty()
