"""What belongs to another tenant or collection is not there: not its chunks, texts, KV, rows or counts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine import EngineConfig, GenerationConfig
from coinrag_integrations.engine.store import Catalog
from coinrag_integrations.errors import (
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    FingerprintMismatchError,
)
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig, SpanIndex, open_client
from coinrag_integrations.types import ChunkId, Document, Scope, SpanRef
from tests.engine.store.parts import poisoned
from tests.test_types import names
from tests.tiny import TEXT, HashEmbedder, supported_model

SHORT = GenerationConfig(max_new_tokens=4)
ALL = RetrievalConfig(n_chunks=100, n_nuggets=1000)
QUESTION = "Who built the tidal organ from copper pipes?"
# The same ids, and the same texts but for one.
COMMON = [
    Document(document_id="organ", text=TEXT),
    Document(document_id="mill", text="The mill of Tarsk ground 40 tons of rye in 1951. " * 3),
]
OURS = Document(document_id="secret", text="Ines Caldero painted the pier green for 300 crowns.")
THEIRS = Document(
    document_id="secret", text="The vault of Osk opens to whoever hums the tidal organ."
)

PAIRS = [
    ({"tenant": "a"}, {"tenant": "b"}),
    ({"tenant": "a", "collection": "x"}, {"tenant": "a", "collection": "y"}),
    ({"tenant": "a", "collection": "b"}, {"tenant": "b", "collection": "a"}),
    ({"tenant": "a"}, {"tenant": "a-main", "collection": "main"}),
]


def open_rag(folder: Path, *, on_miss: str = "recompute", **scope: str) -> CoinRAG:
    config = EngineConfig(
        chunk_tokens=16, coverage="all", batch_tokens=1, load="read", on_miss=on_miss
    )
    return CoinRAG.open(
        folder,
        model=supported_model("llama"),
        embedder=HashEmbedder(),
        config=config,
        generation=SHORT,
        retrieval=ALL,
        **scope,
    )


@pytest.fixture(params=PAIRS, ids=str)
def both(request, tmp_path) -> Iterator[tuple[CoinRAG, CoinRAG]]:
    """Two scopes of one store, filled and open at once."""
    ours, theirs = (open_rag(tmp_path, **scope) for scope in request.param)
    with ours, theirs:
        ours.add([*COMMON, OURS])
        theirs.add([*COMMON, THEIRS])
        yield ours, theirs


def ids(rag: CoinRAG) -> set[ChunkId]:
    return {chunk.chunk_id for chunk in rag.engine.catalog.chunks()}


def files(rag: CoinRAG) -> dict[Path, tuple[int, int, bytes]]:
    """Every KV file of a scope with its inode, time of change and bytes."""
    paths = [rag.engine.store.path(it) for it in rag.engine.store]
    return {p: (p.stat().st_ino, p.stat().st_mtime_ns, p.read_bytes()) for p in paths}


def state(rag: CoinRAG) -> dict[str, object]:
    """All that a scope holds, and what it answers."""
    return {
        "files": files(rag),
        "chunks": list(rag.engine.catalog.chunks()),
        "pins": rag.engine.catalog.pins(),
        "rows": rag.index.ids(),
        "counts": (rag.engine.catalog.counts(), rag.index.counts()),
        "spans": rag.retrieve(QUESTION),
        "answer": rag.ask(QUESTION).text,
    }


def test_chunks_of_the_same_texts_have_ids_of_their_own(both):
    ours, theirs = both
    assert len(ids(ours)) > 3
    assert not ids(ours) & ids(theirs)
    texts = {c.text for c in ours.engine.catalog.chunks()}
    assert len(texts & {c.text for c in theirs.engine.catalog.chunks()}) >= 3


@pytest.mark.parametrize("on_miss", ["recompute", "raise"])
def test_nothing_of_the_other_can_be_resolved_read_or_computed(tmp_path, on_miss):
    with (
        open_rag(tmp_path, on_miss=on_miss, tenant="a") as ours,
        open_rag(tmp_path, tenant="b") as theirs,
    ):
        ours.add(COMMON)
        theirs.add(COMMON)
        other = sorted(ids(theirs))
        engine = ours.engine
        assert engine.catalog.live([*other, *ids(ours)]) == ids(ours)
        for it in other:
            ref = SpanRef(it, 0, 2)
            assert it not in engine.store
            assert isinstance(
                engine.store.read(poisoned(engine.store, [ref])).errors[0], ChunkNotFoundError
            )
            for use in (
                engine.catalog.chunk,
                engine.store.header,
                engine.store.verify,
                lambda it: engine.answer(QUESTION, [SpanRef(it, 0, 2)]),
                lambda it: engine.compose([SpanRef(it, 0, 2)]),
                lambda it: engine.stream_full(QUESTION, [it]),
            ):
                with pytest.raises(ChunkNotFoundError):
                    use(it)
            assert not engine.store.delete(it)
            engine.remove_chunk(it)
        assert all(it in theirs.engine.store for it in other)


def test_nothing_of_the_other_is_found_counted_or_listed(both):
    for ours, theirs, secret in ((*both, OURS), (*both[::-1], THEIRS)):
        for mode in ("coinrag", "chunk"):
            found = ours.retrieve("vault Osk hums pier painted crowns", mode, ALL)
            assert {span.ref.chunk_id for span in found} == ids(ours)
            text = "".join(span.text for span in found)
            assert ("vault" in text, "pier green" in text) == (secret == THEIRS, secret == OURS)
        n = len(ids(ours))
        assert ours.engine.catalog.counts() == {"documents": 3, "chunks": n}
        assert set(ours.engine.store) == ids(ours) == ours.index.ids()[0]
        assert ours.index.counts()["chunks"] == n
        assert not ours.index.ids()[1] & ids(theirs)
        assert ours.engine.store.n_bytes() == sum(len(it[2]) for it in files(ours).values())


def test_answers_are_those_of_a_store_of_ones_own(both, tmp_path_factory):
    """With one span: equal scores are ordered by ids, and these differ."""
    best = RetrievalConfig(n_chunks=1, n_nuggets=1)
    for rag, secret in zip(both, (OURS, THEIRS), strict=True):
        with open_rag(tmp_path_factory.mktemp("alone")) as alone:
            alone.add([*COMMON, secret])
            found, expected = (it.ask(QUESTION, retrieval=best) for it in (rag, alone))
            assert found.text == expected.text
            assert _texts(found.spans) == _texts(expected.spans)
            assert _texts(rag.retrieve(QUESTION)) == _texts(alone.retrieve(QUESTION))


def _texts(spans) -> list[tuple[float, str]]:
    return sorted((round(span.score, 5), span.text) for span in spans)


def test_whatever_happens_in_one_the_other_is_whole(both):
    ours, theirs = both
    before = state(theirs)
    ours.pin(["organ"])
    ours.add([Document(document_id="organ", text="Something else entirely. " * 9)])
    assert state(theirs) == before
    assert ours.delete(["organ", "mill", "secret", "unknown"]) == 3
    assert (ids(ours), ours.retrieve(QUESTION), files(ours)) == (set(), [], {})
    assert state(theirs) == before
    assert theirs.ask(QUESTION).answer.recomputed == ()
    assert ours.add([*COMMON, OURS]).n_encoded > 0
    assert state(theirs) == before


def test_a_scope_is_found_again_and_a_new_one_is_empty(both, tmp_path):
    ours, _ = both
    scope = ours.engine.scope
    with open_rag(tmp_path, tenant=scope.tenant, collection=scope.collection) as again:
        assert ids(again) == ids(ours)
        assert again.retrieve(QUESTION) == ours.retrieve(QUESTION)
    with open_rag(tmp_path, tenant="nobody") as empty:
        assert empty.retrieve(QUESTION) == []
        assert empty.engine.catalog.counts() == {"documents": 0, "chunks": 0}
        assert empty.ask(QUESTION).answer.usage.cached == 0


def test_a_catalog_that_was_carried_into_another_scope_is_refused(tmp_path):
    with open_rag(tmp_path, tenant="a") as ours, open_rag(tmp_path, tenant="b") as theirs:
        ours.add(COMMON)
        source, target = ours.engine.catalog.path, theirs.engine.catalog.path
    with Catalog(source) as catalog:
        catalog.compact()
    shutil.copy(source, target)
    with pytest.raises(FingerprintMismatchError, match="made for tenant 'a', not for 'b'"):
        open_rag(tmp_path, tenant="b")


def test_a_kv_file_that_was_carried_into_another_scope_is_not_used(tmp_path):
    with open_rag(tmp_path, tenant="a") as ours, open_rag(tmp_path, tenant="b") as theirs:
        ours.add(COMMON)
        theirs.add(COMMON)
        mine, other = sorted(ids(ours))[0], sorted(ids(theirs))[0]
        shutil.copy(theirs.engine.store.path(other), ours.engine.store.path(mine))
        with pytest.raises(CorruptChunkError, match="chunk_id"):
            ours.engine.store.header(mine)
        # Under its own name nobody asks for it: its text is not in our catalog.
        stray = ours.engine.store.path(other)
        stray.parent.mkdir(exist_ok=True)
        shutil.copy(theirs.engine.store.path(other), stray)
        assert ours.engine.catalog.live([other]) == set()
        assert other not in {s.ref.chunk_id for s in ours.retrieve(QUESTION, "chunk", ALL)}


@pytest.mark.parametrize("kind", ["tenant", "collection"])
@pytest.mark.parametrize("name", ["..", "../b", "a/../b", "/tmp", "", "B", "b.main", "b\0", "b/"])
def test_names_with_tricks_are_refused_before_anything_is_made(tmp_path, kind, name):
    with pytest.raises(ConfigError, match=f"the {kind} "):
        open_rag(tmp_path / "store", **{kind: name})
    assert list(tmp_path.iterdir()) == []


def test_ids_of_documents_are_no_paths(tmp_path):
    evil = ["../../b", "/etc/passwd", "..", "a/b", "tenants/b/main"]
    with open_rag(tmp_path, tenant="a") as ours, open_rag(tmp_path, tenant="b") as theirs:
        theirs.add(COMMON)
        before = state(theirs)
        ours.add(
            Document(document_id=name, text=f"A text on number {i}.") for i, name in enumerate(evil)
        )
        assert ours.engine.catalog.documents() == sorted(evil)
        assert ours.delete(evil) == len(evil)
        assert state(theirs) == before


@settings(deadline=None, max_examples=25)
@given(
    scopes=st.lists(
        st.builds(lambda t, c: Scope(tenant=t, collection=c), names, names),
        min_size=2,
        max_size=3,
        unique=True,
    )
)
def test_chroma_takes_the_name_of_every_scope_and_keeps_them_apart(scopes):
    client = open_client(None)
    before = {it.name for it in client.list_collections()}
    indexes = [SpanIndex(client, HashEmbedder(), f"coinrag.{scope}") for scope in scopes]
    made = {it.name for it in client.list_collections()} - before
    assert len(made) == 2 * len(indexes)
    for name in made:
        client.delete_collection(name)


def test_the_longest_names_are_taken(tmp_path):
    longest = "a" + 46 * "-" + "z"
    with open_rag(tmp_path, tenant=longest, collection=longest) as rag:
        rag.add(COMMON)
        assert rag.ask(QUESTION).spans
    with closing(Catalog(rag.engine.catalog.path)) as catalog:
        assert catalog.documents() == ["mill", "organ"]
