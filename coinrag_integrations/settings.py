"""What a store remembers of how it was built, and how its names become models and embedders."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from coinrag_integrations.demo.model import DEMO_EXTRACTOR, DEMO_READER, ensure_demo_model
from coinrag_integrations.engine import EngineConfig, LoadedModel, PromptTemplate
from coinrag_integrations.engine.adapter import Adapter
from coinrag_integrations.engine.c2kv import Extractor
from coinrag_integrations.engine.model import DType
from coinrag_integrations.engine.store import Limits, Remote
from coinrag_integrations.engine.store.retry import Retry
from coinrag_integrations.errors import ConfigError, StoreError
from coinrag_integrations.files import write_text
from coinrag_integrations.retrieval import Embedder
from coinrag_integrations.retrieval.embedders import (
    BGE_M3,
    BGE_MAX_LENGTH,
    BGEM3Embedder,
    MiniLMEmbedder,
)

SETTINGS_FILE = "store.json"
INDEX_MARK = "index.changing"
PREFIX = "coinrag"
DEMO = "demo"
FORMAT = 2
# What the bytes of a store depend on; how it is used is for whoever opens it to say.
_ENGINE = ("chunk_tokens", "context", "coverage", "c2kv", "codec")
UNTRAINED = "untrained"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What a store remembers, so that it is opened as it was built.

    `model` is a folder, a hub name or "demo", `embedder` "minilm", "bge-m3" or
    "bge-m3:<folder or hub name>", `chroma` an address `http://host:port`, or None for a database
    inside the store; `prefix` begins the names of its collections there. `limits` bound the bytes on
    disk, `remote` is the URL of storage behind it (credentials belong into the environment), `adapter`
    the folder of a reader adapter, `extractor` that of C2KV's, or "untrained".
    Of `engine`, only what the stored bytes depend on is remembered.
    """

    model: str
    embedder: str = "minilm"
    chroma: str | None = None
    prefix: str = PREFIX
    dtype: DType = "auto"
    limits: Limits = field(default_factory=Limits)
    remote: str | None = None
    adapter: str | None = None
    extractor: str | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def with_own_extractor(self) -> StoreSettings:
        """With the extractor that comes with the demo model, if slots are asked for and none is named."""
        if self.engine.c2kv and self.extractor is None and self.model == DEMO:
            return replace(self, extractor=DEMO)
        return self

    def save(self, folder: Path) -> None:
        """Write `store.json`.

        Raises:
            StoreError: the folder cannot be written.
        """
        path = folder / SETTINGS_FILE
        value = {"format": FORMAT, **asdict(self)}
        kept = {name: value["engine"][name] for name in _ENGINE}
        value["engine"] = {**kept, "prompt": value["engine"]["prompt"]}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(value, indent=1) + "\n")
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
            if value.pop("format", 1) != FORMAT:
                raise StoreError(
                    f"the store {folder} is of another version of this package: build it anew"
                )
            engine, limits = value.pop("engine"), Limits(**value.pop("limits"))
            prompt = PromptTemplate(**engine.pop("prompt"))
            ratios = tuple(engine.pop("c2kv", ()))
            config = EngineConfig(prompt=prompt, c2kv=ratios, **engine)
            return cls(engine=config, limits=limits, **value)
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
    return str(ensure_demo_model()) if name == DEMO else name


def load_adapter(name: str | None) -> Adapter | None:
    """The reader adapter in a folder; "demo" is the one for the demo model, which comes with the package.

    Raises:
        ModelError: there is none.
    """
    return Adapter.load(DEMO_READER if name == DEMO else name) if name else None


def load_extractor(settings: StoreSettings, model: LoadedModel) -> Extractor | None:
    """What makes the slots of a store, if it has any; "demo" is the one that comes with the package.

    Raises:
        ConfigError: the store has slots, and names no extractor.
        ModelError: it cannot be read, or belongs to another model.
    """
    if not settings.engine.c2kv:
        return None
    if settings.extractor is None:
        raise ConfigError(
            "slots are asked for, and nothing makes them: give --extractor FOLDER, which `coinrag train "
            f"c2kv` makes, or --extractor {UNTRAINED} for slots that are worth much less"
        )
    return read_extractor(settings.extractor, model)


def read_extractor(name: str, model: LoadedModel) -> Extractor:
    """A folder's extractor, that of the demo ("demo"), or one that was not trained ("untrained").

    Raises:
        ModelError: it cannot be read, or belongs to another model.
    """
    if name == UNTRAINED:
        return Extractor.untrained(model)
    return Extractor.load(DEMO_EXTRACTOR if name == DEMO else name, model)


def open_remote(url: str | None) -> Remote | None:
    """The storage at a URL, with the patience of somebody who waits for an answer.

    Raises:
        ConfigError: no such URL, or what reads it is not installed.
    """
    return Remote.open(url, retry=Retry(attempts=4, total_s=10.0)) if url else None


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
