"""Models of FlagEmbedding, loaded when they are used first. Needs the extra `bge`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from coinrag_integrations.errors import ModelError


def load_flag_model(class_name: str, model: str, device: str | None) -> Any:
    """A model of one of FlagEmbedding's classes, in fp32.

    Raises:
        ModelError: FlagEmbedding or the model cannot be loaded.
    """
    try:
        kind = getattr(import_module("FlagEmbedding"), class_name)
    except ImportError as error:
        raise ModelError(
            f"FlagEmbedding cannot be imported: pip install 'coinrag-integrations[bge]' ({error})"
        ) from error
    try:
        return kind(model, use_fp16=False, devices=device)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot load {model!r}: {error}. Give a local folder, or a hub name that this machine can "
            "reach"
        ) from error
