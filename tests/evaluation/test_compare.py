"""Comparing methods: measured once each, resumed, summed up the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import BudgetError, ConfigError
from coinrag_integrations.evaluation.compare import CompareConfig, compare
from coinrag_integrations.evaluation.likelihood import answer_ids, losses
from coinrag_integrations.evaluation.metrics import rouge_l, token_f1
from coinrag_integrations.evaluation.results import RESULTS
from coinrag_integrations.evaluation.rivals import METHODS, Kitchen, make_task, say
from coinrag_integrations.evaluation.summary import summarise
from tests.evaluation.rivals.parts import EXAMPLE, chunks_of, compose, plain, task_of
from tests.evaluation.rivals.test_searches import LastLetters
from tests.tiny import HashEmbedder, tiny_model

CONFIG = CompareConfig(n_chunks=3, n_nuggets=4, chunk_tokens=48, max_new_tokens=4)
OTHER = replace(EXAMPLE, question="Who writes down each note?", answers=("the keeper",))
DATA = {"a": (EXAMPLE, OTHER), "b": (OTHER,)}
SOME = ("full", "spans", "legolink:4")


def measure(model, folder, methods=SOME, data=DATA, config=CONFIG, **options):
    return compare(model, data, methods, HashEmbedder(), folder, config, **options)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]


def without_times(results) -> dict:
    return {
        (name, method, i): (row.answer, row.f1, row.nll, row.n_context, row.bytes_read)
        for name, methods in results.items()
        for method, rows in methods.items()
        for i, row in enumerate(rows)
    }


def test_every_method_is_measured_on_every_question(model, tmp_path):
    seen: list[int] = []
    results = measure(model, tmp_path, tuple(METHODS), on_progress=seen.append)
    assert list(results) == ["a", "b"]
    assert all(list(methods) == list(METHODS) for methods in results.values())
    assert [len(results[name]["spans"]) for name in ("a", "b")] == [2, 1]
    assert seen == list(range(1, 3 * len(METHODS) + 1))
    assert len(lines(tmp_path)) == 3 * len(METHODS)
    for methods in results.values():
        for rows in methods.values():
            for row in rows:
                assert 0 <= row.f1 <= 1
                assert 0 < row.compose_ms < row.ttft_ms
                assert torch.tensor(row.nll).isfinite()


def test_the_likelihood_is_that_of_the_first_answer(model, tmp_path):
    row = measure(model, tmp_path, ("full",), {"a": (EXAMPLE,)})["a"]["full"][0]
    kitchen = Kitchen(model)
    task = make_task(
        EXAMPLE.question, chunks_of(model), kitchen.prompt, HashEmbedder(), n_chunks=3, n_nuggets=4
    )
    answer = answer_ids(kitchen.prompt, "Bastien Roule")
    ids = [i for chunk in task.chunks for i in chunk.token_ids]
    expected = losses(plain(model, task, ids, answer), answer).mean()
    assert row.nll == pytest.approx(float(expected), abs=1e-4)
    assert row.f1 == token_f1(row.answer, EXAMPLE.answers)
    assert "\n" not in row.answer


def test_what_was_measured_is_not_measured_again(model, tmp_path):
    first = measure(model, tmp_path)
    before = (tmp_path / RESULTS).read_bytes()
    again = measure(model, tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == before
    assert again == first
    assert summarise(again).to_markdown() == summarise(first).to_markdown()
    wider = measure(model, tmp_path, (*SOME, "none"))
    assert {k: v for k, v in wider["a"].items() if k != "none"} == first["a"]
    assert len(lines(tmp_path)) == 4 * 3


class _Stop(Exception):
    pass


def test_an_interrupted_run_goes_on_where_it_stopped(model, tmp_path):
    whole = measure(model, tmp_path / "whole")

    def stop(done: int) -> None:
        if done == 4:
            raise _Stop

    with pytest.raises(_Stop):
        measure(model, tmp_path / "parts", on_progress=stop)
    kept = lines(tmp_path / "parts")
    assert len(kept) == 4
    with (tmp_path / "parts" / RESULTS).open("ab") as file:
        file.write('{"settings": "torné'.encode()[:-1])  # a process that died while it wrote
    resumed = measure(model, tmp_path / "parts")
    assert lines(tmp_path / "parts")[:4] == kept
    assert len(lines(tmp_path / "parts")) == 9
    assert without_times(resumed) == without_times(whole)
    table = summarise(resumed)
    for name, methods in summarise(whole).data.items():
        for method, it in methods.items():
            found = table.data[name][method]
            assert replace(found, ttft_ms=it.ttft_ms) == it


def test_other_settings_are_measured_anew(model, tmp_path):
    data = {"a": (EXAMPLE,)}
    measure(model, tmp_path, ("spans",), data)
    for config in (replace(CONFIG, n_nuggets=1), replace(CONFIG, chunk_tokens=32)):
        measure(model, tmp_path, ("spans",), data, config)
    other = tiny_model(seed=1)
    measure(other, tmp_path, ("spans",), data)
    measure(model, tmp_path, ("spans",), data, reader=other)
    rows = lines(tmp_path)
    assert len({row["settings"] for row in rows}) == len(rows) == 5
    measure(model, tmp_path, ("spans",), data, replace(CONFIG, seed=7))
    assert len(lines(tmp_path)) == 5, "the seed only changes turns"


def test_a_reader_computes_what_is_not_cached(model, tmp_path):
    """Full prefill is the reader's alone; spans are cached by the model, and read by the reader."""
    reader, data = tiny_model(seed=1), {"a": (EXAMPLE,)}
    with_reader = measure(model, tmp_path, ("full", "spans"), data, reader=reader)["a"]
    alone = measure(reader, tmp_path, ("full", "spans"), data)["a"]
    assert with_reader["full"][0].nll == pytest.approx(alone["full"][0].nll, abs=1e-5)
    assert with_reader["spans"][0].nll != pytest.approx(alone["spans"][0].nll, abs=1e-3)


def test_the_same_question_twice_counts_twice(model, tmp_path):
    results = measure(model, tmp_path, ("none",), {"a": (OTHER, OTHER)})
    assert len(results["a"]["none"]) == len(lines(tmp_path)) == 2


def test_half_precision_is_measured_too(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    results = measure(model, tmp_path, tuple(METHODS), {"a": (EXAMPLE,)})["a"]
    nlls = {name: rows[0].nll for name, rows in results.items()}
    assert nlls["full"] == pytest.approx(nlls["prefix"], rel=0.05)


def test_what_cannot_be_measured_is_refused(model, tmp_path):
    for methods in ((), ("spans", "spans")):
        with pytest.raises(ConfigError, match="each once"):
            measure(model, tmp_path, methods)
    for data in ({}, {"a": ()}):
        with pytest.raises(ConfigError, match="no questions"):
            measure(model, tmp_path, data=data)
    for name, message in (
        ("span", "not known: use some of none, full"),
        ("full:3", "takes no number"),
        ("spans:0", "a whole number from 1"),
        ("spans-one-stage:3", "not known"),
        ("spans-reranked", "needs a cross-encoder"),
        ("cacheblend:2", "a number from 0 to 1"),
        ("cacheblend:nan", "a number from 0 to 1"),
        ("legolink:0", "a whole number from 1"),
        ("strided:1.5", "a whole number"),
        ("kvlink:", "a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            measure(model, tmp_path, (name,))
    with pytest.raises(ConfigError, match="n_chunks is 0"):
        CompareConfig(n_chunks=0)
    short = tiny_model(max_position_embeddings=64)
    with pytest.raises(BudgetError):
        measure(short, tmp_path, ("full",))


@pytest.mark.parametrize("line", ["[1]", "{", '{"settings": 1}'])
def test_a_file_of_something_else_is_left_alone(model, tmp_path, line):
    (tmp_path / RESULTS).write_text(line + "\n")
    with pytest.raises(ConfigError, match="no measurement"):
        measure(model, tmp_path)
    assert (tmp_path / RESULTS).read_text() == line + "\n"


def test_a_folder_that_cannot_be_written_is_refused(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        measure(model, tmp_path / "file")


def test_ablations_and_a_reranker_are_measured_like_methods(model, tmp_path):
    """Without an adapter `spans-unadapted` is `spans`; with another reader it is not."""
    names = ("spans", "spans-unadapted", "spans-one-stage", "spans-unaligned", "spans-reranked")
    with pytest.raises(ConfigError, match="cross-encoder"):
        measure(model, tmp_path, names)
    rows = measure(model, tmp_path, names, reranker=LastLetters())["a"]
    nlls = {name: [row.nll for row in rows[name]] for name in names}
    assert nlls["spans"] == nlls["spans-unadapted"]
    assert len({tuple(nll) for nll in nlls.values()}) == len(names) - 1
    reader = tiny_model(seed=5)
    other = measure(model, tmp_path, names[:2], reader=reader)["a"]
    assert [row.nll for row in other["spans-unadapted"]] == nlls["spans"]
    assert [row.nll for row in other["spans"]] != nlls["spans"]


def test_data_sets_are_summed_up_together_and_spans_set_against_each_method(model, tmp_path):
    results = measure(model, tmp_path)
    summary = summarise(results)
    everything = {m: [*results["a"][m], *results["b"][m]] for m in SOME}
    assert {m: it.n for m, it in summary.pooled.items()} == dict.fromkeys(SOME, 3)
    for name, by_method in {**results, "(all)": everything}.items():
        assert list(summary.ours[name]) == ["full", "legolink:4"]
        assert list(summary.to_reference[name]) == ["spans", "legolink:4"]
        for method, difference in summary.ours[name].items():
            pairs = list(zip(by_method["spans"], by_method[method], strict=True))
            nll = sum(a.nll - b.nll for a, b in pairs) / len(pairs)
            f1 = sum(a.f1 - b.f1 for a, b in pairs) / len(pairs)
            assert (difference.nll.mean, difference.f1.mean) == pytest.approx((nll, f1))
            assert difference.nll.low <= difference.nll.mean <= difference.nll.high
    table = summary.to_markdown()
    assert "## all 2 data sets, n = 3" in table
    assert "## spans minus each method" in table
    values = summary.to_dict()
    assert set(values["spans_minus"]["nll"]) == {"a", "b", "(all)"}
    assert set(values["data"]) == {"a", "b"}

    other = summarise(results, compared="full")
    values = other.to_dict()
    there, back = values["full_minus"]["nll"]["(all)"]["spans"], summary.ours["(all)"]["full"].nll
    assert there["mean"] == pytest.approx(-back.mean, abs=1e-5)
    assert "## full minus each method" in other.to_markdown()

    alone = summarise({"a": {"chunk": results["a"]["full"]}})
    assert (alone.pooled, alone.ours, alone.to_reference, alone.reference) == ({}, {}, {}, None)
    assert "minus" not in alone.to_markdown()


def test_certain_differences_are_bold(model, tmp_path):
    rows = measure(model, tmp_path, ("spans",))["a"]["spans"]
    ours = [replace(rows[0], nll=nll, f1=0.5) for nll in (1.0, 1.5, 2.0)]
    worse = [replace(row, nll=row.nll + by) for row, by in zip(ours, (0.1, 0.2, 0.3), strict=True)]
    mixed = [replace(row, nll=row.nll + by) for row, by in zip(ours, (-1, 0, 1), strict=True)]
    table = summarise({"a": {"spans": ours, "worse": worse, "mixed": mixed}}).to_markdown()
    assert "| worse | **-0.200** (-0.300 to -0.100) |" in table
    assert "| mixed | +0.000 (" in table or "| mixed | -0.000 (" in table


def test_summaries_show_rouge_where_it_was_measured(model, tmp_path):
    rows = [replace(row, rouge_l=0.25) for row in measure(model, tmp_path)["a"]["full"]]
    summary = summarise({"a": {"full": rows}})
    assert summary.to_dict()["data"]["a"]["full"]["rouge_l"] == 0.25
    assert summary.to_markdown().splitlines()[2].endswith("| ROUGE-L |")
    assert "| 25.0 |" in summary.to_markdown()


def test_a_data_set_is_scored_as_its_name_says(tmp_path):
    """Summaries are longer, keep their lines, and are scored by ROUGE-L."""
    assert CompareConfig().scoring("hotpotqa").max_new_tokens == 32
    assert CompareConfig().scoring("gov_report").max_new_tokens == 512
    model = tiny_model(tie_word_embeddings=False)
    (line_break, *_) = model.tokenizer.encode("\n").ids
    task, kitchen = task_of(Kitchen(model)), Kitchen(model)
    said = say(model, compose(kitchen, "full", task), task.tail, Stopwatch(model.device), 3).tokens
    head = model.hf.get_output_embeddings().weight
    with torch.no_grad():  # a line break, where a third word was said
        head[line_break] = 1.1 * head[said[2]]
    long = CompareConfig(n_chunks=4, n_nuggets=4, chunk_tokens=48, max_new_tokens=8)
    data = {"gov_report": (EXAMPLE,), "a": (EXAMPLE,)}
    results = measure(model, tmp_path, ("full",), data, long)
    summary, answer = (results[name]["full"][0] for name in data)
    assert "\n" in summary.answer, "there is something to cut"
    assert answer.answer == summary.answer.splitlines()[0].strip() != ""
    assert summary.rouge_l == rouge_l(summary.answer, EXAMPLE.answers)
    assert answer.rouge_l is None
