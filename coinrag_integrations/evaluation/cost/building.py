"""A store that is really built, and what each part of building it took.

The store is filled by the ordinary `Ingestor`; what it calls is watched. So the parts are seconds of its
own thread, in its own order, and add up to the whole: files that are written beside the encoding count
only as far as they are waited for. `build.json` beside the store keeps them, and an interrupted build
goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from coinrag_integrations.engine import Engine, EngineConfig, LoadedModel
from coinrag_integrations.engine.fingerprint import canonical_digest
from coinrag_integrations.engine.forms import Forms
from coinrag_integrations.engine.plan import merge
from coinrag_integrations.engine.store.codec import chunk_bytes
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.ttft import describe_machine
from coinrag_integrations.files import write_text
from coinrag_integrations.ingest import Ingestor, OnProgress
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import Embedder, SpanIndex
from coinrag_integrations.retrieval.embedders import Vectors
from coinrag_integrations.settings import SETTINGS_FILE
from coinrag_integrations.types import Chunk, ChunkId, Document

STORE, BUILD = "store", "build.json"
_FORMAT = 1
Clock = Callable[[], float]

CUT, NUGGETS, KV, OTHER = "cut", "nuggets", "kv", "other"
EMBED_CHUNKS, EMBED_NUGGETS = "embed chunks", "embed nuggets"
INDEX_CHUNKS, INDEX_NUGGETS = "index chunks", "index nuggets"
PARTS = (CUT, EMBED_CHUNKS, INDEX_CHUNKS, OTHER, NUGGETS, EMBED_NUGGETS, INDEX_NUGGETS, KV)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a store holds, and what it took to build.

    `seconds` by part: "cut" into chunks, find "nuggets", "embed" and "index" the texts of either, "kv"
    (encode chunks and write their files), and "other" (the catalog above all). What indexing took is
    shared between chunks and nuggets by their rows, as `index_bytes` is. `kv_chunk_bytes` are the
    files of whole chunks, `kv_span_bytes` those of nuggets alone; without coverage "all" the first are
    not there (None), with it the second are what such files would take.
    """

    n_documents: int
    n_chunks: int
    n_nuggets: int
    n_tokens: int
    n_covered_tokens: int
    seconds: Mapping[str, float]
    kv_chunk_bytes: int | None
    kv_span_bytes: int
    catalog_bytes: int
    index_bytes: int

    @property
    def total_seconds(self) -> float:
        """All parts together."""
        return sum(self.seconds.values())

    @property
    def chunk_index_bytes(self) -> int:
        """The share of the index that chunks take, by rows."""
        rows = self.n_chunks + self.n_nuggets
        return round(self.index_bytes * self.n_chunks / rows) if rows else self.index_bytes


def build_store(
    documents: Sequence[Document],
    folder: Path,
    model: LoadedModel,
    embedder: Embedder,
    config: EngineConfig,
    *,
    proposer: NuggetProposer | None = None,
    on_progress: OnProgress | None = None,
    clock: Clock = time.perf_counter,
) -> tuple[Built, bool]:
    """Build `folder`/store, or find it there; whether it was there already.

    Raises:
        ConfigError: the folder holds a store of other documents or settings, or one without its times.
        CoinRAGError: see `CoinRAG.open` and `CoinRAG.add`.
    """
    proposer, note = proposer or RuleProposer(), folder / BUILD
    made_of = _digest(documents, model, embedder, config, proposer)
    before = _read(note, made_of)
    if isinstance(before, Built):
        return before, True
    if before is None and (folder / STORE / SETTINGS_FILE).exists():
        raise ConfigError(
            f"{folder / STORE} is there, but not how long it took to build ({note}): remove it, or give "
            "another folder"
        )
    watched = _WatchedEmbedder(embedder, clock)
    watched.embed_query("load it first")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror or error}") from error
    with CoinRAG.open(
        folder / STORE, model=model, embedder=watched, config=config, adapter=""
    ) as rag:
        note.unlink(missing_ok=True)  # who is killed leaves no times that are too short
        laps = _Laps(clock, before or {})
        ingestor = Ingestor(
            cast("Engine", _WatchedEngine(rag.engine, laps)),
            cast("SpanIndex", _WatchedIndex(rag.index, watched, laps)),
            proposer,
        )
        try:
            ingestor.add(documents, on_progress)
        except BaseException:  # above all KeyboardInterrupt: the next run goes on from here
            laps.begin(OTHER)
            _write(note, made_of, laps.seconds, None)
            raise
        laps.begin(OTHER)
        held = _counted(rag)
    # Closed, the catalog has nothing in its log any more.
    built = Built(
        **held,
        seconds=laps.seconds,
        catalog_bytes=rag.engine.catalog.path.stat().st_size,
        index_bytes=_folder_bytes(folder / STORE / "chroma"),
    )
    _write(note, made_of, laps.seconds, built)
    return built, False


def distinct(documents: Sequence[Document]) -> tuple[Document, ...]:
    """The first document of each text."""
    by_text: dict[str, Document] = {}
    for document in documents:
        by_text.setdefault(document.text, document)
    return tuple(by_text.values())


class _Laps:
    """Seconds by part. The time between two calls of `begin` belongs to what the first one named."""

    def __init__(self, clock: Clock, seconds: Mapping[str, float]) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0) | dict(seconds)
        self._clock, self._part, self._since = clock, OTHER, clock()

    def begin(self, part: str) -> float:
        """Seconds that what ends here took."""
        now = self._clock()
        spent = now - self._since
        self.seconds[self._part] += spent
        self._part, self._since = part, now
        return spent


class _WatchedEmbedder:
    """An embedder, and how long it has embedded documents."""

    def __init__(self, embedder: Embedder, clock: Clock) -> None:
        self._embedder, self._clock = embedder, clock
        self.seconds = 0.0

    @property
    def embedder_id(self) -> str:
        return self._embedder.embedder_id

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        begin = self._clock()
        vectors = self._embedder.embed_documents(texts)
        self.seconds += self._clock() - begin
        return vectors

    def embed_query(self, text: str) -> Vectors:
        return self._embedder.embed_query(text)


class _WatchedEngine:
    """What an ingestor calls of an engine; nuggets are found while it goes through the chunks."""

    def __init__(self, engine: Engine, laps: _Laps) -> None:
        self._engine, self._laps = engine, laps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def chunk(self, document: Document) -> Iterator[Chunk]:
        self._laps.begin(CUT)
        chunks = self._engine.chunk(document)
        self._laps.begin(NUGGETS)
        yield from chunks
        self._laps.begin(OTHER)

    def encode(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Forms]]:
        self._laps.begin(KV)
        return self._engine.encode(chunks)  # and all that is done with it, until it is indexed


class _WatchedIndex:
    """What an ingestor calls of an index, with the chunks embedded apart from their nuggets."""

    def __init__(self, index: SpanIndex, embedder: _WatchedEmbedder, laps: _Laps) -> None:
        self._index, self._embedder, self._laps = index, embedder, laps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def put(
        self, chunks: Sequence[Chunk], vectors: Mapping[ChunkId, Vectors] | None = None
    ) -> None:
        self._laps.begin(EMBED_CHUNKS)
        known = dict(vectors or {})
        unknown = [chunk for chunk in chunks if chunk.chunk_id not in known]
        if unknown:
            made = self._embedder.embed_documents([chunk.text for chunk in unknown])
            known |= {c.chunk_id: vector for c, vector in zip(unknown, made, strict=True)}
        before = self._embedder.seconds
        self._laps.begin(INDEX_CHUNKS)
        try:
            self._index.put(chunks, known)
        finally:
            spent, embedding = self._laps.begin(OTHER), self._embedder.seconds - before
            n_nuggets = sum(len(chunk.nuggets) for chunk in chunks)
            of_nuggets = (spent - embedding) * n_nuggets / max(len(chunks) + n_nuggets, 1)
            seconds = self._laps.seconds
            seconds[EMBED_NUGGETS] += embedding
            seconds[INDEX_NUGGETS] += of_nuggets
            seconds[INDEX_CHUNKS] -= embedding + of_nuggets


def _counted(rag: CoinRAG) -> dict[str, Any]:
    """What an open store holds, as fields of `Built`."""
    engine, store = rag.engine, rag.engine.store
    keeps_all = engine.config.coverage == "all"
    n_chunks = n_nuggets = n_tokens = n_covered = on_disk = saved = 0
    for chunk in engine.catalog.chunks():
        spans = merge([nugget.span for nugget in chunk.nuggets])
        covered = sum(map(len, spans)) or len(chunk)
        n_chunks, n_nuggets = n_chunks + 1, n_nuggets + len(chunk.nuggets)
        n_tokens, n_covered = n_tokens + len(chunk), n_covered + covered
        on_disk += store.path(chunk.chunk_id).stat().st_size
        if keeps_all:
            saved += chunk_bytes(store.codec, len(chunk)) - chunk_bytes(store.codec, covered)
    return {
        "n_documents": len(engine.catalog.documents()),
        "n_chunks": n_chunks,
        "n_nuggets": n_nuggets,
        "n_tokens": n_tokens,
        "n_covered_tokens": n_covered,
        "kv_chunk_bytes": on_disk if keeps_all else None,
        "kv_span_bytes": on_disk - saved,
    }


def _digest(
    documents: Sequence[Document],
    model: LoadedModel,
    embedder: Embedder,
    config: EngineConfig,
    proposer: NuggetProposer,
) -> str:
    """Of everything that a store's content or its times depend on."""
    return canonical_digest(
        {
            "format": _FORMAT,
            "documents": [[document.document_id, document.text] for document in documents],
            "weights": model.weights,
            "tokenizer": model.tokenizer.digest,
            "embedder": embedder.embedder_id,
            "proposer": proposer.proposer_id,
            "config": asdict(config),
            "machine": describe_machine(model.device),
        }
    )


def _read(note: Path, made_of: str) -> Built | dict[str, float] | None:
    """What was built, or the seconds of a build that was interrupted; None: nothing yet."""
    try:
        value = json.loads(note.read_text(encoding="utf-8"))
        if value["made_of"] != made_of:
            raise ConfigError(
                f"{note.parent} holds a store of other documents, of other settings or from another "
                "machine: give another folder, or remove it"
            )
        built = value["built"]
        return dict(value["seconds"]) if built is None else Built(**built)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read {note} ({error}): remove {note.parent}, or give another folder"
        ) from error


def _write(note: Path, made_of: str, seconds: Mapping[str, float], built: Built | None) -> None:
    value = {
        "made_of": made_of,
        "seconds": dict(seconds),
        "built": None if built is None else asdict(built),
    }
    try:
        write_text(note, json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {note}: {error.strerror or error}") from error


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
