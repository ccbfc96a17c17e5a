"""Rows of a server's cache: those that the engine itself would stand behind."""

from __future__ import annotations

import shutil

import pytest
import torch

from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import (
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    StoreError,
)
from coinrag_integrations.serving.checking import Injection
from coinrag_integrations.serving.config import ServingConfig
from coinrag_integrations.serving.loading import Loader, open_texts
from coinrag_integrations.serving.prepared import prepare
from coinrag_integrations.types import Scope, Span, SpanRef
from tests.serving.conftest import SENTENCES
from tests.tiny import SUPPORTED, fill, supported_model


def spans(chunks):
    return chunks[0].ref(Span(3, 9)), chunks[1].ref(), chunks[2].ref(Span(0, 5))


def injection(served, *refs) -> Injection:
    return Injection(scope=Scope(), head=served.engine.prompt.head, refs=refs)


def expected(engine, refs) -> torch.Tensor:
    return engine.compose(refs, Stopwatch(engine.model.device))[0].kv[:, :, 0]


def test_rows_are_those_of_the_engine(served):
    refs = spans(served.chunks)
    rows = served.loader.load(injection(served, *refs))
    assert rows.start == 0
    assert torch.equal(rows.kv, expected(served.engine, refs))
    per_entry = served.loader.layout.bytes_per_entry
    assert rows.bytes_read == sum(map(len, refs)) * per_entry


def test_any_rest_of_a_prefix_can_be_loaded(served):
    refs = spans(served.chunks)
    whole = expected(served.engine, refs)
    n = whole.shape[3]
    for start in range(n):
        rows = served.loader.load(injection(served, *refs), start)
        assert rows.start == start
        assert torch.equal(rows.kv, whole[:, :, :, start:])
    assert served.loader.load(injection(served, *refs), n).kv.shape[3] == 0


def test_what_lies_before_the_rest_is_not_read(served):
    refs = spans(served.chunks)
    injected = injection(served, *refs)
    rows = served.loader.load(injected, injected.n_entries - 2)
    assert rows.bytes_read == len(refs[2]) * served.loader.layout.bytes_per_entry


def assert_loaded_as_composed(model, folder, **options):
    """What a server loads of a new store is what its engine composes."""
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read", **options)
    with Engine(model, folder, config) as engine:
        refs = spans(fill(engine, SENTENCES))
        prepare(engine)
        serving = ServingConfig.parse({"store": str(folder)})
        loader = Loader.open(serving, engine.scope, torch.device("cpu"))
        injected = Injection(scope=engine.scope, head=engine.prompt.head, refs=refs)
        assert torch.equal(loader.load(injected).kv, expected(engine, refs))
        loader.close()


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "phi4-mini", "cohere", "llama-yarn", "smollm3"]
)
def test_rows_of_other_families(family, tmp_path):
    assert_loaded_as_composed(supported_model(family), tmp_path)


def test_all_families_can_be_opened(tmp_path):
    for family in SUPPORTED:
        with Engine(supported_model(family), tmp_path / family) as engine:
            prepare(engine)
            serving = ServingConfig.parse({"store": str(tmp_path / family)})
            Loader.open(serving, engine.scope, torch.device("cpu")).close()


def test_codes_are_read_as_the_engine_reads_them(model, tmp_path):
    assert_loaded_as_composed(model, tmp_path, codec="int8")


def test_slots_lie_where_the_engine_puts_them(slotted):
    chunks = slotted.chunks
    refs = (
        SpanRef(chunks[0].chunk_id, 0, 32, 4),
        chunks[1].ref(Span(3, 9)),
        SpanRef(chunks[2].chunk_id, 8, 32, 4),
    )
    whole = expected(slotted.engine, refs)
    n = len(slotted.engine.prompt.head) + 8 + 6 + 6
    assert whole.shape[3] == n
    for start in (0, n - 13, n - 6, n - 2):
        rows = slotted.loader.load(injection(slotted, *refs), start)
        assert torch.equal(rows.kv, whole[:, :, :, start:])


def test_a_file_that_is_gone_or_damaged_is_an_error(served):
    refs = spans(served.chunks)
    path = served.engine.store.path(refs[1].chunk_id)
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(ChunkNotFoundError):
        served.loader.load(injection(served, *refs))
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptChunkError):
        served.loader.load(injection(served, *refs))
    path.write_bytes(content)
    served.loader.load(injection(served, *refs))


def test_a_head_that_is_gone_is_an_error(served):
    shutil.rmtree(served.engine.folder / "serving")
    with pytest.raises(StoreError):
        served.loader.load(injection(served, *spans(served.chunks)))


def test_scopes_without_anything_prepared_are_refused(engine):
    fill(engine)
    serving = ServingConfig.parse({"store": str(engine.disk.root)})
    with pytest.raises(StoreError, match="prepare"):
        open_texts(serving, engine.scope)
    with pytest.raises(StoreError, match="prepare"):
        Loader.open(serving, engine.scope, torch.device("cpu"))


def test_the_options_of_a_server_are_checked(served, tmp_path):
    store = str(served.engine.disk.root)
    assert ServingConfig.parse({"store": store}).scopes == (Scope(),)
    named = ServingConfig.parse({"store": store, "scopes": ["acme.docs"], "n_threads": 2})
    assert (named.scopes, named.n_threads) == ((Scope(tenant="acme", collection="docs"),), 2)
    for options, said in [
        ({}, "needs 'store'"),
        ({"store": 3}, "needs 'store'"),
        ({"store": str(tmp_path / "nowhere")}, "no store"),
        ({"store": str(tmp_path)}, "no documents"),
        ({"store": store, "path": "x"}, "unknown options: path"),
        ({"store": store, "scopes": "default.main"}, "must be a list"),
        ({"store": store, "scopes": ["default"]}, "'tenant.collection'"),
        ({"store": store, "scopes": ["a.b.c"]}, "is no name"),
        ({"store": store, "scopes": []}, "no documents"),
        ({"store": store, "n_threads": 0}, "n_threads"),
        ({"store": store, "memory_bytes": -1}, "memory_bytes"),
        ({"store": store, "memory_bytes": True}, "memory_bytes"),
        ({"store": store, "fingerprint": 7}, "fingerprint"),
    ]:
        with pytest.raises(ConfigError, match=said):
            ServingConfig.parse(options)
