from __future__ import annotations

import pytest
import torch

from coinrag_integrations.engine.timings import Stopwatch, Timings

CPU = torch.device("cpu")


def test_parts_add_up_under_their_names():
    watch = Stopwatch(CPU)
    with watch.part("load"):
        pass
    first = watch.parts["load"]
    with watch.part("load"):
        sum(range(10_000))
    assert watch.parts["load"] > first > 0
    assert watch.timings().load_ms == watch.parts["load"]
    assert watch.timings().decode_ms == 0.0


def test_a_part_that_fails_is_still_counted():
    watch = Stopwatch(CPU)
    with pytest.raises(KeyError), watch.part("prefill"):
        raise KeyError
    assert watch.timings().prefill_ms > 0


def test_the_first_token_is_noted_once():
    watch = Stopwatch(CPU)
    watch.first_token()
    ttft = watch.timings().ttft_ms
    watch.first_token()
    assert watch.timings().ttft_ms == ttft > 0


def test_timings_carry_what_they_are_given():
    watch = Stopwatch(CPU)
    timings = watch.timings(retrieve_ms=2.5)
    assert (timings.bytes_read, timings.retrieve_ms) == (0, 2.5)
    assert Timings() == Timings(bytes_read=0)
