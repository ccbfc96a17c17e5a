"""`coinrag doctor`: what this machine has, and whether a model and a store are in order."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from coinrag_integrations import __version__
from coinrag_integrations.cli.options import Json
from coinrag_integrations.cli.output import Output

_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numba",
    "safetensors",
    "chromadb",
    "llama-index-core",
    "langchain-core",
    "FlagEmbedding",
    "sentence-transformers",
)


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Check this model: local folder, hub name, or 'demo'.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="Check this store against the model.")
    ] = None,
    json: Json = False,
) -> None:
    """Report hardware, versions and kernels; with a model, run its correctness gate."""
    output = Output(as_json=json)
    import torch

    from coinrag_integrations.engine.kernels import choose_kernels
    from coinrag_integrations.engine.layout import dtype_name
    from coinrag_integrations.engine.model import choose_device, choose_dtype
    from coinrag_integrations.evaluation.ttft import describe_machine
    from coinrag_integrations.settings import StoreSettings

    device = choose_device("auto")
    kernels = choose_kernels("auto", device)
    report: dict[str, Any] = {
        "coinrag": __version__,
        "machine": describe_machine(device),
        "versions": {name: _version(name) for name in _PACKAGES},
        "device": str(device),
        "dtype": dtype_name(choose_dtype("auto", device)),
        "kernels": {"name": kernels.name, "reason": kernels.reason},
        "torch_cuda": torch.version.cuda,
        "triton_found": importlib.util.find_spec("triton") is not None,
    }
    if store is not None:
        settings = StoreSettings.load(store)
        report["store"] = {"path": str(store), "settings": asdict(settings)}
        model = model or settings.model
    if model is not None:
        report["model"] = _check_model(model, store)
    _show(output, report)
    output.result(report)


def _check_model(model: str, store: Path | None) -> dict[str, Any]:
    """Load the model, run the gate, and compare with the store; errors of our tree go up."""
    import tempfile

    from coinrag_integrations.engine import Engine, EngineConfig, load_model
    from coinrag_integrations.settings import StoreSettings, load_extractor, resolve_model

    settings = StoreSettings(model=model) if store is None else StoreSettings.load(store)
    loaded = load_model(resolve_model(model), dtype=settings.dtype)
    with tempfile.TemporaryDirectory() as scratch:
        config = EngineConfig() if store is None else settings.engine
        extractor = None if store is None else load_extractor(settings, loaded)
        with Engine(loaded, store or scratch, config, extractor=extractor) as engine:
            return {
                "name": model,
                "window": loaded.window,
                "bytes_per_token": loaded.layout.bytes_per_entry,
                "rotation": {
                    "turned": f"{loaded.rope.width} of {loaded.layout.head_dim} dimensions",
                    "pairs": "interleaved" if loaded.rope.interleaved else "half-split",
                    "kinds": len(loaded.rope.rotaries),
                    "layers_turned": f"{sum(loaded.rope.turns)} of {loaded.layout.n_layers}",
                },
                "layer_windows": list(loaded.layer_windows),
                "fingerprint": engine.fingerprint.to_dict(),
                "slots": {
                    str(ratio): kept.fingerprint.extractor
                    for ratio, kept in engine.forms.stores.items()
                    if ratio > 1
                }
                or None,
                "gate": asdict(engine.gate) | {"passed": engine.gate.passed},
            }


def _show(output: Output, value: dict[str, Any], indent: str = "") -> None:
    for key, item in value.items():
        if isinstance(item, dict):
            output.say(f"{indent}{key}", style="bold")
            _show(output, item, indent + "  ")
        else:
            output.say(f"{indent}{key}: {item}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
