"""What earlier answers stood behind, kept so that a conversation that goes on computes only what is new.

A prefix is an order of *atoms*: tokens of text, entries of chunks, and slots. Rows are the same whenever
all atoms up to them are, and the position is their number: so nothing is kept of a prefix with slots.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

import torch

from coinrag_integrations.engine.plan import Piece, Text
from coinrag_integrations.engine.runner import Runner
from coinrag_integrations.engine.visibility import HIDDEN
from coinrag_integrations.types import ChunkId

Atom = int | tuple[ChunkId, int, int]  # an id; of an entry the chunk, its first token and the ratio
Atoms = tuple[Atom, ...]


@dataclass(kw_only=True)
class KeptPrefixes:
    """The most recently used prefixes, at most `max_bytes` of them. Safe to share between threads."""

    max_bytes: int
    _kept: OrderedDict[Atoms, torch.Tensor] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def longest(self, atoms: Atoms) -> torch.Tensor | None:
        """The rows [L, 2, H, n, D] of the longest start of `atoms` that is kept; not to be written to."""
        with self._lock:
            common = {kept: _common(atoms, kept) for kept in self._kept}
            if not any(common.values()):
                return None
            kept = max(common, key=common.__getitem__)
            self._kept.move_to_end(kept)
            return self._kept[kept][..., : common[kept], :]

    def keep(self, atoms: Atoms, kv: torch.Tensor) -> None:
        """Keep rows [L, 2, H, n, D], one an atom. What they begin with need not be kept beside them."""
        with self._lock:
            for old in [kept for kept in self._kept if atoms[: len(kept)] == kept]:
                del self._kept[old]
            self._kept[atoms] = kv
            while self.n_bytes > self.max_bytes:
                self._kept.popitem(last=False)

    def keep_from(self, runner: Runner, atoms: Atoms) -> None:
        """Keep what a runner computed of `atoms`, unless its rows do not stand where their numbers say."""
        at, order = runner.positions[0].sort()
        n = int((at != HIDDEN).sum())
        if torch.equal(at[:n], torch.arange(n)):
            self.keep(atoms[:n], runner.take(order[:n]))

    def forget(self) -> None:
        """Keep nothing of what was."""
        with self._lock:
            self._kept.clear()

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(kv.nbytes for kv in self._kept.values())


def atoms_of(pieces: Iterable[Piece]) -> Atoms:
    """The order of atoms that pieces are."""
    atoms: list[Atom] = []
    for piece in pieces:
        if isinstance(piece, Text):
            atoms += piece.ids
        else:
            first = range(piece.start, piece.stop, piece.ratio)
            atoms += [(piece.chunk_id, i, piece.ratio) for i in first]
    return tuple(atoms)


def _common(a: Iterable[Atom], b: Iterable[Atom]) -> int:
    """How many atoms both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
