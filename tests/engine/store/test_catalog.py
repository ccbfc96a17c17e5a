from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coinrag_integrations.engine.store import Catalog
from coinrag_integrations.errors import ChunkNotFoundError, StoreError
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


@settings(deadline=None, max_examples=40)
@given(many=st.lists(chunks(), max_size=4))
def test_chunks_come_back_as_they_were_put_also_after_reopening(many, tmp_path_factory):
    path = tmp_path_factory.mktemp("c") / "catalog.sqlite"
    with Catalog(path) as catalog:
        catalog.put_chunks(many)
        assert [catalog.chunk(c.chunk_id) for c in many] == many
    with Catalog(path) as catalog:
        assert [catalog.chunk(c.chunk_id) for c in many] == many
        assert {c.chunk_id for c in catalog.chunks()} == {c.chunk_id for c in many}
        assert catalog.counts() == {"documents": 0, "chunks": len(many)}


def test_an_unknown_chunk_is_not_found(catalog):
    with pytest.raises(ChunkNotFoundError, match="not in the catalog"):
        catalog.chunk(ChunkId("nothing"))


def test_all_chunks_are_listed_by_document_and_position_over_many_pages(catalog):
    many = [chunk(f"d{d}", i) for d in range(3) for i in range(250)]
    catalog.put_chunks(many[::-1])
    assert list(catalog.chunks()) == many
    assert catalog.chunk_ids("d1") == [c.chunk_id for c in many[250:500]]


def test_putting_a_chunk_again_replaces_it(catalog):
    catalog.put_chunks([chunk("d", 0)])
    changed = replace(chunk("d", 0), metadata={"title": "new"})
    catalog.put_chunks([changed])
    assert list(catalog.chunks()) == [changed]


def test_a_document_is_complete_between_finishing_and_forgetting(catalog):
    catalog.put_chunks([chunk("d", 0)])
    assert catalog.content("d") is None
    assert catalog.documents() == []
    catalog.finish_document("d", "hash", 1)
    assert catalog.content("d") == "hash"
    assert catalog.documents() == ["d"]
    catalog.finish_document("d", "other", 1)
    assert catalog.content("d") == "other"
    catalog.forget_document("d")
    assert catalog.content("d") is None
    assert catalog.chunk_ids("d") == [chunk("d", 0).chunk_id]


def test_deleted_chunks_are_gone_and_unknown_ids_are_ignored(catalog):
    catalog.put_chunks([chunk("d", i) for i in range(3)])
    catalog.delete_chunks([chunk("d", 1).chunk_id, ChunkId("unknown")])
    assert [c.index for c in catalog.chunks()] == [0, 2]


def test_texts_that_look_like_sql_are_texts(catalog):
    evil = "x'); DROP TABLE chunks; --"
    catalog.put_chunks([replace(chunk(evil, 0), text=evil)])
    assert catalog.chunk_ids(evil) == [chunk(evil, 0).chunk_id]
    assert catalog.chunk(chunk(evil, 0).chunk_id).text == evil


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
                catalog.put_chunks([chunk(name, i)])
                assert catalog.chunk(chunk(name, i).chunk_id).document_id == name
                catalog.finish_document(name, str(i), i)
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
