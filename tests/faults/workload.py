"""What the crash test does to a store, and what a store must hold afterwards.

A workload is a list of steps; each says what it changes and how. The documents that must be there after
any of them follow from that, so another step is one more entry of `STEPS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from coinrag_integrations.engine import EngineConfig, GenerationConfig, LoadedModel
from coinrag_integrations.engine.config import Coverage
from coinrag_integrations.errors import ChunkNotFoundError, CoinRAGError, StoreError
from coinrag_integrations.nuggets import extract_nuggets
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig
from coinrag_integrations.types import Chunk, ChunkId, Document, ScoredSpan, SpanRef
from tests.tiny import TEXT, HashEmbedder

Documents = Mapping[str, Document]
Act = Callable[[CoinRAG], object]

_ALL = RetrievalConfig(n_chunks=1000, n_nuggets=1000)
_SHORT = GenerationConfig(max_new_tokens=2)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One thing done to a store: `changes` gives documents their new version, None deletes them."""

    name: str
    act: Act
    changes: Mapping[str, Document | None]

    def after(self, documents: Documents) -> Documents:
        """The documents once it is done."""
        changed = {**documents, **self.changes}
        return {name: document for name, document in changed.items() if document is not None}


def add(name: str, *documents: Document) -> Step:
    """Add, update, or add again, in one call."""
    return Step(name, lambda rag: rag.add(documents), {d.document_id: d for d in documents})


def delete(name: str, *document_ids: str) -> Step:
    """Delete, in one call."""
    return Step(name, lambda rag: rag.delete(document_ids), dict.fromkeys(document_ids))


def upkeep(name: str, act: Act) -> Step:
    """Whatever must not change what the store answers: collecting garbage, converting, evicting."""
    return Step(name, act, {})


ORGAN = Document(document_id="organ", text=TEXT * 2, metadata={"title": "Organ"})
MILL = Document(document_id="mill", text="The mill of Tarsk ground 40 tons of rye a day. " * 3)
PIER = Document(document_id="pier", text="Ines Caldero painted the pier green in 1951.")
LAMP = Document(
    document_id="lamp", text="The lamp on Skerry Voss burns 12 litres of whale oil a night."
)
CHOIR = Document(
    document_id="choir", text="A choir of 31 bakers sings in Oule on Fridays. It has no hall."
)
GULL = Document(
    document_id="gull", text="Gulls of Marenqué steal 7 herrings a day from the fish market."
)
ORGAN_LONGER = dataclasses.replace(
    ORGAN, text=ORGAN.text + "It fell silent in 1990, after a storm."
)
MILL_NEW = dataclasses.replace(
    MILL, text="A new mill stands in Osk since 2004 and grinds only spelt. " * 2
)
PIER_TITLED = dataclasses.replace(PIER, metadata={"title": "Pier"})  # the same chunks

STEPS: tuple[Step, ...] = (
    add("build", ORGAN, MILL, PIER),
    add("build more", LAMP, CHOIR),
    add("add again, unchanged", ORGAN, MILL),
    add("update one that shares chunks", ORGAN_LONGER),
    add("update two others", MILL_NEW, PIER_TITLED),
    delete("delete one", "choir"),
    add("add it again", CHOIR),
    delete("delete two", "lamp", "pier"),
    add("add one, undo an update", GULL, ORGAN),
)


def states(steps: Sequence[Step] = STEPS) -> tuple[Documents, ...]:
    """The documents before the first step and after each: one more than there are steps."""
    found: list[Documents] = [{}]
    for step in steps:
        found.append(step.after(found[-1]))
    return tuple(found)


def open_rag(folder: Path, model: LoadedModel, coverage: Coverage) -> CoinRAG:
    """The store in `folder`, with its own Chroma database, and slots beside the entries.

    One chunk a batch: a chunk's KV depends in its last bits on what it was padded with, and the test
    compares bits.
    """
    config = EngineConfig(
        chunk_tokens=32, coverage=coverage, c2kv=(4,), batch_tokens=1, load="read"
    )
    return CoinRAG.open(
        folder, model=model, embedder=HashEmbedder(), config=config, extractor="untrained"
    )


# -- what must be there ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A fault: a document that is "lost", or something "wrong" of it (bytes, text, a leak)."""

    kind: Literal["lost", "wrong"]
    document_id: str
    what: str


Prefixes = Mapping[ChunkId, torch.Tensor]


def chunks_of(rag: CoinRAG, document: Document) -> tuple[Chunk, ...]:
    """What the store should hold of a document."""
    return tuple(extract_nuggets(c, rag.proposer) for c in rag.engine.chunk(document))


def refs_of(rag: CoinRAG, chunk: Chunk) -> list[SpanRef]:
    """Every stored token of a chunk, and all of its slots."""
    covered = [chunk.ref(span) for span in rag.engine.covered(chunk)]
    return [*covered, *(dataclasses.replace(chunk.ref(), ratio=k) for k in rag.engine.config.c2kv)]


def record(rag: CoinRAG, documents: Documents) -> dict[ChunkId, torch.Tensor]:
    """The prefix [L, 2, 1, H, N, D] of each chunk's stored entries, read and encoded anew: the same.

    Of a store that nothing happened to: this is what the others are compared with.
    """
    found: dict[ChunkId, torch.Tensor] = {}
    for chunk in (c for d in documents.values() for c in chunks_of(rag, d)):
        refs = refs_of(rag, chunk)
        read, recomputed = rag.engine.compose(refs)
        for store in rag.engine.forms.stores.values():
            store.delete(chunk.chunk_id)
        fresh, again = rag.engine.compose(refs)
        apart = float((read.kv - fresh.kv).abs().max())
        if recomputed or len(again) < len(refs) or apart:
            raise AssertionError(
                f"{chunk.text!r}: what is stored is {apart} from what is encoded; recomputed were "
                f"{recomputed}, without its file {again}"
            )
        found[chunk.chunk_id] = read.kv
    return found


def examine(
    rag: CoinRAG, before: Documents, after: Documents, prefixes: Prefixes
) -> Iterator[Finding]:
    """What is wrong with a store in which a step was interrupted that leads from `before` to `after`.

    A document that the step leaves alone must be there, whole; one that it changes may be there in
    either version, but in one of them whole; of all others nothing may be found. `prefixes` holds what
    each chunk of every version must compose to.
    """
    seen = Seen.of(rag)
    present: set[ChunkId] = set()
    for name in sorted({*before, *after, *seen.names}):
        old, new = before.get(name), after.get(name)
        versions = [chunks_of(rag, d) if d else () for d in (old, new)]
        faults = [list(_document(rag, seen, name, chunks, prefixes)) for chunks in versions]
        present |= {c.chunk_id for chunks in versions for c in chunks}
        if old == new:
            yield from faults[0]
        elif all(faults):
            yield from (_either(faults[0], "old"), _either(faults[1], "new"))
    yield from _hits(rag, seen.hits)  # last: what cannot be read is mended
    yield from _gone(rag, prefixes.keys() - present)
    question = next((d.text for name, d in before.items() if after.get(name) == d), None)
    if question is not None:
        yield from _ask(rag, question)


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What retrieval finds when it is asked for every chunk and every nugget."""

    hits: tuple[ScoredSpan, ...]

    @classmethod
    def of(cls, rag: CoinRAG) -> Seen:
        """Ask for everything."""
        asked = (rag.retrieve("pier", mode, _ALL) for mode in ("chunk", "coinrag"))
        return cls(tuple(hit for hits in asked for hit in hits))

    @property
    def names(self) -> set[str]:
        """Ids of the documents that were found."""
        return {hit.document_id for hit in self.hits}

    def spans(self, name: str) -> set[SpanRef]:
        """What was found of a document."""
        return {hit.ref for hit in self.hits if hit.document_id == name}

    def chunk_ids(self, name: str) -> set[ChunkId]:
        """The chunks that were found of a document."""
        return {ref.chunk_id for ref in self.spans(name)}


def _hits(rag: CoinRAG, hits: Sequence[ScoredSpan]) -> Iterator[Finding]:
    """Hits that say something else than their chunk, or that cannot be resolved."""
    for hit in hits:
        try:
            chunk = rag.engine.catalog.chunk(hit.ref.chunk_id)
            rag.engine.compose([hit.ref])
        except CoinRAGError as error:
            yield Finding("wrong", hit.document_id, f"hit {hit.ref}: {error}")
            continue
        start, stop = hit.char_start - chunk.char_start, hit.char_stop - chunk.char_start
        if (chunk.text[start:stop], chunk.document_id) != (hit.text, hit.document_id):
            yield Finding("wrong", hit.document_id, f"hit {hit.ref} says {hit.text!r}")


def _document(
    rag: CoinRAG, seen: Seen, name: str, chunks: Sequence[Chunk], prefixes: Prefixes
) -> Iterator[Finding]:
    """What is wrong with a document that should consist of `chunks`, and of nothing else."""
    ids = [chunk.chunk_id for chunk in chunks]
    if extra := seen.chunk_ids(name) - set(ids):
        yield Finding("wrong", name, f"retrieval finds {len(extra)} chunks of another version")
    if not chunks:
        if rag.engine.catalog.content(name) is not None or rag.engine.catalog.chunk_ids(name):
            yield Finding("wrong", name, "the catalog lists a document that is not there")
        return
    if rag.engine.catalog.content(name) is None:
        yield Finding("lost", name, "the catalog does not list it")
    if rag.engine.catalog.chunk_ids(name) != ids:
        yield Finding("lost", name, "the catalog lists other chunks")
    if missing := set(ids) - seen.chunk_ids(name):
        yield Finding("lost", name, f"retrieval does not find {len(missing)} of {len(ids)} chunks")
    wanted = {c.ref(n.span) for c in chunks for n in c.nuggets}
    if missed := wanted - seen.spans(name):
        yield Finding("lost", name, f"retrieval does not find {len(missed)} nuggets")
    if not any(hit.document_id == name for hit in rag.retrieve(chunks[0].text)):
        yield Finding("lost", name, f"retrieval does not find it by its words {chunks[0].text!r}")
    for chunk in chunks:
        yield from _chunk(rag, chunk, prefixes)


def _chunk(rag: CoinRAG, chunk: Chunk, prefixes: Prefixes) -> Iterator[Finding]:
    name, known = chunk.document_id, f"chunk {chunk.index}"
    try:
        if rag.engine.catalog.chunk(chunk.chunk_id) != chunk:
            yield Finding("wrong", name, f"the catalog has another {known}")
        prefix, recomputed = rag.engine.compose(refs_of(rag, chunk))
    except CoinRAGError as error:
        yield Finding("lost", name, f"{known} cannot be resolved: {error}")
        return
    if recomputed:
        yield Finding("lost", name, f"the KV of {known} is not there or not right")
    if not torch.equal(prefix.kv, prefixes[chunk.chunk_id]):
        yield Finding("wrong", name, f"{known} has other KV than its tokens give")


def _gone(rag: CoinRAG, chunk_ids: set[ChunkId]) -> Iterator[Finding]:
    """Chunks that must not be there: neither their text nor their KV can be had."""
    for chunk_id in sorted(chunk_ids):
        try:
            chunk = rag.engine.catalog.chunk(chunk_id)
        except ChunkNotFoundError:
            pass
        else:
            yield Finding("wrong", chunk.document_id, f"deleted text resolves: {chunk.text!r}")
        try:
            rag.engine.compose([SpanRef(chunk_id, 0, 1)])
        except StoreError:
            continue
        yield Finding("wrong", chunk_id, "KV of a deleted chunk can be composed")


def _ask(rag: CoinRAG, question: str) -> Iterator[Finding]:
    reply = rag.ask(question, generation=_SHORT)
    if not reply.spans or reply.answer.usage.generated == 0:
        yield Finding("lost", "", f"no answer to {question!r:.60}")


def _either(faults: Sequence[Finding], version: str) -> Finding:
    """All that keeps a changed document from being whole in one of its versions."""
    kind = "wrong" if all(fault.kind == "wrong" for fault in faults) else "lost"
    what = "; ".join(dict.fromkeys(fault.what for fault in faults))
    return Finding(kind, faults[0].document_id, f"not whole in its {version} version: {what}")


def leftovers(rag: CoinRAG, folder: Path) -> Iterator[Finding]:
    """Files and rows that belong to no document, once everything is finished."""
    chunks = list(rag.engine.catalog.chunks())
    stores = rag.engine.forms.stores.values()
    known = {store.path(chunk.chunk_id) for chunk in chunks for store in stores}
    files = [path for path in folder.rglob("*") if path.is_file()]
    ours = {path for path in files if path.suffix == ".safetensors"}
    for path in sorted(ours - known):
        yield Finding("wrong", "", f"a file without a catalog row: {path.relative_to(folder)}")
    for path in sorted(known - ours):
        yield Finding("lost", "", f"a catalog row without a file: {path.relative_to(folder)}")
    for path in sorted(path for path in files if ".tmp" in path.name):
        yield Finding("wrong", "", f"left behind: {path.relative_to(folder)}")
    rows = {"chunks": len(chunks), "nuggets": sum(len(c.nuggets) for c in chunks)}
    if rag.index.counts() != rows:
        yield Finding("wrong", "", f"the index has {rag.index.counts()}, the catalog {rows}")
