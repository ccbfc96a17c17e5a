"""A vLLM server in processes of its own, and our client: what goes wrong stays where it is.

Needs vLLM, which has an environment of its own: `make serving`. The model is random and tiny.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import transformers

from coinrag_integrations.engine import (
    Engine,
    EngineConfig,
    GenerationConfig,
    Message,
    Text,
    load_model,
    mark,
)
from coinrag_integrations.engine.handles import strip_handles
from coinrag_integrations.engine.plan import arrange
from coinrag_integrations.engine.tool_calls import map_strings
from coinrag_integrations.errors import ServingError
from coinrag_integrations.serving import ServedModel, prepare
from coinrag_integrations.serving.launch import free_port, running, server_command
from coinrag_integrations.serving.marked import head_of_request
from coinrag_integrations.types import Chunk, Scope, Span, SpanRef
from tests.tiny import fill, save_tiny

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vllm is not installed: make serving"
)

SENTENCES = "The tidal organ of Marenqué was built by Bastien Roule in 1923. " * 60
SHORT = GenerationConfig(max_new_tokens=6)
N_REQUESTS = int(os.environ.get("SERVING_REQUESTS", "1000"))
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}
ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]


@dataclass
class Place:
    """A store of three tenants with equal documents, and the model that both are of."""

    folder: Path
    model: Path
    engines: dict[str, Engine]
    chunks: dict[str, list[Chunk]]

    def command(self, port: int) -> list[str]:
        return server_command(self.model, self.folder / "store", port, ARGUMENTS)

    def refs(self, tenant: str, seed: int) -> list[SpanRef]:
        """Some spans and chunks, different ones for each seed."""
        dice = random.Random(seed)
        chosen = dice.sample(self.chunks[tenant], 3)
        whole, *others = chosen
        starts = [dice.randrange(0, len(chunk) - 2) for chunk in others]
        spans = [
            chunk.ref(Span(start, dice.randrange(start + 1, len(chunk))))
            for chunk, start in zip(others, starts, strict=True)
        ]
        return [*spans, whole.ref()]

    def own(self, tenant: str, seed: int) -> str:
        return self.engines[tenant].answer(question(seed), self.refs(tenant, seed), SHORT).text


def question(seed: int) -> str:
    return f"Who built organ number {seed}?"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    # vLLM's kernels for CPUs know no heads as small as those of the other tests.
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    save_tiny(folder / "model", config_class=transformers.LlamaConfig, **sizes)
    model = load_model(folder / "model", dtype="float32", pack=False)
    config = EngineConfig(chunk_tokens=32, coverage="all", load="read", on_miss="raise")
    engines = {
        tenant: Engine(model, folder / "store", config, scope=Scope(tenant=tenant))
        for tenant in ("one", "two", "three")
    }
    chunks = {tenant: fill(engine, SENTENCES) for tenant, engine in engines.items()}
    for engine in engines.values():
        ServedModel.of(engine, "http://127.0.0.1:9").close()  # prepares the store
    yield Place(folder, folder / "model", engines, chunks)
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def address(place) -> Iterator[str]:
    port, log = free_port(), place.folder / "server.log"
    with running(place.command(port), port, environment=ENVIRONMENT, log=log) as it:
        yield it


@pytest.fixture
def served(place, address) -> Iterator[dict[str, ServedModel]]:
    made = {tenant: ServedModel.of(engine, address) for tenant, engine in place.engines.items()}
    yield made
    for it in made.values():
        it.close()


def ask(place, served, tenant: str, seed: int) -> tuple[str, str]:
    """The text of an answer, and why it was not composed."""
    stream = served[tenant].stream(question(seed), place.refs(tenant, seed), SHORT)
    return "".join(stream), stream.fallback


def test_answers_are_those_of_our_engine(place, served):
    for seed in range(6):
        assert ask(place, served, "one", seed) == (place.own("one", seed), "")


def test_sixteen_clients_do_not_disturb_each_other(place, served):
    seeds = [*range(100, 132)] * 2
    with ThreadPoolExecutor(16) as pool:
        said = list(pool.map(lambda seed: ask(place, served, "one", seed), seeds))
    assert said == [(place.own("one", seed), "") for seed in seeds]


def test_two_tenants_share_nothing(place, served, address):
    for tenant in ("one", "two"):
        refs = place.refs(tenant, 7)
        stream = served[tenant].stream(question(7), refs, SHORT)
        assert "".join(stream) == place.own(tenant, 7)
    asked = {it: body(place, it, 7) for it in ("one", "two")}
    assert asked["one"]["prompt"] == asked["two"]["prompt"]
    for name in ("cache_salt", "kv_transfer_params"):
        mixed = {**asked["one"], name: asked["two"][name]}
        assert httpx.post(f"{address}/v1/completions", json=mixed, timeout=60).status_code == 500
    plain = {**asked["one"], "cache_salt": "mine", "kv_transfer_params": None}
    usage = httpx.post(f"{address}/v1/completions", json=plain, timeout=60).json()["usage"]
    assert not (usage["prompt_tokens_details"] or {}).get("cached_tokens")


def body(place, tenant: str, seed: int) -> dict:
    engine = place.engines[tenant]
    model = ServedModel.of(engine, "http://127.0.0.1:9", model=str(place.model))
    stream = model.stream(question(seed), place.refs(tenant, seed), SHORT)
    sent = stream.body_of_prefix()
    model.close()
    return {**sent, "stream": False, "stream_options": None}


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": None},
        {"cache_salt": "coinrag-" + "0" * 64},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {"path": "/etc/passwd"}},
        {"kv_transfer_params": {"coinrag": 1}},
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]}},
        {"prompt": [5]},
        {"prompt": [5] * 300},
        {"prompt": "Who built it?"},
        {"prompt_logprobs": 1},
        {"n": 2, "kv_transfer_params": {"handles": [":" + "a" * 24] * 5000}},
        {"kv_transfer_params": None, "vllm_xargs": {"kv_transfer_params": "text"}},
        {"kv_transfer_params": None, "vllm_xargs": {"kv_transfer_params": [1, 2]}},
        {"kv_transfer_params": {"tensor": [[0.5] * 64] * 64}},
        {"kv_transfer_params": "text"},
        {"kv_transfer_params": [1]},
        {"cache_salt": "a/b"},
        {"cache_salt": 7},
    ],
    ids=lambda change: str(change)[:50],
)
def test_bad_requests_leave_the_server_up(place, served, address, change):
    sent = {**body(place, "one", 3), **change}
    response = httpx.post(f"{address}/v1/completions", json=sent, timeout=60)
    assert response.status_code in (400, 422, 500)
    assert ask(place, served, "one", 3) == (place.own("one", 3), "")


def damaged(paths: list[Path], dice: random.Random) -> set[str]:
    """Delete or damage one file in twenty; the ids of their chunks."""
    bad = dice.sample(paths, max(2, len(paths) // 20))
    for i, path in enumerate(bad):
        content = path.read_bytes()
        path.unlink()
        if i % 2:
            path.write_bytes(content[:-1])  # then no part of it is trusted
    return {path.stem for path in bad}


def as_text(place, tenant: str, seed: int) -> str:
    """Our engine's answer where every span is computed with the question."""
    engine = place.engines[tenant]
    chunks = {chunk.chunk_id: chunk for chunk in place.chunks[tenant]}
    refs = arrange(place.refs(tenant, seed))
    ids = [i for ref in refs for i in chunks[ref.chunk_id].token_ids[ref.start : ref.stop]]
    prompt = (*engine.prompt.head, *ids, *engine.prompt.tail(question(seed)))
    stream = engine.stream_pieces([Text(prompt)], SHORT)
    for _ in stream:
        pass
    return stream.answer.text


def test_a_thousand_requests_survive_damaged_files_and_a_restart(place):
    """No wrong answer and no hang: what cannot be loaded is computed as text, all else is composed."""
    port, log, tenant = free_port(), place.folder / "restarted.log", "three"
    address = f"http://127.0.0.1:{port}"
    served = {tenant: ServedModel.of(place.engines[tenant], address, model=str(place.model))}
    expected = {seed: place.own(tenant, seed) for seed in range(N_REQUESTS)}
    store = place.engines[tenant].store
    gone = damaged([store.path(it.chunk_id) for it in place.chunks[tenant]], random.Random(0))
    done: dict[int, tuple[str, str]] = {}
    broken: list[int] = []

    def until_answered(seed: int) -> None:
        while seed not in done:
            try:
                done[seed] = ask(place, served, tenant, seed)
            except ServingError:
                broken.append(seed)
                time.sleep(1)

    with ThreadPoolExecutor(8) as pool:
        with running(place.command(port), port, environment=ENVIRONMENT, log=log):
            futures = [pool.submit(until_answered, seed) for seed in expected]
            while len(done) < N_REQUESTS // 2:
                time.sleep(0.01)
        with running(place.command(port), port, environment=ENVIRONMENT, log=log):
            for future in futures:
                future.result(300)
    assert broken  # some were under way
    touched = {seed for seed in done if any(it.chunk_id in gone for it in place.refs(tenant, seed))}
    assert len(touched) > N_REQUESTS // 20
    for seed, (text, fallback) in done.items():
        assert bool(fallback) == (seed in touched), (seed, fallback)
        right = as_text(place, tenant, seed) if fallback else expected[seed]
        assert text == right, (seed, fallback)


def test_a_damaged_file_is_computed_as_text_until_it_is_mended(place, served):
    seed = 400
    path = place.engines["two"].store.path(place.refs("two", seed)[0].chunk_id)
    content, expected = path.read_bytes(), place.own("two", seed)
    path.write_bytes(content[:-1])  # then no part of it is trusted
    text, fallback = ask(place, served, "two", seed)
    assert fallback
    assert text == as_text(place, "two", seed)
    path.write_bytes(content)
    assert ask(place, served, "two", seed) == (expected, "")


def test_documents_that_are_deleted_are_not_served(place, served):
    engine = place.engines["two"]
    chunks = fill(engine, "Ines Caldero painted the pier green. " * 4, "pier")
    refs = [chunks[0].ref()]
    stream = served["two"].stream("Who?", refs, SHORT)
    for _ in stream:
        pass
    assert stream.fallback == ""
    written = served["two"].stream("Who?", refs, SHORT)
    engine.catalog.delete_document("pier")
    for _ in written:
        pass
    assert "500" in written.fallback


def test_leaving_early_leaves_the_server_up(place, served):
    long = GenerationConfig(max_new_tokens=200)
    for seed in range(500, 510):
        stream = served["one"].stream(question(seed), place.refs("one", seed), long)
        next(stream)
        stream.close()
    assert ask(place, served, "one", 1) == (place.own("one", 1), "")


def marked_chat(place, tenant: str, first: int = 2, **fields) -> dict:
    """A conversation as a stock client holds it, whose beginning has been prepared."""
    engine = place.engines[tenant]
    passages = [
        mark(engine.handles.handle(it.ref()), it.text)
        for it in place.chunks[tenant][first : first + 3]
    ]
    user = f"Read:\n{''.join(passages)}\nWho built the organ?"
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": user}]
    body = {"model": str(place.model), "messages": messages}
    prepare(engine, [head_of_request(engine.model.tokenizer, engine.handles, body)])
    return {**body, "temperature": 0, "max_tokens": 6, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_stock_clients_send_passages_with_handles(place, address, stream):
    body = marked_chat(place, "one", stream=stream)
    messages = [Message(**it) for it in body["messages"]]
    own = "".join(place.engines["one"].chat(messages, SHORT))
    before = counted(address)
    response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert response.headers["x-coinrag"].startswith("composed: ")
    if stream:
        lines = [it.removeprefix("data: ") for it in response.text.splitlines() if it]
        assert lines[-1] == "[DONE]"
        choices = [json.loads(it)["choices"][0] for it in lines[:-1]]
        said, last = "".join(it["delta"]["content"] for it in choices), choices[-1]
    else:
        (last,) = response.json()["choices"]
        said = last["message"]["content"]
    assert said.strip() == own
    assert last["finish_reason"] in ("stop", "length")
    if not stream:  # the stream finds its blocks in the server's own cache
        assert counted(address)["prefixes"] == before["prefixes"] + 1


def test_the_openai_package_knows_nothing_of_it(place, address):
    from openai import OpenAI  # vLLM brings it

    body = marked_chat(place, "two", 5)
    own = "".join(place.engines["two"].chat([Message(**it) for it in body["messages"]], SHORT))
    with OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
        before = counted(address)
        answer = client.chat.completions.create(**body)
        assert answer.choices[0].message.content.strip() == own
        assert counted(address)["prefixes"] == before["prefixes"] + 1
        chunks = list(client.chat.completions.create(**body, stream=True))
    said = "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
    assert said.strip() == own


def test_passages_that_cannot_be_loaded_are_words_for_stock_clients(place, address):
    body = marked_chat(place, "two")
    url = f"{address}/v1/chat/completions"
    path = place.engines["two"].store.path(place.chunks["two"][3].chunk_id)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    response = httpx.post(url, json=body, timeout=60)
    assert response.headers["x-coinrag"] == "text: status 500"
    words = {**body, "messages": map_strings(body["messages"], strip_handles)}
    plain = httpx.post(url, json=words, timeout=60)
    assert "x-coinrag" not in plain.headers
    assert response.json()["choices"] == plain.json()["choices"]
    path.write_bytes(content)
    again = httpx.post(url, json=body, timeout=60)
    assert again.headers["x-coinrag"].startswith("composed: ")


@pytest.mark.parametrize(
    "change",
    [{"messages": None}, {"temperature": "hot"}, {"model": "another"}, {"max_tokens": -1}],
    ids=str,
)
def test_bad_requests_with_handles_get_the_servers_own_answer(place, address, change):
    body = {**marked_chat(place, "one"), **change}
    if "messages" not in change:
        assert "⟦k" in str(body)
    response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code in (400, 404)
    assert httpx.get(f"{address}/health", timeout=60).status_code == 200


def counted(address: str) -> dict[str, float]:
    """Our own metrics."""
    lines = httpx.get(f"{address}/metrics", timeout=60).text.splitlines()
    ours = [line for line in lines if line.startswith("vllm:coinrag_")]
    return {
        line.split("{")[0].removeprefix("vllm:coinrag_").removesuffix("_total"): float(
            line.rsplit(" ", 1)[1]
        )
        for line in ours
    }


def test_metrics_are_in_the_servers_own(place, served, address):
    ask(place, served, "one", 600)
    values = counted(address)
    assert values["prefixes"] > 0
    assert values["failed"] > 0
    assert values["rows"] > values["prefixes"]
    for name in ("bytes_read", "load_seconds", "write_seconds"):
        assert values[name] > 0
