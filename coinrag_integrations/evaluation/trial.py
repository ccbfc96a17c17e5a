"""A small trial build and a few questions, to see what each step takes on this machine.

The parts are the real ones (model, embedder, KV files, catalog, Chroma), in a folder that is thrown
away. Every step is warmed up first and stops when it has taken long enough to be known.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from coinrag_integrations.engine import AnswerStream, Engine, EngineConfig, GenerationConfig
from coinrag_integrations.engine.encoder import batches
from coinrag_integrations.engine.forms import ChunkForms
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.store import Catalog
from coinrag_integrations.engine.store.codec import chunk_bytes
from coinrag_integrations.errors import StoreError
from coinrag_integrations.evaluation.estimate import Costs, Estimate, Growth, Pairs, estimate
from coinrag_integrations.evaluation.survey import Survey, draw_questions, survey
from coinrag_integrations.nuggets import NuggetProposer, RuleProposer
from coinrag_integrations.retrieval import ChromaFolder, Embedder, RetrievalConfig, SpanIndex
from coinrag_integrations.retrieval.embedders import Vectors
from coinrag_integrations.types import Chunk, Document, SpanRef

T = TypeVar("T", Chunk, SpanRef)
OnStep = Callable[[str], None]
_BATCHES = 4
_AT_ONCE = 32  # chunks, about as many as an ingestion embeds and indexes together
_MAX_ROWS = 900  # Chroma moves rows from its log to its index from 1,000 on: stay on one side
_ROUNDS = 12
_WARM_UPS = 2
_SECONDS = 20.0  # a step ends after this long, and after one round at the earliest
_QUESTION = "Who was it that did so, in which year, and what did people say about it later?"
_CONTENT = "0" * 64  # where the hash of a document goes
_ONE_TOKEN = GenerationConfig(max_new_tokens=1)


def estimate_store(
    documents: Iterable[Document],
    model: LoadedModel,
    embedder: Embedder,
    config: EngineConfig | None = None,
    *,
    proposer: NuggetProposer | None = None,
    retrieval: RetrievalConfig | None = None,
    n_sample: int | None = 64,
    scratch: Path | None = None,
    on_step: OnStep | None = None,
) -> Estimate:
    """What a store of these documents would cost on this machine. Builds none.

    Slots are made by an untrained extractor: a trained one's are as large and take as long. `n_sample`
    chunks are looked into for nuggets, None: all. Trial files go to a folder inside
    `scratch` (default: the system's temporary folder) and are removed; writing is as fast as it is
    there. `on_step` is told what is being done.

    Raises:
        DocumentError: there is no text in the documents, or a file of them cannot be read.
        UnsupportedModelError: the model does not pass the correctness gate.
        ModelError: the embedder cannot be loaded.
        BudgetError: a chunk does not fit the model's window.
        StoreError, SpanIndexError: the scratch folder cannot be written.
    """
    tell = on_step or (lambda _: None)
    retrieval = retrieval or RetrievalConfig()
    # The trial's engine knows how fast it encodes, and might not read what one that only asks would.
    config = replace(config or EngineConfig(), load="read")
    with _trial_folder(scratch) as folder, Engine(model, folder / "store", config) as engine:
        tell("reading and tokenising the documents")
        to_embed: set[str] = set()
        counted = survey(
            _noting_those_to_embed(documents, to_embed),
            engine.chunk,
            proposer or RuleProposer(),
            engine.covered,
            n_sample=n_sample,
        )
        costs = measure_costs(engine, embedder, counted, folder, retrieval, tell)
        if not to_embed:  # their vectors are there already
            costs = replace(costs, embed_chunks=((1, 0.0),))
        codec = engine.store.codec.name
    return estimate(counted, costs, model.layout, codec, retrieval, config.c2kv)


def _noting_those_to_embed(documents: Iterable[Document], ids: set[str]) -> Iterator[Document]:
    for document in documents:
        if document.vector is None:
            ids.add(document.document_id)
        yield document


def measure_costs(
    engine: Engine,
    embedder: Embedder,
    counted: Survey,
    folder: Path,
    retrieval: RetrievalConfig,
    tell: OnStep = lambda _: None,
) -> Costs:
    """Build a little of the survey's sample into `engine` and `folder`, and ask it.

    Raises:
        ModelError, BudgetError, StoreError, SpanIndexError: see `estimate_store`.
    """
    on_gpu = engine.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(engine.model.device)
    tell("encoding a few batches")
    encoded, encode, headers = _encode(engine, counted.chunks)
    tell("filling a catalog")
    catalog, put_catalog = _fill_catalog(folder, counted.chunks)
    tell("embedding and indexing a few chunks")
    remembered = _Remembered(embedder)
    embedded, embed_chunks, embed_nuggets = _embed(remembered, counted.chunks)
    index, put_index = _fill_index(remembered, embedded, folder / "chroma")
    ram_bytes = _peak_bytes()  # before questions: full prefill needs more than building does
    gpu_bytes = torch.cuda.max_memory_allocated(engine.model.device) if on_gpu else None
    tell("asking with and without spans")
    full_ms, spans_ms, context_tokens = _ask(engine, encoded, retrieval)
    return Costs(
        encode=encode,
        headers=headers,
        embed_chunks=embed_chunks,
        embed_nuggets=embed_nuggets,
        put_index=put_index,
        put_catalog=put_catalog,
        catalog=catalog,
        index=index,
        vector_bytes=remembered.vector_bytes,
        ram_bytes=ram_bytes,
        gpu_bytes=gpu_bytes,
        full_ms=full_ms,
        spans_ms=spans_ms,
        context_tokens=context_tokens,
    )


@contextmanager
def _trial_folder(scratch: Path | None) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    try:
        made = tempfile.TemporaryDirectory(
            prefix="coinrag-trial-", dir=scratch, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise StoreError(
            f"cannot make a trial folder in {scratch or 'the temporary folder'}: {error}. Give a "
            "folder that can be written to"
        ) from error
    with made as name:
        yield Path(name)


def _encode(engine: Engine, sample: Sequence[Chunk]) -> tuple[list[Chunk], Pairs, dict[int, Pairs]]:
    """Chunks encoded and stored; seconds of each batch, and by ratio bytes of each file's header."""
    config = engine.config
    n_chunks = -(-_BATCHES * config.batch_tokens // config.chunk_tokens)
    by_length = sorted(sample[:n_chunks], key=len, reverse=True)  # as the engine does
    runs = [
        [by_length[i] for i in run] for run in batches(map(len, by_length), config.batch_tokens)
    ]
    for chunk, kv in engine.encode(runs[-1]):
        engine.store_chunk(chunk, kv)
    encoded: list[Chunk] = []
    encode = []
    started = begin = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:  # files are written while the next batch is computed
        writes: list[Future[None]] = []
        for run in runs:
            writes += [
                pool.submit(engine.store_chunk, *made, anew=True) for made in engine.encode(run)
            ]
            encoded += run
            is_last = run is runs[-1] or time.perf_counter() - started > _SECONDS
            if is_last:
                for write in writes:
                    write.result()
            now = time.perf_counter()
            encode.append((sum(map(len, run)), now - begin))
            begin = now
            if is_last:
                break
    _note(engine.catalog, encoded)
    headers: dict[int, Pairs] = {
        ratio: tuple((1, _header_bytes(engine.forms, chunk, ratio)) for chunk in encoded)
        for ratio in engine.forms.stores
    }
    return encoded, tuple(encode), headers


def _header_bytes(forms: ChunkForms, chunk: Chunk, ratio: int) -> int:
    """Bytes of a chunk's file besides its entries and their checksums."""
    store = forms.stores[ratio]
    n_entries = store.codec.n_entries(forms.covered(chunk, ratio))
    return store.path(chunk.chunk_id).stat().st_size - chunk_bytes(store.codec, n_entries)


def _fill_catalog(folder: Path, sample: Sequence[Chunk]) -> tuple[Growth, Pairs]:
    """How a catalog grows with tokens, and seconds to note so many documents."""
    seconds, sizes = [], []
    for part in (sample[: len(sample) // 2], sample):
        path = folder / f"catalog-{len(part)}.sqlite"
        with Catalog(path) as catalog:
            begin = time.perf_counter()
            n_documents = _note(catalog, part)
            seconds.append((n_documents, time.perf_counter() - begin))
        # The catalog is closed: nothing is in its log any more.
        sizes.append((sum(map(len, part)), path.stat().st_size))
    return _growth(sizes), tuple(seconds)


def _note(catalog: Catalog, chunks: Sequence[Chunk]) -> int:
    """Make documents of chunks known to a catalog; how many documents."""
    by_document: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_document.setdefault(chunk.document_id, []).append(chunk)
    for document_id, members in by_document.items():
        catalog.begin_document(document_id, _CONTENT, members)
        catalog.finish_document(document_id, _CONTENT)
    return len(by_document)


def _embed(embedder: _Remembered, sample: Sequence[Chunk]) -> tuple[list[Chunk], Pairs, Pairs]:
    """Chunks whose texts and nuggets are embedded; seconds for chunks' and for nuggets' texts."""
    embedder.embed_query(_QUESTION)  # loads it
    embedded: list[Chunk] = []
    chunks, nuggets = [], []
    started = time.perf_counter()
    for first in range(0, len(sample), _AT_ONCE):
        page = sample[first : first + _AT_ONCE]
        chunks.append((len(page), embedder.embed([chunk.text for chunk in page])))
        if texts := [nugget.text for chunk in page for nugget in chunk.nuggets]:
            nuggets.append((len(texts), embedder.embed(texts)))
        embedded += page
        if time.perf_counter() - started > _SECONDS:
            break
    return embedded, tuple(chunks), tuple(nuggets)


def _fill_index(embedder: Embedder, chunks: Sequence[Chunk], folder: Path) -> tuple[Growth, Pairs]:
    """How an index grows with rows, and seconds to put so many rows."""
    with closing(ChromaFolder.open(folder)) as chroma:
        return _put_pages(SpanIndex(chroma, embedder, "trial"), chunks, folder)


def _put_pages(index: SpanIndex, chunks: Sequence[Chunk], folder: Path) -> tuple[Growth, Pairs]:
    index.put(chunks[:1])
    put, sizes, n_rows = [], [(0, _folder_bytes(folder))], 0
    for first in range(0, len(chunks), _AT_ONCE):
        page = chunks[first : first + _AT_ONCE]
        rows = sum(1 + len(chunk.nuggets) for chunk in page)
        begin = time.perf_counter()
        index.put(page)
        put.append((rows, time.perf_counter() - begin))
        n_rows += rows
        sizes.append((n_rows, _folder_bytes(folder)))
        if n_rows > _MAX_ROWS:
            break
    return _growth((sizes[(len(sizes) - 1) // 2], sizes[-1])), tuple(put)


class _Remembered:
    """An embedder that is timed once for every text, and then knows its vector."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._vectors: dict[str, Vectors] = {}
        self.vector_bytes = 0

    @property
    def embedder_id(self) -> str:
        return self._embedder.embedder_id

    def embed(self, texts: Sequence[str]) -> float:
        """Embed texts; how many seconds it took."""
        begin = time.perf_counter()
        vectors = self._embedder.embed_documents(texts)
        seconds = time.perf_counter() - begin
        self._vectors |= zip(texts, vectors, strict=True)
        self.vector_bytes = vectors[0].nbytes
        return seconds

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        if missing := [text for text in texts if text not in self._vectors]:
            self.embed(missing)
        return np.stack([self._vectors[text] for text in texts])

    def embed_query(self, text: str) -> Vectors:
        return self._embedder.embed_query(text)


def _ask(
    engine: Engine, encoded: Sequence[Chunk], retrieval: RetrievalConfig
) -> tuple[Pairs, Pairs, int]:
    """TTFT of the same questions behind chunks and behind spans of them, and the chunks' tokens."""
    room = _room(engine)
    full_ms, spans_ms, contexts = [], [], []
    started = time.perf_counter()
    for round_, found in enumerate(draw_questions(encoded, retrieval, _WARM_UPS + _ROUNDS)):
        context = _that_fit(found.chunks, room)
        spans = _that_fit(found.refs("spans"), room)
        chunk_ids = [chunk.chunk_id for chunk in context]
        full = _ttft_ms(engine.stream_full(_QUESTION, chunk_ids, _ONE_TOKEN))
        ours = _ttft_ms(engine.stream(_QUESTION, spans, _ONE_TOKEN))
        late = time.perf_counter() - started > _SECONDS
        if round_ >= _WARM_UPS or late:
            full_ms.append((1, full))
            spans_ms.append((1, ours))
            contexts.append(sum(map(len, context)))
        if late:
            break
    return tuple(full_ms), tuple(spans_ms), round(float(np.mean(contexts)))


def _room(engine: Engine) -> int:
    """Tokens that can stand between the prompt and the question."""
    window, budget = engine.model.window, engine.config.max_entries
    before_answer = window - len(engine.prompt.tail(_QUESTION)) - _ONE_TOKEN.max_new_tokens
    return min(before_answer, window if budget is None else budget) - len(engine.prompt.head)


def _that_fit(items: Sequence[T], room: int) -> list[T]:
    """The first items, as many as there is room for their tokens."""
    ends = accumulate(map(len, items))
    return [item for item, end in zip(items, ends, strict=True) if end <= room]


def _ttft_ms(stream: AnswerStream) -> float:
    for _ in stream:
        pass
    return stream.answer.timings.ttft_ms


def _growth(sizes: Sequence[tuple[float, float]]) -> Growth:
    """From (items, bytes) at some point and later."""
    (few, small), (many, large) = sizes
    per_item = (large - small) / (many - few) if many > few else 0.0
    return Growth(n=many, n_bytes=large, per_item=per_item)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _peak_bytes() -> int:
    """The most memory this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # the others count kilobytes
