"""Law: a document is there in the version that was finished last, whole, whatever else was begun.

A catalog is driven at random beside plain sets and dictionaries that say what it must hold.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coinrag_integrations.engine.store import Catalog
from coinrag_integrations.engine.store.catalog import pinned_chunks
from coinrag_integrations.errors import ChunkNotFoundError
from coinrag_integrations.types import Chunk, ChunkId
from tests.engine.store.parts import chunk_id

DOCUMENTS = ("a", "b")
# What a version's content says is in it: which of the document's chunks, in which order.
VERSIONS = {"v0": (0, 1, 2), "v1": (0, 1, 3), "v2": (4, 0), "v3": (), "v4": (5,)}
documents, contents = st.sampled_from(DOCUMENTS), st.sampled_from(sorted(VERSIONS))


def id_of(document_id: str, number: int) -> ChunkId:
    return chunk_id((document_id, number))


def ids_of(document_id: str, content: str | None) -> list[ChunkId]:
    numbers = () if content is None else VERSIONS[content]
    return [id_of(document_id, number) for number in numbers]


def chunks_of(document_id: str, content: str) -> list[Chunk]:
    return [
        Chunk(
            chunk_id=each,
            document_id=document_id,
            index=index,
            text=f"{content}:{index}",
            char_start=0,
            token_ids=(1,),
            offsets=((0, 1),),
            metadata={"version": content},
        )
        for index, each in enumerate(ids_of(document_id, content))
    ]


EVERYTHING = {id_of(d, n) for d in DOCUMENTS for numbers in VERSIONS.values() for n in numbers}


class Versions(RuleBasedStateMachine):
    """One catalog that writes, another connection that only reads, and what both must say."""

    finished: dict[str, str]
    begun: dict[str, str]
    removed: set[ChunkId]
    pinned: set[str]

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name, "catalog.sqlite")
        self.catalog, self.reader = Catalog(self.path), Catalog(self.path)
        self.finished, self.begun, self.removed, self.pinned = {}, {}, set(), set()
        self.add("a", "v0")
        self.add("b", "v1")

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.catalog.close()
            self.reader.close()
            self.folder.cleanup()

    def gone(self, document_id: str, content: str | None) -> None:
        self.removed |= set(ids_of(document_id, content))

    # -- what may happen -----------------------------------------------------------------------

    @rule(document_id=documents, one=contents, another=contents)
    def begin_and_change_ones_mind(self, document_id: str, one: str, another: str) -> None:
        self.begin(document_id, one)
        self.begin(document_id, another)

    @rule(document_id=documents, content=contents)
    def begin(self, document_id: str, content: str) -> None:
        self.catalog.begin_document(document_id, content, chunks_of(document_id, content))
        self.gone(document_id, self.begun.pop(document_id, None))
        if self.finished.get(document_id) == content:
            self.gone(document_id, content)  # its rows are written anew
        else:
            self.begun[document_id] = content

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.do_finish(data.draw(st.sampled_from(sorted(self.begun))))

    def do_finish(self, document_id: str) -> None:
        content = self.begun.pop(document_id)
        self.catalog.finish_document(document_id, content)
        self.gone(document_id, self.finished.get(document_id))
        self.finished[document_id] = content

    @rule(document_id=documents, content=contents)
    def add(self, document_id: str, content: str) -> None:
        self.begin(document_id, content)
        if document_id in self.begun:
            self.do_finish(document_id)

    @rule(document_id=documents)
    def delete(self, document_id: str) -> None:
        assert self.catalog.delete_document(document_id) == (document_id in self.finished)
        self.gone(document_id, self.finished.pop(document_id, None))
        self.gone(document_id, self.begun.pop(document_id, None))
        self.pinned.discard(document_id)

    @rule()
    def forget_begun(self) -> None:
        self.catalog.forget_begun()
        for document_id, content in self.begun.items():
            self.gone(document_id, content)
        self.begun = {}

    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        garbage = sorted(self.catalog.garbage())
        some = data.draw(st.lists(st.sampled_from(garbage), unique=True)) if garbage else []
        self.catalog.purge([*some, ChunkId("unknown")])
        self.removed -= set(some)

    @rule(some=st.sets(documents), pinned=st.booleans())
    def pin(self, some: set[str], pinned: bool) -> None:
        self.catalog.pin(some, pinned=pinned)
        self.pinned = self.pinned | some if pinned else self.pinned - some

    @rule(compact=st.booleans())
    def open_again(self, compact: bool) -> None:
        if compact:
            self.catalog.compact()
        self.catalog.close()
        self.catalog = Catalog(self.path)

    # -- what must hold at every moment --------------------------------------------------------

    def live(self, among: Iterable[str] = DOCUMENTS) -> set[ChunkId]:
        return {i for d in among for i in ids_of(d, self.finished.get(d))}

    @invariant()
    def finished_versions_are_there_and_nothing_else(self) -> None:
        for catalog in (self.catalog, self.reader):
            assert catalog.documents() == sorted(self.finished)
            assert catalog.pins() == sorted(self.pinned)
            listed = [c for d in sorted(self.finished) for c in chunks_of(d, self.finished[d])]
            assert list(catalog.chunks()) == listed
            assert catalog.live(EVERYTHING) == self.live() == {c.chunk_id for c in listed}
            assert catalog.counts() == {"documents": len(self.finished), "chunks": len(listed)}
            for document_id in DOCUMENTS:
                content = self.finished.get(document_id)
                assert catalog.content(document_id) == content
                assert catalog.chunk_ids(document_id) == ids_of(document_id, content)

    @invariant()
    def a_version_that_is_begun_is_known_by_its_chunks(self) -> None:
        for document_id in DOCUMENTS:
            begun = ids_of(document_id, self.begun.get(document_id))
            assert self.catalog.is_begun(document_id) == bool(begun)
        n_begun = sum(bool(ids_of(d, content)) for d, content in self.begun.items())
        assert self.catalog.n_begun() == n_begun

    @invariant()
    def a_chunk_is_found_in_the_finished_version_first_and_then_in_the_begun_one(self) -> None:
        for document_id in DOCUMENTS:
            finished, begun = self.finished.get(document_id), self.begun.get(document_id)
            for each in {id_of(document_id, n) for n in range(6)}:
                inside = [v for v in (finished, begun) if each in ids_of(document_id, v)]
                if inside:
                    assert self.reader.chunk(each).metadata == {"version": inside[0]}
                else:
                    with pytest.raises(ChunkNotFoundError):
                        self.reader.chunk(each)

    @invariant()
    def garbage_is_what_was_removed_and_is_in_no_version(self) -> None:
        begun = {i for d, content in self.begun.items() for i in ids_of(d, content)}
        assert set(self.catalog.garbage()) == self.removed - self.live() - begun

    @invariant()
    def the_chunks_of_pinned_documents_are_pinned(self) -> None:
        assert pinned_chunks(self.path) == self.live(self.pinned)


Versions.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
TestVersions = Versions.TestCase


def test_there_is_nothing_pinned_where_there_is_no_catalog(tmp_path):
    assert pinned_chunks(tmp_path / "catalog.sqlite") == set()
    assert not (tmp_path / "catalog.sqlite").exists()
