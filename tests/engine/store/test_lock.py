"""One process writes a store at a time; who it is, is said; a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coinrag_integrations.engine.store.lock import writing
from coinrag_integrations.errors import StoreError

HOLD = """
import sys, time
from pathlib import Path
from coinrag_integrations.engine.store.lock import writing
with writing(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that writes to the store in `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_writer_is_refused_and_told_who_writes(holder, tmp_path):
    with (
        pytest.raises(StoreError, match=rf"being written to by process {holder.pid}: wait"),
        writing(tmp_path),
    ):
        pass


def test_a_killed_writer_holds_nothing(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
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
        with engine.store.writing():
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
    with engine.store.writing(), refused, engine.store.writing():
        pass
    with engine.store.writing():
        pass
