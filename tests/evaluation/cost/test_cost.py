"""What answers cost: a small store that is really built and asked, and the arithmetic over it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.engine.timings import Timings
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.cost import building
from coinrag_integrations.evaluation.cost.building import Built
from coinrag_integrations.evaluation.cost.measure import (
    CostConfig,
    Line,
    Prices,
    build_parts,
    disk_bytes,
    measure_cost,
    sum_up,
)
from coinrag_integrations.evaluation.cost.report import draw_cost, pay_offs, to_markdown
from coinrag_integrations.evaluation.cost.roads import ROADS, Asked, blocks
from coinrag_integrations.evaluation.estimate import Guess, break_even
from tests.evaluation.cost.small import ENGINE, EXAMPLES, example
from tests.tiny import HashEmbedder, save_tiny

# -- arithmetic --------------------------------------------------------------------------------

COST = st.floats(0, 1e6)
SECONDS = st.floats(1e-3, 1e3)


@given(COST, st.lists(SECONDS, min_size=1, max_size=20), st.floats(0.1, 1.0), st.floats(0.1, 1.0))
def test_a_faster_question_pays_earlier(cost, theirs, share, faster):
    other = Line(0.0, tuple(theirs))
    ours = Line(cost, tuple(share * s for s in theirs))
    quicker = Line(cost, tuple(share * faster * s for s in theirs))
    first, second = ours.paid_off(other), quicker.paid_off(other)
    for name in ("value", "low", "high"):
        assert getattr(second, name) <= getattr(first, name) * (1 + 1e-9)
    assert first.low <= first.value * (1 + 1e-9)
    assert first.value <= first.high * (1 + 1e-9)


@given(COST, st.lists(SECONDS, min_size=1, max_size=20), st.floats(1.0, 10.0))
def test_what_is_not_faster_never_pays(cost, theirs, share):
    ours = Line(cost, tuple(share * s for s in theirs))
    paid = ours.paid_off(Line(0.0, tuple(theirs)))
    assert math.isinf(paid.value)
    assert math.isinf(paid.high)


@given(st.floats(1, 1e6), SECONDS, st.floats(0.1, 0.9))
def test_where_it_has_paid_both_cost_the_same(cost, theirs, share):
    ours, other = Line(cost, (share * theirs,)), Line(0.0, (theirs,))
    paid = ours.paid_off(other)
    assert paid.is_exact, "one question has no range"
    assert ours.at(paid.value) == pytest.approx(other.at(paid.value))
    assert ours.at(2 * paid.value) < other.at(2 * paid.value)


def test_what_is_cheaper_to_build_pays_from_the_start_only_if_it_is_faster():
    assert break_even(Guess.exact(-5.0), Guess.exact(1.0)).value == 0
    assert break_even(Guess.exact(-5.0), Guess.exact(-1.0)).value == math.inf


BUILT = Built(
    n_documents=2,
    n_chunks=10,
    n_nuggets=30,
    n_tokens=1000,
    n_covered_tokens=400,
    seconds={name: float(2**i) for i, name in enumerate(building.PARTS)},
    kv_chunk_bytes=10_000,
    kv_span_bytes=4_000,
    catalog_bytes=100,
    index_bytes=400,
)


def answers(seconds: float, f1: float, n: int = 40) -> list[Asked]:
    return [
        Asked(
            f1=f1,
            answer_s=seconds,
            machine_s=seconds * (1 + i % 3 / 10),
            ttft_ms=seconds * 500,
            timings=Timings(prefill_ms=seconds * 400, bytes_read=7),
        )
        for i in range(n)
    ]


ROWS = {
    "full": answers(2.0, 0.5),
    "text": answers(1.0, 0.5),
    "chunk": answers(3.0, 0.2),
    "spans": answers(0.5, 0.6),
}


def test_a_road_is_charged_for_what_it_needs():
    config = CostConfig(extraction_seconds=0.5)
    charged = {road: build_parts(road, BUILT, config) for road in ROADS}
    everything = {*building.PARTS, "extraction"}
    assert set(charged["spans"]) == everything
    assert set(charged["text"]) == everything - {building.KV}
    common = {building.CUT, building.EMBED_CHUNKS, building.INDEX_CHUNKS, building.OTHER}
    assert set(charged["full"]) == common
    assert set(charged["chunk"]) == common | {building.KV}
    assert charged["spans"]["extraction"] == 5.0
    assert sum(build_parts("spans", BUILT, CostConfig()).values()) == BUILT.total_seconds
    assert [disk_bytes(road, BUILT) for road in ROADS] == [200, 500, 10_200, 4_500]


def test_roads_are_summed_up():
    roads = sum_up(BUILT, ROWS, CostConfig())
    assert {road: it.is_worse for road, it in roads.items()} == {
        **dict.fromkeys(ROADS, False),
        "chunk": True,
    }
    spans = roads["spans"]
    assert spans.per_second == pytest.approx(1 / spans.machine_seconds)
    assert sum(spans.parts_ms.values()) == pytest.approx(spans.answer_ms.mean)
    assert set(spans.paid_off) == {"full", "text"}
    assert spans.paid_off["full"].value < spans.paid_off["text"].value
    assert (roads["full"].paid_off, set(roads["text"].paid_off)) == ({}, {"full"})
    said = pay_offs(roads)
    assert any(it.startswith("spans has paid after") and "against text" in it for it in said)
    assert "chunk never pays against full, at a lower F1." in said


def test_money_counts_the_machine_and_the_disk():
    prices = Prices(hour=3600.0, gb_month=1e9, days=60)
    it = sum_up(BUILT, ROWS, CostConfig(prices=prices))["spans"]
    assert it.line.fixed == pytest.approx(BUILT.total_seconds + 2 * 4_500)
    assert it.line.per_question == pytest.approx(it.machine_seconds)


def test_blocks_hold_every_question_once():
    assert [list(b) for b in blocks([1, 2, 3], 1)] == [[1], [2], [3]]
    for n_questions in (4, 31, 100):
        found = list(blocks(range(n_questions), 4))
        assert [i for block in found for i in block] == list(range(n_questions))
        assert all(len(block) >= 4 for block in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roads": ("spans",)}, "must hold 'full'"),
        ({"roads": ("full", "spam")}, "road 'spam' is not known"),
        ({"roads": ("full", "full")}, "each once"),
        ({"concurrency": ()}, "must be some"),
        ({"concurrency": (0,)}, "at least 1"),
        ({"extraction_seconds": -1}, "0 or more seconds"),
    ],
)
def test_settings_that_measure_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CostConfig(**options)
    with pytest.raises(ConfigError, match="hour is -1"):
        Prices(hour=-1)


# -- all of it ---------------------------------------------------------------------------------


def test_a_store_is_built_asked_and_summed_up(model, tmp_path):
    told: list[int] = []
    config = CostConfig(concurrency=(1, 2), max_new_tokens=4, cold=True)
    report = measure_cost(
        EXAMPLES,
        tmp_path,
        model,
        HashEmbedder(),
        config,
        engine=ENGINE,
        on_progress=told.append,
    )
    assert told[-1] == len(EXAMPLES) * len(ROADS) * 2
    value = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert list(value["levels"]) == ["1", "2"]
    for roads in report.levels.values():
        assert tuple(roads) == ROADS
        assert [road for road, it in roads.items() if it.bytes_read] == ["chunk", "spans"]
        assert roads["chunk"].bytes_read > roads["spans"].bytes_read
        assert all(it.n == len(EXAMPLES) for it in roads.values())
        assert all(it.ttft_ms.p50 <= it.answer_ms.p50 for it in roads.values())
        assert roads["spans"].build_seconds == pytest.approx(report.built.total_seconds)
    table = to_markdown(report, "tiny")
    assert "## 2 at once" in table
    assert "dropped from" in table
    draw_cost(report, "tiny", tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write"):
        draw_cost(report, "tiny", tmp_path / "nowhere" / "cost.png")

    with pytest.raises(ConfigError, match="cannot be asked 8 at once"):
        measure_cost(
            EXAMPLES, tmp_path, model, HashEmbedder(), CostConfig(concurrency=(8,)), engine=ENGINE
        )


def test_without_whole_chunks_only_nuggets_are_kept(model, tmp_path):
    config = CostConfig(roads=("full", "spans"), concurrency=(1,), max_new_tokens=1)
    report = measure_cost(EXAMPLES, tmp_path, model, HashEmbedder(), config, engine=ENGINE)
    assert report.built.kv_chunk_bytes is None
    assert set(report.levels[1]["spans"].paid_off) == {"full"}


# -- the command -------------------------------------------------------------------------------


def row(number: int) -> str:
    it = example(number)
    passages = [{"text": document.text} for document in it.documents]
    return json.dumps({"question": it.question, "answers": it.answers, "passages": passages})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.jsonl").write_text("\n".join(map(row, range(4))))
    return tmp_path / "data"


def test_the_command_writes_json_a_table_and_a_plot(run, tiny, data, tmp_path):
    out = tmp_path / "out"
    options = ("--model", tiny, "--data-folder", data, "--data", "one", "--out", out)
    more = ("--limit", 3, "--questions", 2, "--concurrency", "1,2")
    it = run("eval", "cost", *options, *more)
    assert it.code == 0, it.text
    assert (it.value["data"], it.value["unit"], it.value["reused"]) == ("one", "s", False)
    assert list(it.value["levels"]) == ["1", "2"]
    spans = it.value["levels"]["2"]["spans"]
    assert spans["n"] == len(spans["line"]["each"]) == 2
    assert set(spans["paid_off"]) == {"full", "text"}
    assert set(spans["paid_off"]["full"]) == {"value", "low", "high"}
    assert it.value["built"]["n_documents"] == 3
    assert sum(it.value["built"]["seconds"].values()) == pytest.approx(
        it.value["built"]["total_seconds"]
    )
    assert json.loads((out / "cost.json").read_text()) == it.value
    assert "# What one costs" in (out / "cost.md").read_text()
    assert (out / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "against full" in it.text

    money = run("eval", "cost", *options, *more, "--price-hour", 2, "--price-gb-month", 0.1)
    assert (money.value["unit"], money.value["reused"]) == ("money", True)
    assert money.value["built"] == it.value["built"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--roads", "spans"), "must hold 'full'"),
        (("--concurrency", "two"), "whole numbers"),
        (("--concurrency", "9"), "cannot be asked 9 at once"),
        (("--price-gb-month", "1"), "--price-hour"),
        (("--data", "two"), "no data set 'two'"),
        (("--data", "longbench:qmsum"), "at equal F1"),
        (("--embedder", "ada"), "embedder 'ada'"),
    ],
)
def test_bad_input_is_one_clear_error(run, tiny, data, tmp_path, options, message):
    basis = ("--model", tiny, "--data-folder", data, "--data", "one", "--out", tmp_path / "out")
    it = run("eval", "cost", *basis, *options)
    assert (it.code, it.value["error"]["type"]) == (1, "ConfigError")
    assert message in it.value["error"]["message"]
    assert "Traceback" not in it.text
