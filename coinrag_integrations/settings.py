"""What a store remembers of how it was built, and how its names become models and embedders."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coinrag_integrations.demo.model import ensure_demo_model
from coinrag_integrations.engine import EngineConfig, PromptTemplate
from coinrag_integrations.engine.model import DType
from coinrag_integrations.errors import ConfigError, StoreError
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.retrieval.embedders import (
    BGE_M3,
    BGE_MAX_LENGTH,
    BGEM3Embedder,
    MiniLMEmbedder,
)

SETTINGS_FILE = "store.json"
COLLECTION = "coinrag"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What a store remembers, so that it is opened as it was built.

    `model` is a folder, a hub name or "demo", `embedder` "minilm", "bge-m3" or
    "bge-m3:<folder or hub name>", `chroma` an address `http://host:port`, or None for a database
    inside the store; `collection` names the two collections there.
    """

    model: str
    embedder: str = "minilm"
    chroma: str | None = None
    collection: str = COLLECTION
    dtype: DType = "auto"
    engine: EngineConfig = field(default_factory=EngineConfig)

    def save(self, folder: Path) -> None:
        """Write `store.json`.

        Raises:
            StoreError: the folder cannot be written.
        """
        path = folder / SETTINGS_FILE
        temporary = path.with_suffix(".tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> StoreSettings:
        """Read `store.json`.

        Raises:
            StoreError: there is no store in the folder, or its settings cannot be read.
        """
        path = folder / SETTINGS_FILE
        try:
            value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            engine = value.pop("engine")
            prompt = PromptTemplate(**engine.pop("prompt"))
            return cls(engine=EngineConfig(prompt=prompt, **engine), **value)
        except FileNotFoundError as error:
            raise StoreError(
                f"there is no store in {folder}: build one with `coinrag build PATH --store {folder}`"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"cannot read {path}: {error}. Build the store anew") from error


def resolve_model(name: str) -> str:
    """What to load for a model's name: "demo" is the demo model, fetched and converted once.

    Raises:
        ModelError: the demo model cannot be fetched.
    """
    return str(ensure_demo_model()) if name == "demo" else name


def make_embedder(name: str) -> Embedder:
    """An embedder by its name in a store's settings, or by the `embedder_id` of one of ours.

    Raises:
        ConfigError: the name is not known.
    """
    if name in ("minilm", MiniLMEmbedder.embedder_id):
        return MiniLMEmbedder()
    if match := re.fullmatch(r"bge-m3(?::(?P<model>.+?))?(?::(?P<length>\d+))?", name):
        length = int(match["length"] or BGE_MAX_LENGTH)
        return BGEM3Embedder(match["model"] or BGE_M3, max_length=length)
    raise ConfigError(
        f"embedder {name!r} is not known: use 'minilm', 'bge-m3' or 'bge-m3:<folder>', or pass the "
        "embedder object that the store was built with"
    )
