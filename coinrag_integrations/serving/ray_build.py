"""Encoding by many workers: Ray Data hands out batches of chunks, workers write them where the store is.

The driver keeps what needs one writer, the catalog and the index. Workers open the same store, or the same
remote storage behind a folder of their own, and hold nothing that could be lost: a batch whose worker dies
is done again by another. Batches are those of a build in one process, so that their bytes are too.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.engine.store import Limits
from coinrag_integrations.engine.store.codec import chunk_bytes
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.files import sweep
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.settings import (
    StoreSettings,
    load_extractor,
    open_remote,
    resolve_model,
)
from coinrag_integrations.types import Chunk, Scope

_HEADER_ROOM = 8192  # of a chunk's file, and of the folder it may need


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What a worker needs to know: the store's folder and settings, the scope, and how to compute."""

    folder: Path
    settings: StoreSettings
    config: EngineConfig
    scope: Scope


class Worker:
    """An engine in a process of its own. Ray makes and calls it."""

    def __init__(self, plan: WorkerPlan) -> None:
        """Load the model and open the store: its folder, or an empty one before its remote storage.

        Raises:
            CoinRAGError: the model cannot be loaded here, or the store cannot be opened.
        """
        from coinrag_integrations.engine import load_model

        settings, self._own = plan.settings, None
        folder = plan.folder
        if settings.remote:
            self._own = tempfile.TemporaryDirectory(prefix="coinrag-worker-")
            folder = Path(self._own.name)
        model = load_model(resolve_model(settings.model), dtype=settings.dtype)
        self.engine = Engine(
            model,
            folder,
            plan.config,
            scope=plan.scope,
            limits=Limits(),  # whoever drives has made room
            remote=open_remote(settings.remote),
            extractor=load_extractor(settings, model),
            add_fingerprint=True,
        )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Encode and store the chunks of each row; how many they were."""
        done = []
        for row in batch["chunks"]:
            chunks: list[Chunk] = pickle.loads(row)  # written by the driver of this build
            for chunk, forms in self.engine.encode(chunks):
                self.engine.store_chunk(chunk, forms)
            done.append(len(chunks))
        return {"n": done}


class RayEncoding:
    """Encoding on a Ray cluster, for `Ingestor`. Needs the extra `ray`.

    `n_workers` engines at once, each with `n_gpus` GPUs; `address` is that of a cluster (None: this
    machine). The store's folder must be the same for all, or have remote storage behind it.
    """

    groups_at_once = 64  # about a million tokens: workers load their model once for so many

    def __init__(
        self,
        rag: CoinRAG,
        folder: Path,
        *,
        n_workers: int = 2,
        n_gpus: float = 0.0,
        address: str | None = None,
    ) -> None:
        """Reach the cluster.

        Raises:
            ConfigError: Ray is not installed, or there are to be no workers.
        """
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"a build on Ray needs it: pip install 'coinrag-integrations[ray]' ({error})"
            ) from error
        if n_workers < 1:
            raise ConfigError(f"{n_workers} workers encode nothing: use at least 1")
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        self._engine, self._n_workers, self._n_gpus = rag.engine, n_workers, n_gpus
        self._plan = WorkerPlan(
            folder=folder.resolve(),
            settings=StoreSettings.load(folder),
            config=replace(rag.engine.config, memory_bytes=0, kept_bytes=0),
            scope=rag.engine.scope,
        )

    def __call__(self, groups: Sequence[Sequence[Chunk]]) -> Iterator[int]:
        """See `ingest.Encoding`.

        Raises:
            StoreError: the store's caps leave no room.
        """
        import ray

        rows = [
            {"chunks": pickle.dumps(batch)}
            for group in groups
            for batch in self._engine.forms.batches(group)
        ]
        if not rows:
            return
        n_bytes = sum(map(self._bytes_of, chain.from_iterable(groups)))
        with self._engine.disk.room(self._engine.scope.tenant, n_bytes):
            made = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                Worker,
                fn_constructor_args=(self._plan,),
                batch_size=1,
                batch_format="numpy",
                compute=ray.data.ActorPoolStrategy(size=min(self._n_workers, len(rows))),
                num_gpus=self._n_gpus or None,
                num_cpus=1,
            )
            for row in made.iter_rows():
                yield int(row["n"])
        sweep(self._plan.folder)  # what workers that died had not finished

    def _bytes_of(self, chunk: Chunk) -> int:
        """What all forms of a chunk take on disk, at most."""
        forms = self._engine.forms
        return sum(
            chunk_bytes(store.codec, store.codec.n_entries(forms.covered(chunk, ratio)))
            + _HEADER_ROOM
            for ratio, store in forms.stores.items()
        )
