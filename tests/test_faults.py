"""No crash loses a document, no damaged byte is used, no reader sees half a write: the short form.

`python -m tests.faults` does the same at full scale. The suite itself is tested first: the shim dies where
it is told to, and what is broken on purpose is found.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pytest

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.rag import CoinRAG
from tests.faults import crash, flips, readers, workload
from tests.faults.workload import CHOIR, LAMP, MILL, MILL_NEW, Documents, examine, leftovers

THERE: Documents = {"mill": MILL, "lamp": LAMP}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return crash.build_shim(tmp_path_factory.mktemp("shim"))
    except crash.NoCompilerError as error:
        pytest.skip(str(error))


def figures(*parts: str) -> dict[str, int]:
    """The suite forks: it gets a process that has no threads yet."""
    command = [sys.executable, "-m", "tests.faults", "--short", *parts]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1])


# -- the suite itself ------------------------------------------------------------------------------

_WRITER = """
import ctypes, os, sys
shim, folder, copies, at, how = sys.argv[1:]
path = os.path.join(folder, "a")
shim = ctypes.CDLL(shim)
shim.faults_arm(folder.encode(), ctypes.c_long(int(at)), int(how), 1, 1, copies.encode())
file = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT)  # 1
os.write(file, b"12345678")                              # 2
os.fsync(file)                                           # 3
os.write(file, b"90")                                    # 4
os.rename(path + ".tmp", path)                           # 5
open("/dev/null", "wb").write(b"not counted")
os.unlink(path)                                          # 6
print("alive", flush=True)
"""


def die(shim: Path, folder: Path, at: int, how: crash.How) -> tuple[list[str], dict[str, bytes]]:
    """What a process says that dies at its `at`-th change of a folder, and what the folder holds then."""
    store, copies = folder / "store", folder / "copies"
    store.mkdir()
    copies.mkdir()
    arguments = [str(shim), str(store), str(copies), str(at), str(crash.HOWS.index(how))]
    done = subprocess.run(
        [sys.executable, "-S", "-c", _WRITER, *arguments],
        env={"LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == -9) == ("alive" not in done.stdout), done
    return done.stdout.splitlines(), {path.name: path.read_bytes() for path in store.iterdir()}


@pytest.mark.parametrize(
    ("at", "how", "left"),
    [
        (1, "before", {}),
        (1, "after", {"a.tmp": b""}),
        (2, "before", {"a.tmp": b""}),
        (2, "torn", {"a.tmp": b"1234"}),
        (2, "after", {"a.tmp": b"12345678"}),
        (5, "before", {"a.tmp": b"1234567890"}),
        (5, "after", {"a": b"1234567890"}),
        (6, "torn", {"a": b"1234567890"}),
        (7, "before", {}),
    ],
)
def test_a_process_dies_where_it_is_told_to(
    shim: Path, tmp_path: Path, at: int, how: crash.How, left: dict[str, bytes]
) -> None:
    said, found = die(shim, tmp_path, at, how)
    assert found == left
    calls = ["open", "write", "fsync", "write", "rename", "unlink"]
    assert [line.split()[1] for line in said if line[0].isdigit()] == calls[: min(at, 6)]


def test_the_shim_knows_what_was_synced(shim: Path, tmp_path: Path) -> None:
    said, found = die(shim, tmp_path, 5, "after")
    dirty = [line.split()[1] for line in said if line.startswith("dirty")]
    assert found == {"a": b"1234567890"}
    assert dirty == [str((tmp_path / "store" / "a").stat().st_ino)]
    assert (tmp_path / "copies" / dirty[0]).read_bytes() == b"12345678"


def test_points_are_spread_over_all_changes_over_the_vectors_and_over_ours() -> None:
    changes = [f"{n} pwrite /chroma/chroma.sqlite3" for n in range(1, 1001)]
    changes[400:410] = [f"{n} rename /store.json" for n in range(401, 411)]
    vectors = f"/chroma/{UUID(int=7)}/data_level0.bin"
    changes[700:705] = [f"{n} fflush {vectors}" for n in range(701, 706)]
    arms = [arms[0] for arms in crash.choose(changes, 40, random.Random(0))]
    assert {arm.at for arm in arms} >= {*range(401, 411), *range(701, 706)}
    assert {arm.how for arm in arms} == set(crash.HOWS)
    assert all(arm.how != "torn" for arm in arms if "write" not in changes[arm.at - 1])
    others = [arm.at for arm in arms if "sqlite" in changes[arm.at - 1]]
    assert max(b - a for a, b in pairwise([0, *others, 1000])) <= 2 * 1000 / len(others)


@pytest.fixture
def rag(model: LoadedModel, tmp_path: Path) -> CoinRAG:
    with workload.open_rag(tmp_path / "store", model, "nuggets") as it:
        it.add(THERE.values())
        yield it


def sabotage_kv(rag: CoinRAG) -> None:
    rag.engine.store.delete(rag.engine.catalog.chunk_ids("mill")[1])


def sabotage_bytes(rag: CoinRAG) -> None:
    path = rag.engine.store.path(rag.engine.catalog.chunk_ids("mill")[1])
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def sabotage_index(rag: CoinRAG) -> None:
    rag.index.delete(rag.engine.catalog.chunk_ids("mill")[1:2])


def sabotage_document(rag: CoinRAG) -> None:
    rag.delete(["mill"])


def sabotage_version(rag: CoinRAG) -> None:
    rag.add([MILL_NEW])


def sabotage_stranger(rag: CoinRAG) -> None:
    rag.add([CHOIR])


@pytest.mark.parametrize(
    ("sabotage", "kinds"),
    [
        (sabotage_kv, {"lost"}),
        (sabotage_bytes, {"lost"}),
        (sabotage_index, {"lost"}),
        (sabotage_document, {"lost"}),
        (sabotage_version, {"lost", "wrong"}),
        (sabotage_stranger, {"wrong"}),
    ],
)
def test_what_is_broken_is_found(
    rag: CoinRAG, sabotage: Callable[[CoinRAG], None], kinds: set[str]
) -> None:
    prefixes = {**workload.record(rag, THERE)}
    assert not list(examine(rag, THERE, THERE, prefixes))
    sabotage(rag)
    assert {finding.kind for finding in examine(rag, THERE, THERE, prefixes)} == kinds


def test_a_changed_document_may_be_old_or_new_but_not_in_parts(rag: CoinRAG) -> None:
    after = {**THERE, "mill": MILL_NEW}
    prefixes = workload.record(rag, THERE)
    assert not list(examine(rag, THERE, after, prefixes))
    rag.add([MILL_NEW])
    prefixes |= workload.record(rag, after)
    assert not list(examine(rag, THERE, after, prefixes))
    rag.index.delete(rag.engine.catalog.chunk_ids("mill")[:1])
    found = list(examine(rag, THERE, after, prefixes))
    assert {(finding.kind, finding.document_id) for finding in found} == {("lost", "mill")}


def test_leftovers_are_found(rag: CoinRAG, tmp_path: Path) -> None:
    assert not list(leftovers(rag, tmp_path / "store"))
    own = rag.engine.store.path(rag.engine.catalog.chunk_ids("mill")[0])
    own.with_name(f"{'0' * 32}.safetensors").write_bytes(own.read_bytes())
    own.with_name(".tmpAbCdEf").write_bytes(b"")
    own.unlink()
    assert len(list(leftovers(rag, tmp_path / "store"))) == 3


def test_a_file_of_other_content_is_found(model: LoadedModel, tmp_path: Path) -> None:
    config = flips.CONFIGS[0]
    targets, _ = flips.build(model, tmp_path / "store", tmp_path / "other", config)
    with flips.open_engine(model, tmp_path / "store", config, "raise") as warm:
        assert not list(flips.examine(warm, targets[0], targets[0].content))
        chunk = warm.catalog.chunk(targets[0].refs[0].chunk_id)
        _, forms = next(iter(warm.encode([chunk])))
        warm.store_chunk(chunk, {1: forms[1] + 1})  # checksums and all
        wrong = targets[0].path.read_bytes()
        assert any("has other KV" in fault for fault in flips.examine(warm, targets[0], wrong))


def test_a_reader_that_sees_another_turn_is_found(tmp_path: Path) -> None:
    turns, tally = readers.Turns.of(len(readers.IDS)), readers.Tally()
    with readers.open_store(tmp_path) as store:
        state = readers.State.at(7, 1)
        store.put(readers.IDS[7], state.kv, state.ranges)
        for turn, n_faults in ((1, 0), (3, 1)):  # both store every token
            turns.begun[7] = turns.finished[7] = turn
            readers.read_files(store, turns, [7], tally, random.Random(0))
            assert len(tally.faults) == n_faults, tally.faults


# -- the package -----------------------------------------------------------------------------------


def test_no_crash_loses_a_document_or_leaves_it_wrong(shim: Path) -> None:
    found = figures("crash")
    assert found["crash_points"] >= 12
    assert (found["lost"], found["wrong"]) == (0, 0)


def test_no_damaged_byte_is_used() -> None:
    found = flips.run("short")
    assert found["flips"] >= 60
    assert found["undetected"] == 0


def test_readers_beside_a_writer_get_what_is_right_or_nothing() -> None:
    assert figures("readers")["readers_wrong"] == 0
