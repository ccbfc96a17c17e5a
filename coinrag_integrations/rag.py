"""The object most programs need: a store of documents that can be added to and asked.

    with CoinRAG.open("store", model="demo") as rag:
        rag.add(read_documents(["docs/"]))
        print(rag.ask("Who built the tidal organ?").text)

It joins an engine, an index and a nugget proposer, and remembers in the store how it was built.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn, Self
from uuid import uuid4

from coinrag_integrations.engine import (
    Engine,
    EngineConfig,
    GenerationConfig,
    LoadedModel,
    load_model,
    observers,
)
from coinrag_integrations.engine.handles import Reason
from coinrag_integrations.engine.model import DType
from coinrag_integrations.engine.observers import Search
from coinrag_integrations.engine.prompt import check_question
from coinrag_integrations.engine.store import Limits
from coinrag_integrations.errors import ChunkNotFoundError, ConfigError
from coinrag_integrations.ingest import WAIT_SECONDS, Ingestor, IngestReport, OnProgress
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer
from coinrag_integrations.reply import Reply, ReplyStream
from coinrag_integrations.retrieval import (
    ChromaFolder,
    Embedder,
    RetrievalConfig,
    SpanIndex,
    open_client,
)
from coinrag_integrations.retrieval.config import Form
from coinrag_integrations.retrieval.forms import OF_CHUNKS, of_chunks, of_nuggets
from coinrag_integrations.settings import (
    DEMO,
    INDEX_MARK,
    PREFIX,
    SETTINGS_FILE,
    StoreSettings,
    load_adapter,
    load_extractor,
    make_embedder,
    open_remote,
    resolve_model,
)
from coinrag_integrations.types import Chunk, ChunkId, Document, Scope, ScoredSpan

Mode = Literal["coinrag", "chunk", "c2kv", "hybrid", "full"]
_OPENING = threading.Lock()
MODES: tuple[Mode, ...] = ("coinrag", "chunk", "full")  # of every store
SLOT_MODES: tuple[Mode, ...] = ("c2kv", "hybrid")  # of stores with slots
_FORMS: dict[Mode, Form] = {"chunk": "chunks", "full": "chunks", "c2kv": "c2kv", "hybrid": "hybrid"}


class CoinRAG:
    """Documents in, answers out. Retrieval, composition and generation may run in many threads."""

    def __init__(
        self,
        engine: Engine,
        index: SpanIndex,
        *,
        proposer: NuggetProposer | None = None,
        retrieval: RetrievalConfig | None = None,
        generation: GenerationConfig | None = None,
        folder: ChromaFolder | None = None,
    ) -> None:
        """Join parts that are already open; engine and `folder` are closed with this object."""
        self.engine, self.index = engine, index
        self.retrieval = retrieval or RetrievalConfig()
        self.generation = generation or GenerationConfig()
        self._folder = folder
        self.ingestor = Ingestor(engine, index, proposer or RuleProposer())

    @property
    def proposer(self) -> NuggetProposer:
        """What suggests the nuggets of documents that are added."""
        return self.ingestor.proposer

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        model: str | Path | LoadedModel | None = None,
        embedder: str | Embedder | None = None,
        chroma: str | None = None,
        dtype: DType | None = None,
        config: EngineConfig | None = None,
        tenant: str = "default",
        collection: str = "main",
        limits: Limits | None = None,
        remote: str | None = None,
        adapter: str | Path | None = None,
        extractor: str | Path | None = None,
        add_fingerprint: bool = False,
        proposer: NuggetProposer | None = None,
        retrieval: RetrievalConfig | None = None,
        generation: GenerationConfig | None = None,
    ) -> Self:
        """Open the store in `folder`, or start one there when `model` is given.

        What is left out is taken from the store, and for a new one from the defaults
        (`EngineConfig`, MiniLM, a Chroma database inside the store). Only documents of `tenant` and
        `collection` can be seen or changed. `limits` become those of the store,
        `remote` (a URL that fsspec knows) the storage behind it. `adapter` is the folder of a reader
        adapter ("" for none; the demo model has one): answers are computed with it, what is cached stays.
        `extractor` is the folder of what makes the slots that `config.c2kv` asks for ("untrained" for
        none; the demo model has one).
        `add_fingerprint` lets KV of another encoding stand beside what is there.

        Raises:
            StoreError: no store there and no model given, or the folder cannot be used.
            FingerprintMismatchError: the store was built with another model or other options.
            ModelError, UnsupportedModelError: the model cannot be loaded or served.
            ConfigError: slots are asked for, and there is no extractor.
            SpanIndexError: Chroma cannot be reached, or holds another embedder's vectors.
        """
        folder, scope = Path(folder), Scope(tenant=tenant, collection=collection)
        is_new = not (folder / SETTINGS_FILE).exists()
        if is_new and model is not None:
            # Stores that share a server must not share collections.
            own = f"{PREFIX}_{uuid4().hex[:8]}" if chroma else PREFIX
            reader = DEMO if _name(model) == DEMO else None
            before = StoreSettings(model=_name(model), prefix=own, adapter=reader)
        else:
            before = StoreSettings.load(folder)
        settings = replace(
            before,
            model=before.model if model is None else _name(model),
            embedder=before.embedder if embedder is None else _embedder_name(embedder),
            chroma=chroma or before.chroma,
            dtype=dtype or before.dtype,
            limits=before.limits if limits is None else limits,
            remote=remote or before.remote,
            adapter=before.adapter if adapter is None else str(adapter) or None,
            extractor=before.extractor if extractor is None else str(extractor) or None,
            engine=config or before.engine,
        ).with_own_extractor()
        # What costs nothing and writes nothing comes first, so that mistakes show at once.
        searcher = (
            make_embedder(settings.embedder) if isinstance(embedder, str | None) else embedder
        )
        server = open_client(settings.chroma) if settings.chroma else None
        adapted = load_adapter(settings.adapter)
        loaded = (
            model
            if isinstance(model, LoadedModel)
            else load_model(resolve_model(settings.model), dtype=settings.dtype)
        )
        # Neither Chroma nor SQLite make a database that threads open for the first time at once.
        with _OPENING, ExitStack() as opened:
            engine = Engine(
                loaded,
                folder,
                settings.engine,
                scope=scope,
                limits=settings.limits,
                remote=open_remote(settings.remote),
                adapter=adapted,
                extractor=load_extractor(settings, loaded),
                add_fingerprint=add_fingerprint,
            )
            opened.callback(engine.close)
            own_folder = None if server else ChromaFolder.open(folder / "chroma")
            if own_folder is not None:
                opened.callback(own_folder.close)
            client = server or own_folder
            assert client is not None
            index = SpanIndex(
                client, searcher, f"{settings.prefix}.{scope}", mark=engine.folder / INDEX_MARK
            )
            if is_new or settings != before:
                settings.save(folder)
            rag = cls(
                engine,
                index,
                proposer=proposer,
                retrieval=retrieval,
                generation=generation,
                folder=own_folder,
            )
            rag.ingestor.mend()
            opened.pop_all()
        return rag

    def add(
        self, documents: Iterable[Document], on_progress: OnProgress | None = None
    ) -> IngestReport:
        """Add or replace documents. See `Ingestor.add`."""
        return self.ingestor.add(documents, on_progress)

    def delete(self, document_ids: Iterable[str]) -> int:
        """Remove documents and everything made of them; how many there were."""
        return self.ingestor.delete(document_ids)

    def pin(self, document_ids: Iterable[str], *, pinned: bool = True) -> None:
        """Keep the KV of documents from being evicted, or no longer.

        Raises:
            StoreError: another process is writing, or the disk refuses.
        """
        with self.engine.disk.writing(wait_seconds=WAIT_SECONDS):
            self.engine.catalog.pin(document_ids, pinned=pinned)

    def retrieve(
        self, question: str, mode: Mode = "coinrag", config: RetrievalConfig | None = None
    ) -> list[ScoredSpan]:
        """The spans for a question, best first: in the form of `config`, or in that of another mode.

        Raises:
            ConfigError: the question is empty, or no text; slots are wanted, and the store has none.
            SpanIndexError: Chroma fails.
        """
        check_question(question)
        config, engine = config or self.retrieval, self.engine
        form, live = _FORMS.get(mode, config.form), engine.catalog.live
        ratio = config.ratio or next(iter(engine.config.c2kv), 1)
        if form not in ("spans", "chunks") and ratio not in engine.config.c2kv:
            there = ", ".join(map(str, engine.config.c2kv)) or "none"
            raise ConfigError(
                f"form {form!r} reads slots, and the store has none of {config.ratio or 'any'} tokens "
                f"(there: {there}): build it with --c2kv {config.ratio or 4}, or open it with "
                f"EngineConfig(c2kv=({config.ratio or 4},)) and add its documents again"
            )
        begin = time.perf_counter()
        if form in OF_CHUNKS:
            where = config.where
            chunks = self.index.search_chunks(question, config.n_chunks, where=where, live=live)
            spans = of_chunks(form, chunks, ratio, config.n_raw)
        else:
            nuggets = self.index.search(question, config, live=live)
            spans = of_nuggets(form, nuggets, self._chunk_if_there, ratio)
        spent = (time.perf_counter() - begin) * 1e3
        observers.searched(
            Search(form=form, n_chunks=config.n_chunks, n_spans=len(spans), milliseconds=spent)
        )
        return spans

    def _chunk_if_there(self, chunk_id: ChunkId) -> Chunk | None:
        """A chunk, unless its document was removed since it was found."""
        try:
            return self.engine.catalog.chunk(chunk_id)
        except ChunkNotFoundError:
            return None

    def ask(
        self,
        question: str,
        mode: Mode = "coinrag",
        *,
        retrieval: RetrievalConfig | None = None,
        generation: GenerationConfig | None = None,
    ) -> Reply:
        """Retrieve and answer."""
        stream = self.stream(question, mode, retrieval=retrieval, generation=generation)
        for _ in stream:
            pass
        return stream.reply

    def stream(
        self,
        question: str,
        mode: Mode = "coinrag",
        *,
        retrieval: RetrievalConfig | None = None,
        generation: GenerationConfig | None = None,
    ) -> ReplyStream:
        """Retrieve and answer, a piece of text at a time.

        Modes: "coinrag" composes nuggets' KV (or what the form of `retrieval` says), "chunk" whole
        chunks' KV, "c2kv" their slots, "hybrid" the best chunks' KV and the others' slots; "full"
        prefills the chunks' text without any cache.

        Raises:
            ConfigError: an unknown mode, or a question that is no text.
            BudgetError: spans, question and answer do not fit the model's window.
            SpanIndexError, StoreError: Chroma or the store fails.
        """
        if mode not in (*MODES, *SLOT_MODES):
            raise ConfigError(f"mode is {mode!r}: use one of {', '.join((*MODES, *SLOT_MODES))}")
        begin = time.perf_counter()
        spans = self.retrieve(question, mode, retrieval)
        retrieve_ms = (time.perf_counter() - begin) * 1e3
        return self.stream_spans(
            question, spans, mode, generation=generation, retrieve_ms=retrieve_ms
        )

    def stream_spans(
        self,
        question: str,
        context: Sequence[ScoredSpan | str],
        mode: Mode = "coinrag",
        *,
        generation: GenerationConfig | None = None,
        retrieve_ms: float = 0.0,
        refused: Mapping[Reason, int] | None = None,
    ) -> ReplyStream:
        """Answer from spans that were retrieved before, best first, and from texts of elsewhere.

        Spans of documents that were deleted since, and slots that the store does not make any more, are
        read as texts, and counted. Mode "full" reads the spans' whole chunks, and no texts. `refused` says
        of the answer how many of the texts should have been spans.
        """
        generation, refused = generation or self.generation, dict(refused or {})
        spans = [it for it in context if isinstance(it, ScoredSpan)]
        live = self.engine.catalog.live([span.ref.chunk_id for span in spans])
        there = [
            it
            for it in spans
            if it.ref.chunk_id in live and it.ref.ratio in self.engine.forms.stores
        ]
        if n_gone := len(spans) - len(there):
            refused["unknown"] = refused.get("unknown", 0) + n_gone
            known = {it.ref for it in there}
            context = [
                it.text if isinstance(it, ScoredSpan) and it.ref not in known else it
                for it in context
            ]
            spans = there
        if mode == "full":
            chunk_ids: list[ChunkId] = list(dict.fromkeys(span.ref.chunk_id for span in spans))
            stream = self.engine.stream_full(question, chunk_ids, generation)
        else:
            pieces = [it.ref if isinstance(it, ScoredSpan) else it for it in context]
            stream = self.engine.stream(question, pieces, generation)
        return ReplyStream(stream, spans, retrieve_ms, refused)

    def close(self) -> None:
        """Close the engine's files, and the index if it lies in the store."""
        self.engine.close()
        if self._folder is not None:
            self._folder.close()

    def __copy__(self) -> Self:
        """The object itself: files and models are shared."""
        return self

    def __deepcopy__(self, _: object) -> Self:
        """The object itself, so that what holds it can be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "a store cannot be pickled: open the store (CoinRAG.open) in the process that needs it"
        )

    def __enter__(self) -> Self:
        """The object itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


def _name(model: str | Path | LoadedModel) -> str:
    return model.name if isinstance(model, LoadedModel) else str(model)


def _embedder_name(embedder: str | Embedder) -> str:
    return embedder if isinstance(embedder, str) else embedder.embedder_id
