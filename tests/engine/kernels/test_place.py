"""Oracle: `place` in Triton is `place` in plain torch, and compiles for the GPUs we name."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from coinrag_integrations.engine.kernels import choose_kernels, reference
from coinrag_integrations.errors import ConfigError
from tests.engine.kernels import compiled, interpreted

CASES = [f"{shape}-{dtype}" for shape in interpreted.SHAPES for dtype in interpreted.DTYPES]
TARGETS = [
    f"sm_{a}-{dtype}-D{d}"
    for a in compiled.ARCHITECTURES
    for dtype in compiled.DTYPES
    for d in compiled.HEAD_DIMS
]
CPU = torch.device("cpu")


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
def test_the_interpreted_kernel_equals_the_reference(interpreter, case):
    assert set(interpreter["cases"]) == set(CASES)
    found = interpreter["cases"][case]
    assert all(found.values()), found


def test_no_entries_write_nothing(interpreter):
    assert interpreter["nothing"] == {"others_untouched": True}


def test_an_engine_answers_the_same_through_either_implementation(interpreter):
    answer = interpreter["answer"]
    assert answer["names"] == ["torch", "triton"]
    assert answer["prefixes_close"]
    assert answer["texts"][0] == answer["texts"][1] != ""


def test_the_interpreter_is_never_chosen_by_itself(interpreter):
    assert interpreter["answer"]["auto"] == "torch"


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_to_a_cubin_without_a_gpu(compiler, target):
    assert set(compiler) == set(TARGETS)
    found = compiler[target]
    assert found["cubin_bytes"] > 1000
    assert found["is_elf"]
    assert found["ptx_target"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", interpreted.DTYPES)
@pytest.mark.parametrize("shape", interpreted.SHAPES)
def test_the_kernel_on_a_gpu_equals_the_reference(shape, dtype):
    from coinrag_integrations.engine.kernels.place import place

    n, n_layers, n_heads, dim = interpreted.SHAPES[shape]
    dtype = interpreted.DTYPES[dtype]
    device = torch.device("cuda")
    staged = torch.randn(n, n_layers, 2, n_heads, dim, device=device).to(dtype)
    angle = torch.arange(n, device=device)[:, None] / torch.arange(1, dim // 2 + 1, device=device)
    outs = []
    for implementation in (reference.place, place):
        out = torch.full((n_layers, 2, n_heads, n + 8, dim), torch.nan, dtype=dtype, device=device)
        implementation(staged, angle.cos(), angle.sin(), out, 5)
        outs.append(out)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(outs[1], outs[0], rtol=eps, atol=2**-20, equal_nan=True)


def test_the_reference_fills_its_rows_and_no_other():
    staged = torch.randn(150, 2, 2, 3, 8)
    out = torch.full((2, 2, 3, 160, 8), torch.nan)
    angle = torch.rand(150, 4)
    reference.place(staged, angle.cos(), angle.sin(), out, 4)
    assert not out[:, :, :, 4:154].isnan().any()
    assert out[:, :, :, :4].isnan().all()
    assert out[:, :, :, 154:].isnan().all()
    assert torch.equal(out[:, 1, :, 4:154], staged.permute(1, 2, 3, 0, 4)[:, 1])
    expected = reference.rotate(staged.permute(1, 2, 3, 0, 4)[:, 0], angle.cos(), angle.sin())
    assert torch.equal(out[:, 0, :, 4:154], expected)


def test_the_reference_is_the_complex_product_it_claims_to_be():
    k, angle = torch.randn(2, 5, 16), 3 * torch.rand(5, 8)
    turned = torch.complex(k[..., :8], k[..., 8:]) * torch.polar(torch.ones(5, 8), angle)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(reference.rotate(k, angle.cos(), angle.sin()), expected)


def test_the_reference_rounds_once():
    k = torch.randn(1, 40, 16).to(torch.bfloat16)
    staged = torch.stack((k, k), 1).permute(2, 0, 1, 3)[:, :, :, None]  # [T, L, 2, H, D]
    angle = torch.rand(40, 8)
    out = torch.empty(1, 2, 1, 40, 16, dtype=torch.bfloat16)
    reference.place(staged, angle.cos(), angle.sin(), out)
    exact = reference.rotate(k.double().float(), angle.cos(), angle.sin()).to(torch.bfloat16)
    assert torch.equal(out[:, 0, 0], exact)


def test_plain_torch_is_chosen_on_a_cpu_with_a_reason():
    chosen = choose_kernels("auto", CPU)
    assert (chosen.name, chosen.place) == ("torch", reference.place)
    assert chosen.reason == "device is cpu"
    assert choose_kernels("torch", CPU).reason == "asked for"


def test_triton_on_a_cpu_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="cannot run on cpu: use a GPU, 'torch', or TRITON"):
        choose_kernels("triton", CPU)
