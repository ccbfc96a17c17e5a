"""Many processes may read a Chroma folder, or one may write to it; a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.retrieval import ChromaFolder, SpanIndex
from tests.engine.store.parts import PROCESSES
from tests.retrieval.parts import make_chunk
from tests.tiny import HashEmbedder

IN_USE = "is open in another process: wait until it has ended, or have a server keep the index"
WRITTEN = "is being written to: wait until it has ended"


def count(folder: ChromaFolder) -> int:
    return SpanIndex(folder, HashEmbedder()).counts()["chunks"]


def put(folder: ChromaFolder, name: str) -> None:
    index = SpanIndex(folder, HashEmbedder())
    with index.writing():
        index.put([make_chunk(f"some words on {name}", [name], name=name)])


def obey(path: Path, orders: Connection) -> None:
    """Do what the other end says, until it hangs up."""
    held = ExitStack()
    folder: ChromaFolder | None = None
    while True:
        order = orders.recv()
        try:
            answer: object = None
            if order == "open":
                folder = ChromaFolder.open(path)
            elif order == "write":
                held.enter_context(folder.writing())
            elif order == "stop writing":
                held.close()
            elif order == "close":
                folder.close()
            elif order == "count":
                answer = count(folder)
            else:
                put(folder, order)
            orders.send(answer)
        except SpanIndexError as error:
            orders.send(error)


class Other:
    """Another process that does with the folder what it is told."""

    def __init__(self, path: Path) -> None:
        self._orders, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=obey, args=(path, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, order: str) -> object:
        self._orders.send(order)
        answer = self._orders.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Other]]:
    """Makes other processes, and ends them with the test."""
    others: list[Other] = []

    def make(name: str = "chroma") -> Other:
        others.append(Other(tmp_path / name))
        return others[-1]

    yield make
    for other in others:
        other.process.kill()
        other.process.join()


@contextmanager
def opened(path: Path) -> Iterator[ChromaFolder]:
    folder = ChromaFolder.open(path)
    try:
        yield folder
    finally:
        folder.close()


def test_many_processes_may_read(tmp_path, start):
    with opened(tmp_path / "chroma") as ours:
        put(ours, "organ")
    others = [start(), start()]
    with opened(tmp_path / "chroma") as ours:
        for other in others:
            other("open")
        assert [count(ours), *(other("count") for other in others)] == [1, 1, 1]


def test_nobody_writes_while_another_process_reads(tmp_path, start):
    other = start()
    with opened(tmp_path / "chroma") as ours:
        other("open")
        with pytest.raises(SpanIndexError, match=IN_USE) as caught, ours.writing():
            pass
        assert str(tmp_path / "chroma ") in str(caught.value)
        # Whoever was refused goes on reading, and keeps others from writing.
        assert count(ours) == 0
        with pytest.raises(SpanIndexError, match=IN_USE):
            other("organ")
        other("close")
        put(ours, "organ")
        assert count(ours) == 1


def test_nobody_opens_what_another_process_writes_to(tmp_path, start):
    other = start()
    other("open")
    other("write")
    with pytest.raises(SpanIndexError, match=WRITTEN) as caught:
        ChromaFolder.open(tmp_path / "chroma")
    assert str(tmp_path / "chroma ") in str(caught.value)
    third = start()
    with pytest.raises(SpanIndexError, match=WRITTEN):
        third("open")
    other("stop writing")
    with opened(tmp_path / "chroma") as ours:
        third("open")
        assert count(ours) == third("count") == 0


def test_what_another_process_wrote_is_there_when_the_folder_is_opened_again(tmp_path, start):
    """Chroma keeps an index in memory: what this process had open must not stand in for what is."""
    with opened(tmp_path / "chroma") as ours:
        put(ours, "organ")
        assert count(ours) == 1
    other = start()
    other("open")
    other("mill")
    other("close")
    with opened(tmp_path / "chroma") as ours:
        assert count(ours) == 2
        index = SpanIndex(ours, HashEmbedder())
        assert {span.text for span in index.search("mill organ")} == {"mill", "organ"}
        put(ours, "pier")
    other("open")
    assert other("count") == 3


@pytest.mark.parametrize("doing", ["reading", "writing"])
def test_a_killed_process_holds_nothing(tmp_path, start, doing):
    other = start()
    other("open")
    if doing == "writing":
        other("write")
    other.kill()
    with opened(tmp_path / "chroma") as ours:
        put(ours, "organ")
        assert count(ours) == 1


def test_objects_of_one_process_share_what_it_holds(tmp_path, start):
    other, path = start(), tmp_path / "chroma"
    first, second = ChromaFolder.open(path), ChromaFolder.open(path)
    put(first, "organ")
    with first.writing(), second.writing():
        put(second, "mill")
        with pytest.raises(SpanIndexError, match=WRITTEN):
            other("open")
    assert count(first) == count(second) == 2
    other("open")
    other("close")
    first.close()
    first.close()
    assert count(second) == 2
    other("open")
    with pytest.raises(SpanIndexError, match=IN_USE):
        other("pier")
    second.close()
    other("pier")
    assert other("count") == 3


def test_threads_may_write_at_once_and_the_last_of_them_lets_others_in(tmp_path, start):
    other = start()
    with opened(tmp_path / "chroma") as ours:
        both, go_on = threading.Barrier(3, timeout=60), threading.Event()

        def write(name: str) -> None:
            with ours.writing():
                both.wait()
                go_on.wait(60)

        threads = [threading.Thread(target=write, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        both.wait()
        with pytest.raises(SpanIndexError, match=WRITTEN):
            other("open")
        go_on.set()
        for thread in threads:
            thread.join()
        other("open")


def test_the_folder_is_given_back_also_after_an_error(tmp_path, start):
    other = start()
    with opened(tmp_path / "chroma") as ours:
        with pytest.raises(ZeroDivisionError), ours.writing():
            raise ZeroDivisionError
        other("open")


def test_a_folder_that_cannot_be_opened_is_not_held(tmp_path, start):
    path = tmp_path / "chroma"
    path.write_text("not a folder")
    with pytest.raises(SpanIndexError, match="open Chroma in"):
        ChromaFolder.open(path)
    path.unlink()
    other = start()
    other("open")
    other("organ")


def test_a_folder_in_a_place_that_is_none_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpanIndexError, match="cannot open Chroma in"):
        ChromaFolder.open(tmp_path / "file" / "chroma")


def test_the_same_folder_by_another_name_is_the_same_folder(tmp_path, start, monkeypatch):
    other = start()
    other("open")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in (Path("chroma"), tmp_path / "link" / "chroma", tmp_path / "x" / ".." / "chroma"):
        with opened(name) as ours, pytest.raises(SpanIndexError, match=IN_USE), ours.writing():
            pass


def test_folders_whose_names_differ_behind_a_dot_are_two_folders(tmp_path, start):
    other = start("index.one")
    other("open")
    other("write")
    with opened(tmp_path / "index.two") as ours:
        assert count(ours) == 0


def test_nothing_of_a_lock_is_left_open_when_the_last_object_is_closed(tmp_path):
    def locks() -> list[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        names = [os.readlink(link) for link in links if link.is_symlink()]
        return [name for name in names if name.startswith(str(tmp_path))]

    folders = [ChromaFolder.open(tmp_path / "chroma") for _ in range(3)]
    assert any(name.endswith(".lock") for name in locks())
    for folder in folders:
        folder.close()
    assert not any(name.endswith(".lock") for name in locks())
