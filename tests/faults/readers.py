"""Many processes read while one writes: every read is right, or refused.

Twice, with another writer each time. First, chunk files alone (`KVStore.put` and `delete`), whose content
follows from the chunk's number and its turn, so that a reader knows what it may find without a model: one
of the states between the last that was finished before it began and the last that was begun before it
ended. Then the real thing: documents added, updated and deleted by `CoinRAG`, read by engines of other
processes, some of which encode anew what they miss. Readers open no Chroma: its folder belongs to the
writer.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from coinrag_integrations.engine import Engine, EngineConfig, LoadedModel
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.engine.store import KVStore
from coinrag_integrations.errors import ChunkNotFoundError, StoreError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Chunk, ChunkId, Document, Span, SpanRef
from tests.engine.store.parts import FINGERPRINT, chunk_id, make_kv
from tests.faults import Scale
from tests.faults.crash import warm
from tests.faults.workload import chunks_of, leftovers, refs_of
from tests.tiny import HashEmbedder, tiny_model

N_READERS = 8
SECONDS = {"short": 2.5, "full": 60.0}  # for each of the two
_FAULTS_SAID = 20


def run(scale: Scale) -> dict[str, Any]:
    """Read while another process writes: `readers_wrong` reads were neither right nor refused."""
    console = Console(stderr=True)
    n_wrong = 0
    for title, part in (("files", files), ("documents", documents)):
        with tempfile.TemporaryDirectory() as folder:
            tally = part(Path(folder), SECONDS[scale])
        console.print(
            f"readers of {title}: {tally.n_reads} reads, {tally.n_refused} refused, "
            f"{tally.n_writes} writes, {len(tally.faults)} wrong",
            soft_wrap=True,
        )
        for fault in tally.faults[:_FAULTS_SAID]:
            console.print(f"[{title}] {fault}", markup=False, highlight=False, soft_wrap=True)
        n_wrong += len(tally.faults)
    return {"readers_wrong": n_wrong}


@dataclasses.dataclass(slots=True)
class Tally:
    """What processes did; `faults` are reads that were neither right nor refused."""

    n_reads: int = 0
    n_refused: int = 0
    n_writes: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def __iadd__(self, other: Tally) -> Tally:
        self.n_reads += other.n_reads
        self.n_refused += other.n_refused
        self.n_writes += other.n_writes
        self.faults += other.faults
        return self


# -- processes -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """Shared between processes: the turn that was last begun, and last finished, of each item."""

    begun: NDArray[np.int64]
    finished: NDArray[np.int64]

    @classmethod
    def of(cls, n_items: int) -> Turns:
        """All at turn -1: nothing was begun."""
        memory = np.frombuffer(mmap.mmap(-1, 16 * n_items), dtype=np.int64)
        memory[:] = -1
        return cls(memory[:n_items], memory[n_items:])


Work = Callable[[Tally, Iterator[int]], None]


def _together(works: Sequence[Work], seconds: float) -> Tally:
    """Run `works` in processes of their own, each with numbers until it is time; add up what they did."""
    ready = Turns.of(len(works)).begun
    pipes, processes, total = [], [], Tally()
    for index, work in enumerate(works):
        read_end, write_end = os.pipe()
        process = os.fork()
        if process == 0:
            signal.alarm(int(seconds) + 120)
            tally = Tally()
            try:
                work(tally, _counting(ready, index, seconds))
            except BaseException:  # noqa: BLE001  (a fork must never go on as if it were its parent)
                tally.faults.append(traceback.format_exc()[-2000:])
            tally.faults = [fault[:2000] for fault in tally.faults[:100]]
            os.write(write_end, json.dumps(dataclasses.asdict(tally)).encode())
            os._exit(0)
        os.close(write_end)
        pipes.append(read_end)
        processes.append(process)
    for pipe, process in zip(pipes, processes, strict=True):
        with os.fdopen(pipe, "rb") as file:
            said = file.read()
        _, status = os.waitpid(process, 0)
        total += Tally(**json.loads(said)) if said else Tally(faults=[f"ended with {status}"])
    return total


@contextmanager
def _counted(tally: Tally) -> Iterator[None]:
    """Whatever is raised in the block is a fault; reading goes on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  (what is counted here)
        where = traceback.extract_tb(error.__traceback__)[-1]
        tally.faults.append(f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")


def _counting(ready: NDArray[np.int64], index: int, seconds: float) -> Iterator[int]:
    """Once all have got here: numbers until it is time, leaving the processors to others in between."""
    ready[index] = 1
    while (ready < 0).any():
        time.sleep(0.01)
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        yield number
        number += 1
        time.sleep(0.001)


def _starting_with(items: Sequence[int], beats: Iterator[int], rng: random.Random) -> Iterator[int]:
    """Every item once, before the others begin, then one of them at each beat."""
    yield from items
    for _ in beats:
        yield rng.choice(items)


# -- chunk files -----------------------------------------------------------------------------------

_LAYOUT = KVLayout(n_layers=4, n_kv_heads=2, head_dim=16, dtype=torch.float32)
IDS = [chunk_id(number) for number in range(40)]
_TOKENS = 24


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What is stored of a chunk after a turn: nothing, or `ranges` of kv [T, L, 2, H, D]."""

    kv: torch.Tensor
    ranges: tuple[Span, ...]

    @classmethod
    def at(cls, number: int, turn: int) -> State:
        """Every fifth turn deletes, the others store all tokens, or all but some."""
        if turn < 0 or turn % 5 == 4:
            return cls(make_kv(_TOKENS, _LAYOUT), ())
        ranges = (Span(0, _TOKENS),) if turn % 2 else (Span(0, 9), Span(11, _TOKENS))
        return cls(make_kv(_TOKENS, _LAYOUT, seed=1000 * turn + number), ranges)

    def __getitem__(self, ref: SpanRef) -> torch.Tensor | None:
        """What a span of it must be; None: it must be refused."""
        if not any(r.start <= ref.start and ref.stop <= r.stop for r in self.ranges):
            return None
        return self.kv[ref.start : ref.stop]


def open_store(folder: Path, memory_bytes: int = 0) -> KVStore:
    """The store that all processes share."""
    fingerprint = dataclasses.replace(FINGERPRINT, layout=str(_LAYOUT))
    return KVStore(folder / "kv", _LAYOUT, fingerprint, memory_bytes=memory_bytes)


def files(folder: Path, seconds: float) -> Tally:
    """One process puts and deletes chunk files, eight read them."""
    turns = Turns.of(len(IDS))

    def write(tally: Tally, beats: Iterator[int]) -> None:
        rng = random.Random(0)
        with open_store(folder) as store:
            for number in _starting_with(range(len(IDS)), beats, rng):
                turn = int(turns.begun[number]) + 1
                state = State.at(number, turn)
                turns.begun[number] = turn
                if state.ranges:
                    store.put(IDS[number], state.kv, state.ranges)
                else:
                    store.delete(IDS[number])
                turns.finished[number] = turn
                tally.n_writes += 1

    def reader(seed: int) -> Work:
        def look(tally: Tally, beats: Iterator[int]) -> None:
            os.nice(5)  # the writer has to get on
            rng = random.Random(seed)
            store = open_store(folder, memory_bytes=(seed % 2) * 100_000)
            for count in beats:
                if count % 200 == 199:
                    store.close()
                    store = open_store(folder, memory_bytes=(seed % 2) * 100_000)
                numbers = rng.sample(range(len(IDS)), rng.randint(1, 3))
                with _counted(tally):
                    if count % 50 == 49:
                        _list(store)
                    read_files(store, turns, numbers, tally, rng)
            store.close()

        return look

    return _together([write, *(reader(seed) for seed in range(N_READERS))], seconds)


def _list(store: KVStore) -> None:
    """Ask for everything at once while files come and go: nothing to compare, but nothing may fail."""
    there = list(store)
    if store.n_bytes() < 0 or any(i not in IDS for i in there):
        raise AssertionError("the store lists what nobody put there")
    with suppress(ChunkNotFoundError):
        store.header(IDS[0])


def read_files(
    store: KVStore, turns: Turns, numbers: Sequence[int], tally: Tally, rng: random.Random
) -> None:
    """Read a random span of each chunk, and compare with what its turns allow."""
    refs = []
    for number in numbers:
        start = rng.randrange(_TOKENS)
        refs.append(SpanRef(IDS[number], start, rng.randint(start + 1, _TOKENS)))
    first = [int(turns.finished[number]) for number in numbers]
    stage = store.stage(refs)
    report = store.read(stage)
    last = [int(turns.begun[number]) for number in numbers]
    for index, (number, ref) in enumerate(zip(numbers, refs, strict=True)):
        tally.n_reads += 1
        states = [State.at(number, turn)[ref] for turn in range(first[index], last[index] + 1)]
        error = report.errors.get(index)
        if error is None:
            found = stage.entries(slice(index, index + 1))
            if not any(s is not None and torch.equal(s, found) for s in states):
                tally.faults.append(f"{ref}: other bytes than turns {first[index]}..{last[index]}")
        elif isinstance(error, ChunkNotFoundError):
            if not any(state is None for state in states):
                tally.faults.append(f"{ref} of turns {first[index]}..{last[index]}: {error}")
        else:
            tally.n_refused += 1


# -- documents -------------------------------------------------------------------------------------

_CONFIG = EngineConfig(chunk_tokens=32, coverage="all", batch_tokens=1, load="read")
_NAMES = [f"doc{number}" for number in range(4)]
_VERSIONS = 3  # of each document; one more turn deletes it


def _version(name: str, version: int) -> Document:
    """The versions of a document share their first chunks."""
    text = f"The keeper of {name} counts {name[-1]}7 gulls before he lights the lamp at dusk. " * 2
    return Document(
        document_id=name, text=text + f"In year {version} he also counted {version}1 terns."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """A chunk of some version of a document, and what it composes to."""

    number: int
    chunk: Chunk
    refs: Sequence[SpanRef]
    prefix: torch.Tensor
    versions: frozenset[int]


def documents(folder: Path, seconds: float) -> Tally:
    """One process adds, updates and deletes documents, eight compose spans of them."""
    model, turns = tiny_model(), Turns.of(len(_NAMES))
    known = _known_apart(model, folder)

    def write(tally: Tally, beats: Iterator[int]) -> None:
        rng = random.Random(0)
        with _rag(model, folder / "store") as rag:
            for number in _starting_with(range(len(_NAMES)), beats, rng):
                turn = int(turns.begun[number]) + 1
                turns.begun[number] = turn
                if turn % (_VERSIONS + 1) == _VERSIONS:
                    rag.delete([_NAMES[number]])
                else:
                    rag.add([_version(_NAMES[number], turn % (_VERSIONS + 1))])
                turns.finished[number] = turn
                tally.n_writes += 1

    def reader(seed: int) -> Work:
        def look(tally: Tally, beats: Iterator[int]) -> None:
            os.nice(5)
            rng = random.Random(seed)
            config = dataclasses.replace(
                _CONFIG,
                on_miss="recompute" if seed % 4 == 3 else "raise",
                memory_bytes=(seed % 2) * 1_000_000,
            )
            with Engine(model, folder / "store", config) as engine:
                for _ in beats:
                    with _counted(tally):
                        _read_chunk(engine, turns, rng.choice(known), tally)

        return look

    def look_behind(tally: Tally, _: Iterator[int]) -> None:
        """Once everybody has ended: finish what is left to remove, and look for what is left."""
        with _rag(model, folder / "store") as rag:
            rag.delete(["nothing"])
            tally.faults += [finding.what for finding in leftovers(rag, folder / "store")]

    tally = _together([write, *(reader(seed) for seed in range(N_READERS))], seconds)
    tally += _together([look_behind], 60.0)
    return tally


def _read_chunk(engine: Engine, turns: Turns, it: Known, tally: Tally) -> None:
    tally.n_reads += 1
    first = int(turns.finished[it.number])
    text = prefix = error = None
    try:
        text = engine.catalog.chunk(it.chunk.chunk_id).text
    except StoreError as refusal:
        error = refusal
    try:
        prefix = engine.compose(it.refs)[0].kv
    except StoreError as refusal:
        error = refusal
    last = int(turns.begun[it.number])
    there = {turn % (_VERSIONS + 1) in it.versions for turn in range(max(first, 0), last + 1)}
    if first < 0:
        there.add(False)
    if error is not None:
        tally.n_refused += 1
        if False not in there:
            tally.faults.append(
                f"{it.chunk.document_id} of turns {first}..{last} is there: {error}"
            )
    if text not in (None, it.chunk.text):
        tally.faults.append(f"{it.chunk.document_id}: other text than was added: {text!r}")
    if prefix is not None and not torch.equal(prefix, it.prefix):
        tally.faults.append(f"{it.chunk.document_id}: other KV than its tokens give")
    if (text is not None or prefix is not None) and True not in there:
        tally.faults.append(f"{it.chunk.document_id} of turns {first}..{last} is gone, and is read")


def _known_apart(model: LoadedModel, folder: Path) -> list[Known]:
    """Every chunk of every version, as a store that nobody else uses composes it. In a process of its
    own, so that none of its threads are in this one when it forks."""
    path = folder / "known.pt"

    def work(_: Tally, __: Iterator[int]) -> None:
        with _rag(model, folder / "apart") as rag:
            torch.save((list(_known(rag).values()), list(sys.modules)), path)

    if faults := _together([work], 60.0).faults:
        raise AssertionError(faults)
    known, modules = torch.load(path, weights_only=False)
    warm(modules, model)
    return list(known)


def _known(rag: CoinRAG) -> Mapping[ChunkId, Known]:
    found: dict[ChunkId, Known] = {}
    for version in range(_VERSIONS):
        rag.add(_version(name, version) for name in _NAMES)
        for number, name in enumerate(_NAMES):
            for chunk in chunks_of(rag, _version(name, version)):
                before = found[chunk.chunk_id].versions if chunk.chunk_id in found else frozenset()
                refs = refs_of(rag, chunk)
                prefix = rag.engine.compose(refs)[0].kv
                found[chunk.chunk_id] = Known(number, chunk, refs, prefix, before | {version})
    return found


def _rag(model: LoadedModel, folder: Path) -> CoinRAG:
    return CoinRAG.open(folder, model=model, embedder=HashEmbedder(), config=_CONFIG)
