"""One process writes a store at a time; who it is, is said; a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from coinrag_integrations.engine.store import Disk
from coinrag_integrations.engine.store.lock import writing
from coinrag_integrations.errors import StoreError
from tests.engine.store.parts import PROCESSES


def hold(root: Path, told: Connection) -> None:
    with writing(root):
        told.send("held")
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to the store in `tmp_path`."""
    ours, theirs = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert ours.recv() == "held"
    yield process
    process.kill()
    process.join()


def test_a_second_writer_is_refused_and_told_who_writes(holder, tmp_path):
    with (
        pytest.raises(StoreError, match=rf"being written to by process {holder.pid}: wait"),
        writing(tmp_path),
    ):
        pass


@pytest.mark.parametrize("note", [None, b"", b"\xff\xfe"])
def test_a_writer_whose_note_is_gone_or_not_yet_written_refuses_all_the_same(
    holder, tmp_path, note, monkeypatch
):
    """It may end, and take its note with it, between any two steps of ours."""
    path = tmp_path / ".writer.pid"
    if note is not None:
        path.write_bytes(note)
    else:
        read = Path.read_text

        def too_late(self: Path, *arguments: object, **options: object) -> str:
            if self == path:
                path.unlink()
            return read(self, *arguments, **options)

        monkeypatch.setattr(Path, "read_text", too_late)
    with pytest.raises(StoreError, match="being written to by process"), writing(tmp_path):
        pass


def test_a_killed_writer_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.join()
    assert holder.exitcode == -signal.SIGKILL
    with writing(tmp_path):
        assert Path(tmp_path, ".writer.pid").read_text() == str(os.getpid())


def test_the_lock_is_given_back_also_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path):
        raise ZeroDivisionError
    with writing(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    nowhere = tmp_path / "file" / "store"
    with pytest.raises(StoreError, match="cannot write to the store"), writing(nowhere):
        pass


def test_threads_of_one_store_wait_for_each_other(engine):
    inside, most = [], []

    def work():
        with engine.disk.writing():
            inside.append(1)
            most.append(len(inside))
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_writing_while_writing_is_refused_and_does_not_hang(engine):
    refused = pytest.raises(StoreError, match=f"by process {os.getpid()}: wait")
    with engine.disk.writing(), refused, engine.disk.writing():
        pass
    with engine.disk.writing():
        pass


def test_another_writer_is_waited_for(holder, tmp_path):
    """It ends while we wait: its lock is ours then."""
    threading.Timer(0.3, holder.kill).start()
    with writing(tmp_path, wait_seconds=60):
        assert Path(tmp_path, ".writer.pid").read_text() == str(os.getpid())


def test_whether_writing_is_possible_now_is_said_and_not_waited_for(engine):
    with engine.disk.if_free() as free:
        assert free
    with engine.disk.writing(), engine.disk.if_free() as free:
        assert not free
    with engine.disk.if_free() as outer, engine.disk.if_free() as inner:
        assert (outer, inner) == (True, False)
    with engine.disk.writing():
        pass


def test_nobody_is_free_to_write_beside_another_process(holder, tmp_path):
    disk = Disk(tmp_path)
    with disk.if_free() as free:
        assert not free
    with pytest.raises(StoreError, match=f"by process {holder.pid}"), disk.writing():
        pass
    holder.kill()
    holder.join()
    with disk.if_free() as free:
        assert free
