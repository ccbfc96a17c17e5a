"""The implementation is chosen once, for a reason that is told, and never one that cannot run."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from coinrag_integrations.engine.kernels import choose_kernels, reference
from coinrag_integrations.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def without(monkeypatch):
    """Make a package look as if it were not installed."""
    find = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == package else find(name)
        )

    return hide


@pytest.fixture(autouse=True)
def _not_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_numba_is_chosen_on_a_cpu():
    from coinrag_integrations.engine.kernels import cpu

    chosen = choose_kernels("auto", CPU)
    assert (chosen.name, chosen.reason) == ("numba", "device is cpu")
    assert (chosen.place, chosen.quantise) == (cpu.place, cpu.quantise)


def test_triton_is_chosen_on_a_gpu():
    from coinrag_integrations.engine.kernels import gpu

    chosen = choose_kernels("auto", CUDA)
    assert (chosen.name, chosen.reason) == ("triton", "device is cuda")
    assert (chosen.place, chosen.quantise) == (gpu.place, gpu.quantise)


@pytest.mark.parametrize(
    ("package", "device", "way_out"),
    [
        ("numba", CPU, "pip install 'coinrag-integrations[cpu]'"),
        ("triton", CUDA, "pip install triton"),
    ],
)
def test_plain_torch_is_chosen_where_the_faster_one_is_missing(without, package, device, way_out):
    without(package)
    chosen = choose_kernels("auto", device)
    assert chosen.name == "torch"
    assert (chosen.place, chosen.quantise) == (reference.place, reference.quantise)
    assert chosen.reason.startswith(f"{package} is not installed: {way_out}")


def test_plain_torch_is_chosen_on_other_devices():
    chosen = choose_kernels("auto", torch.device("mps"))
    assert (chosen.name, chosen.reason) == ("torch", "device is mps")


@pytest.mark.parametrize(
    ("name", "device"), [("torch", CPU), ("torch", CUDA), ("numba", CPU), ("triton", CUDA)]
)
def test_what_is_asked_for_is_chosen(name, device):
    chosen = choose_kernels(name, device)
    assert (chosen.name, chosen.reason) == (name, "asked for")


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [
        ("triton", CPU, "kernels='triton' cannot run on cpu: use a GPU, 'auto', or TRITON_INTERP"),
        ("numba", CUDA, "kernels='numba' cannot run on cuda: use 'triton' or 'torch'"),
    ],
)
def test_what_cannot_run_on_the_device_is_refused_with_the_way_out(name, device, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_kernels(name, device)


@pytest.mark.parametrize(("name", "device"), [("numba", CPU), ("triton", CUDA)])
def test_what_is_not_installed_is_refused_with_the_way_out(without, name, device):
    without(name)
    message = f"kernels='{name}' needs the package {name}: install it, or use 'torch'"
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_kernels(name, device)
