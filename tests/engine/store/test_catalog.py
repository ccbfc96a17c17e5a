"""Texts come back as they were put; a file that is no catalog, or another's, is an error of ours."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.store import Catalog
from coinrag_integrations.errors import ChunkNotFoundError, FingerprintMismatchError, StoreError
from coinrag_integrations.types import Chunk, ChunkId, Nugget, Span
from tests.engine.store.parts import chunk_id

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
SCALARS = st.one_of(TEXTS, st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False))


@st.composite
def chunks(draw) -> Chunk:
    n = draw(st.integers(1, 9))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))
    ends = sorted(draw(st.lists(st.integers(0, 10**6), min_size=n, max_size=n)))
    nuggets = draw(
        st.lists(
            st.builds(
                lambda text, a, b, match, share: Nugget(
                    text=text,
                    span=Span(a, a + b),
                    char_start=a,
                    char_stop=a + b,
                    match=match,
                    similarity=share,
                ),
                TEXTS,
                st.integers(0, 99),
                st.integers(1, 9),
                st.sampled_from(["exact", "fuzzy"]),
                st.floats(0, 1),
            ),
            max_size=3,
        )
    )
    name = draw(st.uuids())
    return Chunk(
        chunk_id=chunk_id(name),
        document_id=draw(st.sampled_from(["doc", "παράδειγμα", "a/b'c\"d"])),
        index=draw(st.integers(0, 10**6)),
        text=draw(TEXTS),
        char_start=draw(st.integers(0, 10**9)),
        token_ids=tuple(ids),
        offsets=tuple((max(e - 1, 0), e) for e in ends),
        nuggets=tuple(nuggets),
        metadata=draw(st.dictionaries(TEXTS, SCALARS, max_size=3)),
    )


def chunk(document_id: str, index: int, **options: object) -> Chunk:
    return Chunk(
        chunk_id=chunk_id((document_id, index)),
        document_id=document_id,
        index=index,
        text="text",
        char_start=0,
        token_ids=(1, 2),
        offsets=((0, 2), (2, 4)),
        **options,
    )


@pytest.fixture
def catalog(tmp_path):
    with Catalog(tmp_path / "catalog.sqlite") as it:
        yield it


def put(catalog: Catalog, chunks: Sequence[Chunk], content: str = "0") -> None:
    """Begin and finish a version of every document that has chunks here."""
    for document_id in dict.fromkeys(c.document_id for c in chunks):
        own = [c for c in chunks if c.document_id == document_id]
        catalog.begin_document(document_id, content, own)
        catalog.finish_document(document_id, content)


@settings(deadline=None, max_examples=30)
@given(drawn=st.lists(chunks(), max_size=4))
def test_chunks_come_back_as_they_were_put_also_after_reopening(drawn, tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "catalog.sqlite"
    seen: Counter[str] = Counter()
    many = []
    for each in drawn:
        many.append(replace(each, index=seen[each.document_id]))
        seen[each.document_id] += 1
    with Catalog(path) as catalog:
        for document_id in seen:
            own = [c for c in many if c.document_id == document_id]
            catalog.begin_document(document_id, "0", own)
        assert [catalog.chunk(c.chunk_id) for c in many] == many
        assert catalog.counts() == {"documents": 0, "chunks": 0}
        assert list(catalog.chunks()) == []
        for document_id in seen:
            catalog.finish_document(document_id, "0")
    with Catalog(path) as catalog:
        assert [catalog.chunk(c.chunk_id) for c in many] == many
        assert list(catalog.chunks()) == sorted(
            many, key=lambda c: (c.document_id.encode(), c.index)
        )
        assert catalog.counts() == {"documents": len(seen), "chunks": len(many)}


def test_an_unknown_chunk_is_not_found(catalog):
    with pytest.raises(ChunkNotFoundError, match="not in the catalog"):
        catalog.chunk(ChunkId("nothing"))


def test_all_chunks_are_listed_by_document_and_position_over_many_pages(catalog):
    many = [chunk(f"d{d}", i) for d in range(3) for i in range(250)]
    for document_id in ("d2", "d0", "d1"):
        put(catalog, [c for c in many if c.document_id == document_id])
    assert list(catalog.chunks()) == many
    assert catalog.chunk_ids("d1") == [c.chunk_id for c in many[250:500]]


def test_beginning_a_version_again_replaces_it(catalog):
    put(catalog, [chunk("d", 0), chunk("d", 1)])
    changed = replace(chunk("d", 0), metadata={"title": "new"})
    put(catalog, [changed])
    assert list(catalog.chunks()) == [changed]
    assert catalog.garbage() == [chunk("d", 1).chunk_id]


def test_a_document_is_there_between_finishing_and_deleting(catalog):
    catalog.begin_document("d", "hash", [chunk("d", 0)])
    assert catalog.content("d") is None
    assert catalog.documents() == []
    assert catalog.is_begun("d")
    catalog.finish_document("d", "hash")
    assert catalog.content("d") == "hash"
    assert catalog.documents() == ["d"]
    assert not catalog.is_begun("d")
    catalog.begin_document("d", "other", [chunk("d", 0)])
    assert catalog.content("d") == "hash"
    catalog.finish_document("d", "other")
    assert catalog.content("d") == "other"
    assert catalog.chunk_ids("d") == [chunk("d", 0).chunk_id]
    assert catalog.delete_document("d")
    assert catalog.content("d") is None
    assert catalog.chunk_ids("d") == []
    assert not catalog.delete_document("d")


def test_deleted_chunks_are_gone_and_known_as_garbage_until_they_are_purged(catalog):
    put(catalog, [chunk(name, i) for name in "de" for i in range(3)])
    catalog.delete_document("d")
    gone = [chunk("d", i).chunk_id for i in range(3)]
    assert [c.document_id for c in catalog.chunks()] == ["e"] * 3
    assert sorted(catalog.garbage()) == sorted(gone)
    with pytest.raises(ChunkNotFoundError):
        catalog.chunk(gone[0])
    catalog.purge([gone[1], ChunkId("unknown")])
    assert sorted(catalog.garbage()) == sorted([gone[0], gone[2]])
    catalog.purge(gone)
    assert catalog.garbage() == []


def test_texts_that_look_like_sql_are_texts(catalog):
    evil = "x'); DROP TABLE chunks; --"
    put(catalog, [replace(chunk(evil, 0), text=evil)], content=evil)
    catalog.pin([evil])
    assert catalog.pins() == [evil]
    assert catalog.content(evil) == evil
    assert catalog.chunk_ids(evil) == [chunk(evil, 0).chunk_id]
    assert catalog.chunk(chunk(evil, 0).chunk_id).text == evil


def test_more_ids_than_a_query_can_hold_are_looked_up(catalog):
    put(catalog, [chunk("d", i) for i in range(3)])
    live = [chunk("d", i).chunk_id for i in range(3)]
    unknown = [ChunkId(f"{i:032x}") for i in range(40_000)]
    assert catalog.live([*live, *unknown, *live]) == set(live)
    assert catalog.live([]) == set()


NOTES = {"tenant": "a", "collection": "main", "tokenizer": "t" * 64}


@pytest.mark.parametrize("name", NOTES)
def test_a_catalog_made_for_something_else_is_refused_and_what_is_named(tmp_path, name):
    path = tmp_path / "catalog.sqlite"
    Catalog(path, expected=NOTES).close()
    with pytest.raises(FingerprintMismatchError, match=rf"made for {name} .*, not for 'other'"):
        Catalog(path, expected={**NOTES, name: "other"})
    with Catalog(path, expected=NOTES) as same, Catalog(path) as any_of_them:
        assert same.documents() == any_of_them.documents() == []


def test_notes_that_an_old_catalog_lacks_are_added_to_it(tmp_path):
    path = tmp_path / "catalog.sqlite"
    Catalog(path).close()
    Catalog(path, expected=NOTES).close()
    with pytest.raises(FingerprintMismatchError, match="tenant"):
        Catalog(path, expected={"tenant": "b"})


def test_a_catalog_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "catalog.sqlite"
    Catalog(path).close()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    with pytest.raises(FingerprintMismatchError, match="schema '99'"):
        Catalog(path)


def test_compacting_gives_space_back_and_keeps_everything(catalog):
    kept = replace(chunk("kept", 0), text="kept " * 1000)
    put(catalog, [*(replace(chunk("d", i), text="x" * 4000) for i in range(200)), kept])
    catalog.pin(["kept"])
    catalog.delete_document("d")
    catalog.purge(catalog.garbage())
    catalog.compact()
    assert catalog.path.stat().st_size < 200 * 4000 // 4
    assert list(catalog.chunks()) == [kept]
    assert (catalog.pins(), catalog.garbage()) == (["kept"], [])
    assert catalog.check_integrity() == []


def test_a_damaged_catalog_is_found(tmp_path):
    path = tmp_path / "catalog.sqlite"
    with Catalog(path) as catalog:
        put(catalog, [replace(chunk("d", i), text="x" * 4000) for i in range(50)])
        catalog.compact()
        assert catalog.check_integrity() == []
    data = bytearray(path.read_bytes())
    for at in range(8 * 4096, 20 * 4096):
        data[at] ^= 0x5A
    path.write_bytes(bytes(data))
    with Catalog(path) as catalog, suppress(StoreError):  # too damaged to be looked at is said too
        assert catalog.check_integrity() != []


@pytest.mark.parametrize("content", [b"not a database at all, no", b"\0" * 5000])
def test_a_file_that_is_no_catalog_is_an_error_of_the_store(tmp_path, content):
    path = tmp_path / "catalog.sqlite"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=str(path)):
        Catalog(path)


def test_a_folder_that_is_not_there_is_an_error_of_the_store(tmp_path):
    with pytest.raises(StoreError, match="cannot use the catalog"):
        Catalog(tmp_path / "nowhere" / "catalog.sqlite")


def test_a_closed_catalog_is_an_error_of_the_store(tmp_path):
    catalog = Catalog(tmp_path / "catalog.sqlite")
    catalog.close()
    with pytest.raises(StoreError):
        catalog.counts()


def test_many_threads_may_use_one_catalog(catalog):
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for i in range(20):
                catalog.begin_document(name, str(i), [chunk(name, j) for j in range(i + 1)])
                assert catalog.chunk(chunk(name, i).chunk_id).document_id == name
                catalog.finish_document(name, str(i))
                assert catalog.content(name) == str(i)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(f"d{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert catalog.counts() == {"documents": 6, "chunks": 120}
