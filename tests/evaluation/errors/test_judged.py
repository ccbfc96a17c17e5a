"""Results and evidence brought together."""

from __future__ import annotations

import pytest

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.errors.classes import Reading
from coinrag_integrations.evaluation.errors.judged import judge, reading_of
from tests.evaluation.errors.passages import GOLD, chunk, evidence, measured, write

LOADED = chunk("[[Bastien Roule built it.]] [[Ida Merle paid for it.]]")


def test_answers_are_judged_by_what_their_own_search_found(tmp_path):
    other = evidence(chunk("[Bastien Roule] [[Ida Merle]]"), search="one-stage")
    names = ("text", "none", "full", "spans-one-stage", "spans", "spans:1")
    results = [measured("Ida Merle", method=name) for name in names]
    write(tmp_path, [evidence(LOADED), other], results)
    report = judge(tmp_path)
    assert [
        (answer.method, finding.error)
        for question in report.questions
        for answer, finding in question.answers
    ] == [
        ("spans", "distracted"),
        ("full", "misread"),
        ("none", "missed"),
        ("spans:1", "ungrounded"),
        ("text", "distracted"),
        ("spans-one-stage", "missed"),
    ]
    assert list(report.counts) == ["x"]
    assert list(report.counts["x"])[:3] == ["spans", "full", "none"]
    assert report.counts["x"]["spans"]["distracted"] == 1


def test_some_methods_and_data_may_be_chosen(tmp_path):
    results = [
        measured(GOLD, data=data, method=method) for data in "xy" for method in ("spans", "full")
    ]
    write(tmp_path, [evidence(LOADED, data=data) for data in "xy"], results)
    assert list(judge(tmp_path, data=["y"]).counts) == ["y"]
    assert list(judge(tmp_path, methods=["full"]).counts["x"]) == ["full"]
    for options, message in (
        ({"methods": ["text"]}, "the method 'text' in .*, only of: full, spans"),
        ({"data": ["z", "x"]}, "the data set 'z' in .*, only of: x, y"),
    ):
        with pytest.raises(ConfigError, match=message):
            judge(tmp_path, **options)


def test_methods_of_another_data_set_are_not_there(tmp_path):
    write(tmp_path, [evidence(LOADED)], [measured("a"), measured("b", data="y", method="full")])
    with pytest.raises(ConfigError, match=r"no data set in .* was answered by these"):
        judge(tmp_path, methods=["full"], data=["x"])


def test_the_latest_settings_are_taken(tmp_path):
    results = [measured("Ida Merle", settings=settings) for settings in ("t", "s")]
    write(tmp_path, [evidence(LOADED), evidence(LOADED, settings="t")], [*results, results[0]])
    report = judge(tmp_path)
    assert (report.settings, report.n_others, len(report.questions)) == ("t", 1, 1)


def test_the_latest_measurement_of_an_answer_counts(tmp_path):
    write(tmp_path, [evidence(LOADED)], [measured("Ida Merle"), measured(GOLD)])
    assert judge(tmp_path).counts["x"]["spans"]["right"] == 1


def test_questions_without_evidence_are_counted(tmp_path):
    write(tmp_path, [evidence(LOADED)], [measured("a"), measured("b", example="2")])
    assert judge(tmp_path).n_without == 1
    write(tmp_path / "other", [evidence(LOADED, settings="t")], [measured("a")])
    with pytest.raises(ConfigError, match=r"without evidence .* run the same coinrag eval again"):
        judge(tmp_path / "other")


def test_no_results_are_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"there are no results in .*: run coinrag eval --out"):
        judge(tmp_path / "nowhere")
    write(tmp_path, [], [{"settings": "s", "f1": 0.5}])
    with pytest.raises(ConfigError, match="no measurement"):
        judge(tmp_path)


@pytest.mark.parametrize(
    ("method", "reading"),
    [
        ("none", Reading(what="nothing")),
        ("spans", Reading(what="nuggets")),
        ("spans-unaligned", Reading(what="nuggets")),
        ("text:5", Reading(what="nuggets", n_nuggets=5)),
        ("isolated", Reading(what="nuggets")),
        ("cacheblend:0.3", Reading(what="chunks")),
        ("full", Reading(what="chunks")),
    ],
)
def test_a_methods_name_says_what_it_reads(method, reading):
    assert reading_of(method) == reading
