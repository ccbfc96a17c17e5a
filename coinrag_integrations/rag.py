"""The object most programs need: a store of documents that can be added to and asked.

    with CoinRAG.open("store", model="demo") as rag:
        rag.add(read_documents(["docs/"]))
        print(rag.ask("Who built the tidal organ?").text)

It joins an engine, an index and a nugget proposer, and remembers in the store how it was built.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn, Self
from uuid import uuid4

from coinrag_integrations.engine import (
    Answer,
    AnswerStream,
    Engine,
    EngineConfig,
    GenerationConfig,
    LoadedModel,
    load_model,
)
from coinrag_integrations.engine.handles import Reason
from coinrag_integrations.engine.model import DType
from coinrag_integrations.engine.prompt import check_question
from coinrag_integrations.engine.store import Limits
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.ingest import WAIT_SECONDS, Ingestor, IngestReport, OnProgress
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer
from coinrag_integrations.retrieval import (
    ChromaFolder,
    Embedder,
    RetrievalConfig,
    SpanIndex,
    open_client,
)
from coinrag_integrations.settings import (
    DEMO,
    INDEX_MARK,
    PREFIX,
    SETTINGS_FILE,
    StoreSettings,
    load_adapter,
    make_embedder,
    open_remote,
    resolve_model,
)
from coinrag_integrations.types import ChunkId, Document, Scope, ScoredSpan

Mode = Literal["coinrag", "chunk", "full"]
_OPENING = threading.Lock()
MODES: tuple[Mode, ...] = ("coinrag", "chunk", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer and the retrieved spans it rests on, best first."""

    answer: Answer
    spans: tuple[ScoredSpan, ...]

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text


class ReplyStream:
    """Iterates over the text of a reply; `reply` is complete once it has ended."""

    def __init__(
        self,
        stream: AnswerStream,
        spans: Sequence[ScoredSpan],
        retrieve_ms: float,
        refused: Mapping[Reason, int] | None = None,
    ) -> None:
        """Nothing is generated before the first piece is asked for."""
        self._stream, self._spans, self._retrieve_ms = stream, tuple(spans), retrieve_ms
        self._refused = dict(refused or {})

    def __iter__(self) -> Iterator[str]:
        """The stream itself."""
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty."""
        return next(self._stream)

    def close(self) -> None:
        """Stop generating."""
        self._stream.close()

    @property
    def reply(self) -> Reply:
        """What has been answered so far."""
        answer = self._stream.answer
        timings = replace(answer.timings, retrieve_ms=self._retrieve_ms)
        answer = replace(answer, timings=timings, refused=self._refused)
        return Reply(answer=answer, spans=self._spans)


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
        `add_fingerprint` lets KV of another encoding stand beside what is there.

        Raises:
            StoreError: no store there and no model given, or the folder cannot be used.
            FingerprintMismatchError: the store was built with another model or other options.
            ModelError, UnsupportedModelError: the model cannot be loaded or served.
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
            engine=config or before.engine,
        )
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
        """The spans for a question, best first: nuggets, or whole chunks in the other modes.

        Raises:
            ConfigError: the question is empty, or no text.
            SpanIndexError: Chroma fails.
        """
        check_question(question)
        config = config or self.retrieval
        live = self.engine.catalog.live
        if mode == "coinrag":
            return self.index.search(question, config, live=live)
        return self.index.search_chunks(question, config.n_chunks, where=config.where, live=live)

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

        Modes: "coinrag" composes nuggets' KV, "chunk" whole chunks' KV, "full" prefills the chunks'
        text without any cache.

        Raises:
            ConfigError: an unknown mode, or a question that is no text.
            BudgetError: spans, question and answer do not fit the model's window.
            SpanIndexError, StoreError: Chroma or the store fails.
        """
        if mode not in MODES:
            raise ConfigError(f"mode is {mode!r}: use one of {', '.join(MODES)}")
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

        Spans of documents that were deleted since are read as texts, and counted. Mode "full" reads the
        spans' whole chunks, and no texts. `refused` says of the answer how many of the texts should
        have been spans.
        """
        generation, refused = generation or self.generation, dict(refused or {})
        spans = [it for it in context if isinstance(it, ScoredSpan)]
        ids = [span.ref.chunk_id for span in spans]
        if gone := set(ids) - self.engine.catalog.live(ids):
            refused["unknown"] = refused.get("unknown", 0) + sum(it in gone for it in ids)
            spans = [span for span in spans if span.ref.chunk_id not in gone]
            context = [
                it.text if isinstance(it, ScoredSpan) and it.ref.chunk_id in gone else it
                for it in context
            ]
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
