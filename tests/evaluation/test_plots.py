"""Plots: the front, and pictures whose every point is named, inside the picture and apart."""

from __future__ import annotations

import random

import pytest

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation import plots
from coinrag_integrations.evaluation.plots import Point, draw, front
from coinrag_integrations.evaluation.rivals import METHODS
from coinrag_integrations.evaluation.summary import MethodSummary
from coinrag_integrations.evaluation.ttft import Spread


def summary(f1: float, ms: float, entries: float) -> MethodSummary:
    return MethodSummary(
        n=100,
        f1=f1,
        f1_ci=(max(0.0, f1 - 0.06), f1 + 0.06),
        nll=1.0,
        empty=0,
        entries=entries,
        bytes_read=1.0,
        ttft_ms=Spread(p50=ms, mean=ms, p99=ms),
    )


def test_the_front_holds_what_no_other_beats():
    def point(name: str, cost: float, f1: float) -> Point:
        return Point(name=name, cost=cost, f1=f1, low=f1, high=f1)

    points = [point("a", 3, 5), point("b", 1, 2), point("c", 2, 1), point("d", 3, 4)]
    assert [p.name for p in front(points)] == ["b", "a"]
    assert front([]) == []


def test_two_plots_are_drawn_of_each_data_set(tmp_path, monkeypatch):
    """With methods as near to each other as they can be."""
    boxes = []
    settle = plots._settle

    def watched(label, taken, inside):
        box = settle(label, taken, inside)
        boxes.append((box, inside, [other for other in taken if box.overlaps(other)]))
        return box

    monkeypatch.setattr(plots, "_settle", watched)
    chance = random.Random(0)
    names = [*METHODS, "cacheblend:0.05", "cacheblend:0.3", "legolink:32"]
    methods = {
        name: summary(
            0.2 + 0.1 * chance.random(), 80 + 900 * chance.random(), chance.choice((0, 250, 2000))
        )
        for name in names
    }
    drawn = draw({"hotpotqa": methods, "one": {"spans": summary(0.0, 5.0, 0)}}, tmp_path)
    assert [path.name for path in drawn] == [
        *("hotpotqa-f1-ttft.png", "hotpotqa-f1-tokens.png", "one-f1-ttft.png", "one-f1-tokens.png")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert len(boxes) == 2 * (len(names) + 1)
    for box, inside, covered in boxes:
        assert not covered
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1


def test_a_folder_that_refuses_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        draw({"a": {"spans": summary(0.1, 5.0, 10)}}, tmp_path / "nowhere")


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"\[eval\]"):
        draw({"a": {"spans": summary(0.1, 5.0, 10)}}, tmp_path)


def test_numbers_of_one_method_belong_together():
    def point(name: str) -> Point:
        return Point(name=name, cost=1, f1=1, low=1, high=1)

    assert [point(name).family for name in ("spans", "spans:5", "text:5")] == [
        *("spans", "spans", "text")
    ]
    names = ("spans", "spans:5", "spans-unaligned", "text:5")
    assert [point(name).is_ours for name in names] == [True, True, False, False]
