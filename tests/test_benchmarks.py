"""Benchmarks end in one line of JSON, and their rows hold up to what they are said to be."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coinrag_integrations.training import Sampler
from coinrag_integrations.training.batches import nats
from coinrag_integrations.training.slots import SlotLearner
from tests.tiny import HashEmbedder, save_tiny, tiny_model
from tests.training.test_c2kv import SLOTS, sample_of

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(monkeypatch, capsys, name: str, *arguments: str) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as it is for who runs one
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_ttft_is_split_into_its_parts(monkeypatch, capsys):
    options = ("--shape", "tiny", "--device", "cpu", "--kernels", "torch", "--decode")
    report = run(monkeypatch, capsys, "bench_ttft.py", *options, "--tokens", "50", "--rounds", "2")
    result = report["results"]["50"]
    # bf16 entries of three layers with two heads of 16 dimensions, or fp32 where that is faster.
    width = 2 if report["dtype"] == "torch.bfloat16" else 4
    assert result["bytes"]["read"] == 50 * 3 * 2 * 2 * 16 * width
    assert set(result["ms"]) == {
        *("ttft", "ttft-new", "ttft-resident", "full", "read", "angles", "place", "prefill"),
        *("token", "weights", "bytes", "decode"),
    }
    assert all(p50 > 0 for p50, _, _ in result["ms"].values())
    floor = result["ms"]["weights"][0] + result["ms"]["bytes"][0]
    assert abs(result["floor_ms"] - floor) < 0.01
    assert result["engine_ms"]["eager"]["ttft_ms"] >= result["engine_ms"]["eager"]["prefill_ms"]


def test_decode_reads_fewer_bytes_behind_slots(monkeypatch, capsys, tmp_path):
    plot = tmp_path / "decode.png"
    options = ("--shape", "tiny", "--device", "cpu", "--rounds", "1", "--plot", str(plot))
    report = run(monkeypatch, capsys, "bench_decode.py", *options, "--lengths", "64", "256")
    decode = report["decode"]
    assert set(decode) == {"full KV", "c2kv:4", "c2kv:8"}
    entries = {name: it["256"]["bytes"] - it["64"]["bytes"] for name, it in decode.items()}
    assert entries["full KV"] == 4 * entries["c2kv:4"] == 8 * entries["c2kv:8"] > 0
    assert all(ms > 0 for it in decode.values() for row in it.values() for ms in row["ms"])
    assert plot.stat().st_size > 1000


def test_a_simulated_fleet_keeps_the_laws_of_caches(monkeypatch, capsys):
    report = run(monkeypatch, capsys, "simulate_fleet.py", "--layout", "smollm2-135m")
    fleets = report["fleets"]
    assert [it["hit_rate"] for it in fleets] == sorted(
        (it["hit_rate"] for it in fleets), reverse=True
    )
    assert fleets[0]["hit_rate"] == 1.0
    for it in fleets:
        moved = it["nvme_gb_per_s"] + it["network_gb_per_s"]
        assert abs(moved - 100 / 8 * 465 * 23_040 / 1e9) < 1e-9
    slots = run(
        monkeypatch, capsys, "simulate_fleet.py", "--layout", "smollm2-135m", "--ratio", "4"
    )
    whole = run(
        monkeypatch, capsys, "simulate_fleet.py", "--layout", "smollm2-135m", "--coverage", "1"
    )
    ratio = slots["fleets"][2]["store_tb"] / whole["fleets"][2]["store_tb"]
    assert abs(ratio - 0.25) < 0.001


def test_hit_rates_are_those_of_a_cache_that_is_simulated(monkeypatch):
    """Che's approximation against a real LRU of the same requests."""
    import numpy as np

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    simulate = runpy.run_path(str(BENCHMARKS / "simulate_fleet.py"))
    n, kept, skew = 2000, 200, 0.9
    weights = np.arange(1, n + 1) ** -skew
    requests = np.random.default_rng(0).choice(n, 60_000, p=weights / weights.sum())
    cache: dict[int, None] = {}
    hits = 0
    for number, item in enumerate(requests.tolist()):
        there = item in cache
        hits += there and number >= 20_000
        if there:
            del cache[item]
        cache[item] = None
        if len(cache) > kept:
            del cache[next(iter(cache))]
    assert abs(simulate["hit_rate"](n, skew, kept) - hits / 40_000) < 0.01
    assert simulate["hit_rate"](n, skew, n) == 1.0
    assert simulate["hit_rate"](n, skew, 0) == 0.0


def test_what_slots_lose_is_told_by_place_and_objective(monkeypatch, capsys, tmp_path):
    data = tmp_path / "questions.jsonl"
    with data.open("w") as file:
        for i in range(6):
            passage = {"title": f"Buoy {i}", "text": f"Buoy {i} lies off Cape {i} in the north."}
            row = {"id": str(i), "question": f"Where is buoy {i}?", "answers": [f"off Cape {i}"]}
            file.write(json.dumps({**row, "passages": [passage]}) + "\n")
    model = str(save_tiny(tmp_path / "model"))
    options = ("--model", model, "--adapter", "", "--examples", "4", "--gradients", "3")
    report = run(monkeypatch, capsys, "slot_signal.py", str(data), *options)
    places = report["places"]
    assert set(places) == {"first", "between", "end"}
    assert all(row["slots"] > 0 and row["distance"] >= 0 for row in places.values())
    signal = report["signal"]
    for a in signal:
        assert all(abs(signal[a][b] - signal[b][a]) < 1e-4 for b in signal)
        assert -0.5 <= signal[a][a] <= 1.0  # of three examples it cannot be less


def test_places_in_answers_add_up_to_what_training_checks():
    """Behind slots, behind whole chunks, and the distance between the two."""
    by_place = runpy.run_path(str(BENCHMARKS / "slot_signal.py"))["by_place"]
    model = tiny_model()
    learner = SlotLearner(model, replace(SLOTS, kl=1.0), model)
    samples = [sample_of(Sampler.of(model, HashEmbedder(), SLOTS), i) for i in (3, 7, 21)]
    places = by_place(learner, iter(samples))
    assert sum(row["tokens"] for row in places.values()) == sum(it.n_answer for it in samples)
    with torch.no_grad():
        expected = learner.terms(samples)
        whole = torch.cat(
            [nats(learner.teacher([it]), torch.tensor([it.ids[-it.n_answer :]])) for it in samples]
        )
    for name, each in (("slots", expected["ce"]), ("distance", expected["kl"]), ("whole", whole)):
        total = sum(row[name] for row in places.values())
        assert total == pytest.approx(float(each.mean()), rel=1e-4, abs=1e-5)


def test_the_share_of_gradients_that_is_no_noise():
    signal = runpy.run_path(str(BENCHMARKS / "slot_signal.py"))["signal"]
    same = torch.tensor([[2.0, 0.0, 0.0], [5.0, 0.0, 0.0]])
    other = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    half = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    names = ("ce", "kl", "kl_question", "reconstruction")
    found = signal(dict(zip(names, (same, other, half, -same), strict=True)))
    assert found["ce"]["ce"] == pytest.approx(1.0)
    assert found["kl"]["kl"] == found["ce"]["kl"] == 0.0
    assert found["kl_question"]["kl_question"] == pytest.approx(0.5)
    assert found["ce"]["kl_question"] == pytest.approx(0.5**0.5)
    assert found["ce"]["reconstruction"] == pytest.approx(-1.0)
