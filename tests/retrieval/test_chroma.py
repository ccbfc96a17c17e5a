"""Chroma in memory, in a folder and behind HTTP; its failures become ours."""

from __future__ import annotations

import chromadb.errors
import httpx
import pytest

from coinrag_integrations.errors import ConfigError, SpanIndexError
from coinrag_integrations.retrieval import RetrievalConfig, SpanIndex, open_client
from coinrag_integrations.retrieval.chroma import clean_metadata, guard, pages
from tests.chroma_server import free_port
from tests.retrieval.parts import make_chunk
from tests.tiny import HashEmbedder

CHUNKS = [
    make_chunk("The organ was built of copper pipes", ["built of copper pipes"], name="organ"),
    make_chunk("The mill ground rye until 1951", ["ground rye", "until 1951"], name="mill"),
    make_chunk("A plain passage on nothing", name="plain", metadata={"page": 4}),
]
WIDE = RetrievalConfig(n_chunks=9, n_nuggets=99)


def test_a_folder_keeps_its_rows_for_the_next_client(tmp_path):
    from chromadb.api.shared_system_client import SharedSystemClient

    first = SpanIndex(open_client(tmp_path), HashEmbedder())
    first.put(CHUNKS)
    expected = first.search("copper rye", WIDE)
    SharedSystemClient.clear_system_cache()
    second = SpanIndex(open_client(tmp_path), HashEmbedder())
    assert second.counts() == {"chunks": 3, "nuggets": 3}
    assert second.search("copper rye", WIDE) == expected
    second.delete([CHUNKS[0].chunk_id])
    assert second.counts() == {"chunks": 2, "nuggets": 2}


def test_a_file_in_the_place_of_the_folder_is_an_error_of_ours(tmp_path):
    (tmp_path / "chroma").write_text("not a folder")
    with pytest.raises(SpanIndexError, match="open Chroma in"):
        open_client(tmp_path / "chroma")


@pytest.mark.parametrize("address", ["http://", "https://:8000"])
def test_an_address_without_a_host_is_refused(address):
    with pytest.raises(ConfigError, match="no address of a Chroma server"):
        open_client(address)


@pytest.mark.parametrize("address", ["http://host:port", "http://host:99999"])
def test_an_address_with_a_wrong_port_is_refused_by_an_error_of_ours(address):
    with pytest.raises((ConfigError, SpanIndexError)):
        open_client(address)


def test_a_server_that_is_not_there_is_named_with_the_command_to_start_it():
    port = free_port()
    with pytest.raises(SpanIndexError, match=rf"is it running \(chroma run --port {port}\)"):
        open_client(f"http://127.0.0.1:{port}")


def test_a_server_finds_what_memory_finds_and_its_end_is_an_error_of_ours(server):
    address, stop = server
    remote = SpanIndex(open_client(address), HashEmbedder(), "remote")
    local = SpanIndex(open_client(None), HashEmbedder(), f"local{free_port()}")
    for index in (remote, local):
        index.put(CHUNKS)
        index.put(CHUNKS[1:])
        index.delete([CHUNKS[0].chunk_id])
        index.put(CHUNKS[:1])
    assert remote.counts() == local.counts() == {"chunks": 3, "nuggets": 3}
    ours, theirs = remote.search("copper rye", WIDE), local.search("copper rye", WIDE)
    assert [(s.ref, s.text, s.metadata) for s in ours] == [
        (s.ref, s.text, s.metadata) for s in theirs
    ]
    assert [s.score for s in ours] == pytest.approx([s.score for s in theirs], abs=1e-5)
    again = SpanIndex(open_client(address), HashEmbedder(), "remote")
    assert again.counts() == remote.counts()
    stop()
    actions = [
        lambda: remote.search("copper"),
        lambda: remote.search_chunks("copper", 2),
        lambda: remote.put(CHUNKS),
        lambda: remote.delete([CHUNKS[0].chunk_id]),
        remote.counts,
    ]
    for action in actions:
        with pytest.raises(SpanIndexError):
            action()


@pytest.mark.parametrize(
    "error",
    [
        chromadb.errors.InvalidArgumentError("x"),
        chromadb.errors.NotFoundError("x"),
        chromadb.errors.InternalError("x"),
        httpx.ConnectError("x"),
        httpx.ReadTimeout("x"),
        ValueError("x"),
        OSError("x"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_what_chroma_raises_becomes_an_error_of_ours_with_its_cause(error):
    message = rf"cannot count rows \({type(error).__name__}"
    with pytest.raises(SpanIndexError, match=message) as it, guard("count rows"):
        raise error
    assert it.value.__cause__ is error


def test_an_interruption_is_not_translated():
    with pytest.raises(KeyboardInterrupt), guard("count rows"):
        raise KeyboardInterrupt


def test_pages_hold_every_item_once_and_at_most_so_many():
    assert [list(p) for p in pages(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(pages([], 3)) == []


def test_clean_metadata_are_scalars_and_lists_of_one_type():
    value = {"a": 1, "b": 1.5, "c": "x", "d": True, "e": None}
    assert clean_metadata(value) == {"a": 1, "b": 1.5, "c": "x", "d": True}
    for bad in (float("nan"), float("inf"), [], {}, (), b"x", 1 << 63, -(1 << 63) - 1):
        with pytest.raises(SpanIndexError, match="metadata 'k' is"):
            clean_metadata({"k": bad})
    for bad in ([1, "a"], [1, 2.0], [True, 1], [None], [float("nan")], [1 << 63], [[1]], [{}]):
        with pytest.raises(SpanIndexError, match="metadata 'k' is"):
            clean_metadata({"k": bad})
    for good in ((1 << 63) - 1, ["a"], [1, 2], [1.5], [True, False]):
        assert clean_metadata({"k": good}) == {"k": good}
