"""Kill a writer at its n-th change of the store, open the store again, and see what is there.

A shim (`crash.c`) counts every libc call that changes the store's folder, those of Python, safetensors,
SQLite and Chroma's Rust code alike, and kills the process at the chosen one: before it, after it, or with
half of the bytes written. (Only the rename with which safetensors ends a file goes around libc; "after"
the write before it and "before" the fsync behind it are its two sides.) The process that runs the
workload is a fork of one that has imported everything, so that a point costs a second or two.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import track

from coinrag_integrations.engine import LoadedModel, gate
from coinrag_integrations.engine.config import Coverage
from coinrag_integrations.engine.kernels import choose_kernels
from coinrag_integrations.errors import CoinRAGError
from tests.faults import Scale
from tests.faults.workload import (
    STEPS,
    Documents,
    Finding,
    Prefixes,
    examine,
    leftovers,
    open_rag,
    record,
    states,
)
from tests.tiny import tiny_model

How = Literal["before", "torn", "after"]
HOWS: tuple[How, ...] = ("before", "torn", "after")
COVERAGES: tuple[Coverage, ...] = ("all", "nuggets")
POINTS = {"short": 6, "full": 160}  # for each coverage
_TWICE = 6  # one point in so many dies again while it goes on
_PATIENCE = 120  # seconds after which a child hangs
_MEMORY = 8 << 30  # more than its parent that a child may map
_VECTORS = re.compile(r"/chroma/[0-9a-f-]{36}/")
_SHIM = "COINRAG_FAULTS_SHIM"


class NoCompilerError(RuntimeError):
    """The shim cannot be built here."""


def run(scale: Scale, *, power: bool = False) -> dict[str, Any]:
    """Crash at points spread over the workload: `crash_points`, documents `lost`, documents `wrong`.

    With `power` the machine dies, not only the process: what was not synced is lost too.

    Raises:
        NoCompilerError: there is no C compiler, or it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        shim = build_shim(Path(scratch))
        environment = {
            **os.environ,
            "LD_PRELOAD": str(shim),
            _SHIM: str(shim),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, "-m", "tests.faults.crash", scale, *(["power"] if power else [])]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def build_shim(folder: Path) -> Path:
    """Compile `crash.c` into `folder`.

    Raises:
        NoCompilerError: there is no C compiler, or it fails.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        raise NoCompilerError("the crash test needs Linux and a C compiler: install gcc")
    source, shim = Path(__file__).with_suffix(".c"), folder / "crash.so"
    options = ("-O2", "-shared", "-fPIC", "-ldl", "-pthread")
    command = [compiler, str(source), *options, "-o", str(shim)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NoCompilerError(f"{' '.join(command)} failed: {done.stderr}")
    return shim


# -- a process that may die ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """What a child said, a line each, and the signal that killed it (0: none)."""

    lines: list[str]
    signal: int

    def said(self, word: str) -> list[str]:
        """What followed `word` in the lines that begin with it."""
        return [line[len(word) + 1 :] for line in self.lines if line.startswith(f"{word} ")]


def in_child(work: Callable[[Callable[[str], None], int], None]) -> Ended:
    """Run `work(say, pipe)` in a fork of this process. What it raises is said as an "error" line."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        signal.alarm(_PATIENCE)
        _bound_memory()

        def say(line: str) -> None:
            os.write(write, f"{line}\n".encode())

        try:
            work(say, write)
        except BaseException:  # noqa: BLE001  (a fork must never go on as if it were its parent)
            say(f"error {json.dumps(_last_words())}")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lines = pipe.read().decode(errors="replace").splitlines()
    _, status = os.waitpid(process, 0)
    return Ended(lines, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def _bound_memory() -> None:
    """A damaged index may ask for more memory than there is: fail here, not elsewhere."""
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = n_pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _last_words() -> str:
    """What was raised, and where in our own code."""
    lines = traceback.format_exc().strip().splitlines()
    places = [line.strip() for line in lines if "coinrag_integrations" in line and "File" in line]
    return " ".join([lines[-1][:500], *places[-1:]])


def warm(names: Iterable[str], model: LoadedModel) -> None:
    """Import here what a child imported, so that no other has to. Starts no thread."""
    for name in names:
        if name not in sys.modules:
            with suppress(ImportError, AttributeError):  # some exist only within others
                importlib.import_module(name)
    gate.check(model, choose_kernels("auto", model.device).place)


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """When to die: at the `at`-th change of the folder, and how."""

    at: int
    how: How

    def __str__(self) -> str:
        return f"{self.how} {self.at}"


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """How far a child came with the workload: steps finished, whether it was killed, where."""

    finished: int
    killed: bool
    changes: list[str]
    errors: list[str]


@dataclasses.dataclass(frozen=True)
class Campaign:
    """Crashes of one coverage's workload, in a folder of its own that is emptied before each."""

    model: LoadedModel
    coverage: Coverage
    scratch: Path
    power: bool

    @property
    def folder(self) -> Path:
        """The store."""
        return self.scratch / "store"

    @property
    def shadow(self) -> Path:
        """What the files of the store held when they were last synced, by inode."""
        return self.scratch / "synced"

    @cached_property
    def prefixes(self) -> Prefixes:
        """What every chunk of every version composes to, of a run that nothing happens to."""
        path = self.scratch / "prefixes.pt"

        def work(say: Callable[[str], None], _: int) -> None:
            found: dict[Any, torch.Tensor] = {}
            with open_rag(self.folder, self.model, self.coverage) as rag:
                for step, documents in zip(STEPS, states()[1:], strict=True):
                    step.act(rag)
                    found |= record(rag, documents)
            torch.save(found, path)
            for name in sys.modules:
                say(f"module {name}")

        self.reset()
        ended = in_child(work)
        if ended.signal or ended.said("error"):
            raise CoinRAGError(f"the workload fails without any crash: {ended}")
        warm(ended.said("module"), self.model)
        prefixes: Prefixes = torch.load(path)
        return prefixes

    def reset(self) -> None:
        """Start with an empty folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def play(self, first: int, arm: Arm | None) -> Played:
        """Open the store and do the steps from the `first` on, until `arm` says to die."""
        shutil.rmtree(self.shadow, ignore_errors=True)
        self.shadow.mkdir()
        if self.power:  # what is there from before has long been on the disk
            for path in filter(Path.is_file, self.folder.rglob("*")):
                shutil.copyfile(path, self.shadow / str(path.stat().st_ino))

        def work(say: Callable[[str], None], pipe: int) -> None:
            shim = ctypes.CDLL(os.environ[_SHIM])
            shim.faults_arm(
                os.fsencode(self.folder),
                ctypes.c_long(arm.at if arm else 0),
                HOWS.index(arm.how) if arm else 0,
                pipe,
                int(arm is None),
                os.fsencode(self.shadow) if self.power else b"",
            )
            with open_rag(self.folder, self.model, self.coverage) as rag:
                for index in range(first, len(STEPS)):
                    STEPS[index].act(rag)
                    say(f"done {index}")
            say("closed now")

        ended = in_child(work)
        if self.power and ended.signal:
            self._lose({int(inode) for inode in ended.said("dirty")})
        changes = [line for line in ended.lines if line[0].isdigit()]
        errors = [json.loads(text) for text in ended.said("error")]
        if ended.signal not in (0, signal.SIGKILL):
            errors.append(f"the child ended by signal {ended.signal}: does it hang?")
        return Played(
            first + len(ended.said("done")), ended.signal == signal.SIGKILL, changes, errors
        )

    def look(self, before: Documents, after: Documents, *, final: bool) -> list[Finding]:
        """Open the store in a process of its own, and say what is wrong with it."""

        def work(say: Callable[[str], None], _: int) -> None:
            with open_rag(self.folder, self.model, self.coverage) as rag:
                findings = list(examine(rag, before, after, self.prefixes))
                if final:
                    findings += leftovers(rag, self.folder)
                for finding in findings:
                    say(f"finding {json.dumps(dataclasses.astuple(finding))}")

        ended = in_child(work)
        findings = [Finding(*json.loads(text)) for text in ended.said("finding")]
        for error in [json.loads(text) for text in ended.said("error")]:
            there = before.keys() & after.keys() or {""}
            findings += [Finding("lost", name, f"the store is unusable: {error}") for name in there]
        if ended.signal:
            findings.append(Finding("wrong", "", f"looking ended by signal {ended.signal}"))
        return findings

    def crash(self, arms: Sequence[Arm]) -> tuple[list[Played], list[Finding]]:
        """Die at each of `arms`, look at the store each time, then go on to the end."""
        self.reset()
        history, finished = states(), 0
        played, findings = [], []
        for arm in (*arms, None):
            it = self.play(finished, arm)
            finished = it.finished
            findings += [Finding("wrong", "", f"going on failed: {error}") for error in it.errors]
            after = history[min(finished + 1, len(STEPS))]
            if it.killed:
                played.append(it)
                findings += self.look(history[finished], after, final=False)
            elif it.errors:
                findings += self.look(history[finished], after, final=False)
                break
            else:  # came to the end without dying
                findings += self.look(history[-1], history[-1], final=True)
                break
        return played, findings

    def _lose(self, dirty: set[int]) -> None:
        """Give files that were written since their last fsync the bytes that they had then."""
        for path in self.folder.rglob("*"):
            if path.is_file() and (inode := path.stat().st_ino) in dirty:
                synced = self.shadow / str(inode)
                path.write_bytes(synced.read_bytes() if synced.is_file() else b"")


# -- which points ----------------------------------------------------------------------------------


def choose(changes: Sequence[str], n_points: int, rng: random.Random) -> Iterator[tuple[Arm, ...]]:
    """Points spread evenly over all changes, over those of Chroma's vector index, and over ours.

    Most changes are made by Chroma's SQLite, in which the others would drown.
    """
    everything = range(1, len(changes) + 1)
    paths = [line.split(" ", 2)[2] for line in changes]
    own = [n for n, path in zip(everything, paths, strict=True) if "/chroma" not in path]
    vectors = [n for n, path in zip(everything, paths, strict=True) if _VECTORS.search(path)]
    quarter = n_points // 4
    chosen = (
        _spread(everything, quarter),
        _spread(vectors, quarter),
        _spread(own, n_points - 2 * quarter),
    )
    for index, at in enumerate(sorted({at for ats in chosen for at in ats})):
        call = changes[at - 1].split(" ", 2)[1]
        hows: Sequence[How] = HOWS if "write" in call else ("before", "after")
        arms = [Arm(at, hows[(index + index // _TWICE) % len(hows)])]
        if index % _TWICE == _TWICE - 1:
            arms.append(Arm(rng.randrange(1, len(changes) // 4), "before"))
        yield tuple(arms)


def _spread(items: Sequence[int], n: int) -> list[int]:
    n = min(n, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * n)] for i in range(n)]


# -- the process that forks ------------------------------------------------------------------------


def _memory() -> str | None:
    """A folder in memory: when a process dies, what it wrote stays there as it does on a disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _main(scale: Scale, *, power: bool) -> dict[str, Any]:
    logging.disable(logging.WARNING)  # mended chunks are what it is about
    console = Console(stderr=True)
    counts = {"crash_points": 0, "lost": 0, "wrong": 0}
    rng = random.Random(0)
    model = tiny_model()
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        scratch = Path(folder).resolve()
        for coverage in COVERAGES:
            campaign = Campaign(model, coverage, scratch / coverage, power)
            _ = campaign.prefixes  # made before anything else is in the folder
            campaign.reset()
            unarmed = campaign.play(0, None)
            if unarmed.errors:
                raise CoinRAGError(f"the workload fails without any crash: {unarmed.errors}")
            points = list(choose(unarmed.changes, POINTS[scale], rng))
            title = f"{'power' if power else 'crash'}, coverage {coverage}, {len(unarmed.changes)} changes"
            for arms in track(points, title, console=console, auto_refresh=False):
                played, findings = campaign.crash(arms)
                counts["crash_points"] += len(played)
                for kind in ("lost", "wrong"):
                    counts[kind] += len({f.document_id for f in findings if f.kind == kind})
                where = ", then ".join(
                    f"{arm.how} {' '.join(p.changes)}" for arm, p in zip(arms, played, strict=False)
                )
                for what in dict.fromkeys((f.kind, f.what) for f in findings):
                    names = {f.document_id for f in findings if (f.kind, f.what) == what}
                    said = f"[{coverage}] {where}: {what[0]} {', '.join(sorted(names))}: {what[1]}"
                    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return counts


if __name__ == "__main__":
    import tests.faults.crash as this  # not __main__, so that children see one module

    print(json.dumps(this._main(sys.argv[1], power="power" in sys.argv[2:])))  # noqa: T201
