"""Law: passes of fixed shape, compiled or not, give what the eager loop gives."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig
from coinrag_integrations.engine.generation import generate
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.runner import (
    EagerRunner,
    StaticRunners,
    bucket_rows,
    bucket_tokens,
)
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import ConfigError
from tests.tiny import SUPPORTED, TEXT, fill, prefix_of, supported_model

CPU = torch.device("cpu")
FEW = settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.too_slow])
ids = st.lists(st.integers(3, 511), min_size=1, max_size=40)


def side_by_side(model, texts) -> Prefix:
    """Prefixes of several texts in one buffer, zeros behind the shorter ones."""
    n = max(map(len, texts))
    kv = torch.zeros(model.layout.prefixes(len(texts), n))
    for b, text in enumerate(texts):
        kv[:, :, b, :, : len(text)] = prefix_of(model, text).kv[:, :, 0]
    plans = tuple(
        PrefixPlan(head=tuple(t), segments=(), online=(), n_entries=len(t), length=len(t))
        for t in texts
    )
    return Prefix(kv=kv, plans=plans)


def tokens(model, prefix, questions, n_new, static=None):
    config = GenerationConfig(max_new_tokens=n_new)
    return list(generate(model, prefix, questions, config, Stopwatch(CPU), static))


@pytest.mark.parametrize("name", SUPPORTED)
def test_static_passes_decode_what_the_eager_loop_decodes(name):
    model = supported_model(name)
    static = StaticRunners(model, "eager")

    @FEW
    @given(asked=st.lists(st.tuples(ids, ids), min_size=1, max_size=3), n_new=st.integers(1, 12))
    def law(asked, n_new):
        prefix = side_by_side(model, [text for text, _ in asked])
        questions = [question for _, question in asked]
        eager = tokens(model, prefix, questions, n_new)
        assert tokens(model, prefix, questions, n_new, static) == eager

    law()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-windowed"])
def test_static_logits_are_the_eager_ones(name):
    model = supported_model(name)
    prefix = side_by_side(model, [list(range(20, 60)), [5, 6, 7]])
    question = torch.arange(100, 110).reshape(2, 5)
    at = torch.stack((torch.arange(40, 45), torch.arange(3, 8)))
    eager = EagerRunner(model, prefix, 8)
    with StaticRunners(model, "eager").borrow(prefix, 5, 3) as static:
        for _ in range(3):
            ours, theirs = static.run(question, at), eager.run(question, at)
            assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
            question, at = question[:, :1] + 7, at[:, -1:] + 1


def test_a_prefix_is_not_touched_and_a_runner_forgets_the_last_one():
    model = supported_model("llama")
    static = StaticRunners(model, "eager")
    first, second = prefix_of(model, list(range(30, 90))), prefix_of(model, [9, 8, 7])
    before = first.kv.clone()
    expected = [tokens(model, p, [[5, 6]], 6) for p in (first, second)]
    for _ in range(2):
        assert [tokens(model, p, [[5, 6]], 6, static) for p in (first, second)] == expected
    assert torch.equal(first.kv, before)


def test_an_answer_that_nobody_reads_on_holds_up_no_other():
    model = supported_model("llama")
    static = StaticRunners(model, "eager")
    prefix, config = prefix_of(model, [9, 8, 7]), GenerationConfig(max_new_tokens=6)
    waiting = generate(model, prefix, [[5, 6]], config, Stopwatch(CPU), static)
    first = next(waiting)
    expected = tokens(model, prefix, [[5, 6]], 6)
    assert tokens(model, prefix, [[5, 6]], 6, static) == expected
    assert [first, *waiting] == expected  # and is itself not disturbed
    with static.borrow(prefix, 2, 6) as runner:
        assert runner is not None  # given back


def test_many_threads_get_their_own_answers():
    model = supported_model("llama")
    static = StaticRunners(model, "eager")
    prefixes = [prefix_of(model, [3 + i, 40, 50 + i]) for i in range(6)]
    expected = [tokens(model, p, [[5, 6]], 8) for p in prefixes]
    found = {}

    def work(i):
        found[i] = [tokens(model, prefixes[i], [[5, 6]], 8, static) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(i) for i in range(6)] == [[e] * 3 for e in expected]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_engine_answers_as_an_eager_one(tmp_path):
    model = supported_model("llama")
    answers = {}
    for execution in ("eager", "compiled"):
        config = EngineConfig(chunk_tokens=32, coverage="all", execution=execution)
        with Engine(model, tmp_path, config) as engine:
            refs = [chunk.ref() for chunk in fill(engine, TEXT)]
            generation = GenerationConfig(max_new_tokens=6)
            answers[execution] = [
                engine.answer(q, refs[:n], generation).text for q, n in (("Who?", 1), ("Where?", 2))
            ]
    assert answers["compiled"] == answers["eager"]
    assert all(answers["eager"])


def test_graphs_need_a_gpu(tmp_path):
    with pytest.raises(ConfigError, match="execution='graph' needs a GPU, the model is on cpu"):
        Engine(supported_model("llama"), tmp_path / "new", EngineConfig(execution="graph"))
    assert not (tmp_path / "new").exists()


@given(n=st.integers(1, 5000))
def test_sizes_are_rounded_up_by_little_to_few_values(n):
    assert n <= bucket_rows(n) <= max(256, n * 3 // 2)
    assert bucket_rows(bucket_rows(n)) == bucket_rows(n)
    assert n <= bucket_tokens(n) <= max(16, 2 * n - 1)
    assert len({bucket_rows(i) for i in range(1, 5001)}) <= 10


def test_only_a_few_runners_are_kept():
    model = supported_model("llama")
    static = StaticRunners(model, "eager")
    for n in (10, 300, 400, 600, 900, 1200, 1700, 2100, 3100):
        prefix = prefix_of(model, [5] * n)
        with static.borrow(prefix, 3, 5):
            pass
    assert len(static._free) == 8
    assert static._lent == set()
