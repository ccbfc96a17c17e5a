"""Oracle: the Triton kernels do what the reference does, and compile for the GPUs we name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from coinrag_integrations.engine.kernels import gpu, reference
from tests.engine.kernels import compiled, interpreted

CASES, CODES = interpreted.CASES, interpreted.CODES
CUDA = torch.device("cuda")
TARGETS = [
    (f"sm_{architecture}", variant)
    for architecture in compiled.ARCHITECTURES
    for variant in (*compiled.PLACED, *compiled.QUANTISED)
]


def run(module: str, cache: str, **variables: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engine.kernels.{module}"],
        env={**environment, "TRITON_CACHE_DIR": cache, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    return run("interpreted", str(tmp_path_factory.mktemp("triton")), TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    return run("compiled", str(tmp_path_factory.mktemp("triton")))


@pytest.mark.parametrize("case", CASES)
def test_interpreted_place_does_what_the_reference_does(interpreter, case):
    found = interpreter["place"][case]
    assert all(found.values()), found


@pytest.mark.parametrize("case", CODES)
def test_interpreted_quantise_does_what_the_reference_does(interpreter, case):
    found = interpreter["quantise"][case]
    assert all(found.values()), found


def test_what_the_reference_refuses_is_refused_in_the_same_words(interpreter):
    found = interpreter["refusals"]
    assert len(found) == 11
    assert all(found.values()), found


def test_no_entries_write_nothing(interpreter):
    assert interpreter["nothing"] == {"others_untouched": True, "codes_of_nothing": True}


def test_a_buffer_may_have_more_elements_than_32_bits_count(interpreter):
    assert interpreter["far"] == {"values_arrive": True}


@pytest.mark.parametrize(("target", "variant"), TARGETS)
def test_the_kernels_compile_to_a_cubin_without_a_gpu(compiler, target, variant):
    found = compiler[target][variant]
    assert found["cubin_bytes"] > 1000
    assert found["is_elf"]
    assert found["ptx_target"]
    assert found["spills"] == 0, "registers were spilled to local memory"
    assert found["registers"] <= gpu.OPTIONS["maxnreg"]
    assert found["shared"] <= 16 * 1024
    if variant in compiled.PLACED:
        assert found["writes_16_bytes"]
        assert found["rounds_to_nearest"] or compiled.PLACED[variant][-1] == "fp32"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", CASES)
def test_place_on_a_gpu_does_what_the_reference_does(case):
    found = interpreted.compare(CASES[case], CUDA)
    assert all(found.values()), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", CODES)
def test_quantise_on_a_gpu_does_what_the_reference_does(case):
    found = interpreted.compare_codes(CODES[case], CUDA)
    assert all(found.values()), found


STAGED, OUT, SLOTS = torch.zeros(5, 3, 2, 2, 8), torch.zeros(3, 2, 1, 2, 9, 8), torch.arange(5)
ANGLES = interpreted.rotation_of(interpreted.Case(dim=8, layers=3), 5, 0)
BAD = {
    "staged must fit slots and out": {"staged": STAGED[:, :2].contiguous()},
    "one angle for every entry": {"rotation": ANGLES[:4]},
    "one rotation for every layer": {"rotation": replace(ANGLES, layers=ANGLES.layers[:2])},
    "the last axis of out": {"out": torch.zeros(3, 2, 1, 2, 8, 9).mT},
    "staged and slots must be contiguous": {"staged": torch.zeros(5, 3, 2, 8, 2).mT},
    "slots must be int64": {"slots": SLOTS.int()},
    "all on one device": {"slots": SLOTS.to("meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_operands_that_do_not_fit_are_refused_before_a_launch(message):
    operands = {"staged": STAGED, "rotation": ANGLES, "out": OUT, "slots": SLOTS}
    reference.place(**operands)  # these are fine
    with pytest.raises(AssertionError, match=message):
        gpu.place(**{**operands, **BAD[message]})


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    return run("answered", str(tmp_path_factory.mktemp("triton")), TRITON_INTERPRET="1")


@pytest.mark.parametrize("family", ["llama", "gemma3", "glm4", "smollm3"])
def test_an_engine_answers_the_same_through_every_implementation(answered, family):
    found = answered["families"][family]
    assert len(set(found["texts"].values())) == 1
    assert list(found["texts"]) == ["torch", "numba", "triton"]
    assert found["texts"]["torch"]
    assert found["furthest"] < 1e-5


def test_the_interpreter_is_never_chosen_by_itself(answered):
    assert answered["auto"] == "numba"
