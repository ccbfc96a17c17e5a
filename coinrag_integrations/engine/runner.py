"""Run online tokens behind a prefix, one forward pass after the other. Knows positions, not sampling.

Two ways that give the same logits. Eager writes behind the prefix's own entries and is always right.
Static keeps every shape and address fixed, so that a pass can be compiled, or recorded as a CUDA graph:
launching hundreds of small kernels takes longer than they run.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Literal, Protocol

import torch

from coinrag_integrations.engine import hf
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.visibility import HIDDEN, visible

Execution = Literal["eager", "compiled", "graph"]
# The tokens of a pass are rounded up to a power of two from this one, the rows of a buffer to one of
# 256, 384, 512, 768, …: few shapes to compile or record, and at most a third to waste.
BUCKET_TOKENS, BUCKET_ROWS = 16, 256
MAX_RUNNERS = 8  # each holds a buffer of its own


class Runner(Protocol):
    """Computes tokens behind what has been computed before."""

    def run(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Logits after the last of `ids` [B, m] at positions `at` [B, m]: fp32 [B, V].

        Both int64 on the CPU. Tokens at `HIDDEN` are padding: nothing ever sees them.
        """
        ...

    @property
    def positions(self) -> torch.Tensor:
        """Where each row of the buffer stands that has been computed so far: int64 [B, n]."""
        ...

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """A copy of these rows of the first prefix, on the CPU or GPU they are on: [L, 2, H, n, D]."""
        ...


class EagerRunner:
    """Plain calls of the model over the prefix's buffer."""

    def __init__(self, model: LoadedModel, prefix: Prefix, room: int) -> None:
        """Be ready for `room` tokens."""
        self._model = model
        self._kv = prefix.with_room(room)
        self._cache = hf.prefix_cache(self._kv, prefix.n_entries)
        self._rows = prefix.positions()  # [B, rows] on the CPU
        self._first = int(self._rows.min()) if self._rows.numel() else 0
        self._holes = bool((self._rows == HIDDEN).any())
        self._nearest = min((w for w in model.layer_windows if w is not None), default=inf)

    def run(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """See `Runner.run`."""
        device, last = self._model.device, int(at[:, -1].max())
        hidden = at == HIDDEN
        self._holes = self._holes or bool(hidden.any())
        # A mask costs time. None is needed where it would hide nothing, nor behind an empty prefix,
        # where the model's own causal mask (and its windows) are right, and much faster.
        alone = self._rows.shape[1] == 0 and not self._holes
        near = ids.shape[1] == 1 and not self._holes and last - self._first < self._nearest
        rows = torch.cat((self._rows, at), dim=1)
        ids, positions = torch.stack((ids, at.masked_fill(hidden, 0))).to(device)
        seen = None
        if not alone and not near:
            seen = visible(rows.to(device), at.to(device), self._model.layer_windows)
        logits = hf.next_logits(self._model.hf, ids, self._cache, positions, seen)
        self._rows = rows
        return logits

    @property
    def positions(self) -> torch.Tensor:
        """See `Runner.positions`."""
        return self._rows

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Runner.take`."""
        return self._kv[:, :, 0].index_select(3, rows.to(self._kv.device))


class _StaticPass:
    """One forward pass over m tokens of B prefixes, in place: same tensors, same shapes, always.

    kv, 2L tensors [B, H, N, D] (see `hf.static_cache`), and rows [B, N], the positions of their rows,
    are shared with other passes.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv: Sequence[torch.Tensor],
        rows: torch.Tensor,
        m: int,
        execution: Execution,
    ) -> None:
        """Compile at the first call, or record now."""
        on_gpu = model.device.type == "cuda"
        self.model, self.kv, self.rows = model, kv, rows
        # ids, positions, positions with 0 for padding: [3B, m]; which rows they become: [1, m].
        shape = (3 * len(rows) + 1, m)
        self.host = torch.zeros(shape, dtype=torch.long, pin_memory=on_gpu)
        self.inputs = torch.zeros(shape, dtype=torch.long, device=model.device)
        self.inputs[-1] = torch.arange(m)
        self.call: Callable[[], torch.Tensor] = self.forward
        if execution == "compiled":
            # Freezing lets the compiler lay the weights out for the processor.
            options: dict[str, Any] = {} if on_gpu else {"freezing": True}
            self.call = torch.compile(self.forward, dynamic=False, options=options)
        elif execution == "graph":
            self.call = self._record()

    def run(self, ids: torch.Tensor, at: torch.Tensor, first_row: int) -> torch.Tensor:
        """Logits after the last of ids [B, m]: fp32 [B, V], overwritten by the next pass."""
        b, m = ids.shape
        self.host[:b], self.host[b : 2 * b] = ids, at
        self.host[2 * b : 3 * b] = at.masked_fill(at == HIDDEN, 0)
        self.host[-1] = torch.arange(first_row, first_row + m)
        self.inputs.copy_(self.host, non_blocking=True)  # until the next pass, somebody has waited
        with torch.no_grad():
            return self.call()

    def forward(self) -> torch.Tensor:
        """Logits of the inputs."""
        b = len(self.rows)
        ids, at, positions = self.inputs[: 3 * b].chunk(3)
        to = self.inputs[-1]
        self.rows.index_copy_(1, to, at)
        seen = visible(self.rows, at, self.model.layer_windows)
        cache = hf.static_cache(self.kv, to)
        return hf.next_logits(self.model.hf, ids, cache, positions, seen)

    def _record(self) -> Callable[[], torch.Tensor]:
        """A CUDA graph of the pass. Rehearsals write to the first rows, which are then filled."""
        current = torch.cuda.current_stream(self.model.device)
        stream = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):  # libraries allocate and choose their kernels before the recording
                self.forward()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads allocate meanwhile is none of the recording's business.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), torch.no_grad():
            logits = self.forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay


class StaticRunner:
    """Passes over one buffer of N rows for B prefixes, which it takes over one after the other."""

    def __init__(
        self, model: LoadedModel, n_prefixes: int, n_rows: int, execution: Execution
    ) -> None:
        """Nothing is compiled or recorded before it is needed."""
        self._model, self._execution = model, execution
        # What a mask hides must still be finite.
        layout = model.layout
        shape = (n_prefixes, layout.n_kv_heads, n_rows, layout.head_dim)
        self._kv = [
            torch.zeros(shape, dtype=layout.dtype, device=model.device)
            for _ in range(2 * layout.n_layers)
        ]
        self._rows = torch.full((n_prefixes, n_rows), HIDDEN, device=model.device)
        self._passes: dict[int, _StaticPass] = {}
        self._n_rows = 0

    def begin(self, prefix: Prefix, longest: int) -> None:
        """Take over a prefix, to be followed by passes of at most `longest` tokens."""
        for m in (1, bucket_tokens(longest)):  # recorded before there is anything to overwrite
            if m not in self._passes:
                self._passes[m] = _StaticPass(self._model, self._kv, self._rows, m, self._execution)
        n = prefix.n_entries
        torch._foreach_copy_(
            [buffer[..., :n, :] for buffer in self._kv],
            list(prefix.kv[..., :n, :].flatten(0, 1).unbind()),
        )
        self._rows.fill_(HIDDEN)
        self._rows[:, :n] = prefix.positions().to(self._rows.device)
        self._n_rows = n

    def run(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """See `Runner.run`."""
        n = ids.shape[1]
        m = n if n == 1 else bucket_tokens(n)
        ids = torch.nn.functional.pad(ids, (m - n, 0))
        at = torch.nn.functional.pad(at, (m - n, 0), value=HIDDEN)
        logits = self._passes[m].run(ids, at, self._n_rows)
        self._n_rows += m
        return logits

    @property
    def positions(self) -> torch.Tensor:
        """See `Runner.positions`."""
        return self._rows[:, : self._n_rows].cpu()

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Runner.take`."""
        rows = rows.to(self._rows.device)
        taken = torch.stack([buffer[0].index_select(1, rows) for buffer in self._kv])
        return taken.reshape(-1, 2, *taken.shape[1:])


class StaticRunners:
    """A model's static runners, one for each size, each used by one answer at a time."""

    def __init__(self, model: LoadedModel, execution: Execution) -> None:
        """Make none yet."""
        self._model, self._execution = model, execution
        self._free: OrderedDict[tuple[int, int], StaticRunner] = OrderedDict()
        self._lent: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, prefix: Prefix, longest: int, n_new: int) -> Iterator[StaticRunner | None]:
        """A runner at the end of `prefix`, for `longest` tokens at once and then `n_new` one by one.

        None if the one of that size is in use: an answer that nobody reads on would hold up all
        others. The least recently used of more than `MAX_RUNNERS` are dropped.
        """
        n_rows = prefix.n_entries + bucket_tokens(longest) + n_new
        size = (len(prefix.plans), bucket_rows(n_rows))
        with self._lock:
            if size in self._lent:
                runner = None
            else:
                runner = self._free.pop(size, None) or StaticRunner(
                    self._model, *size, self._execution
                )
                self._lent.add(size)
        if runner is None:
            yield None
            return
        try:
            runner.begin(prefix, longest)
            yield runner
        finally:
            with self._lock:
                self._lent.discard(size)
                self._free[size] = runner
                while len(self._free) > MAX_RUNNERS:
                    self._free.popitem(last=False)


def bucket_tokens(n_tokens: int) -> int:
    """The next power of two, from `BUCKET_TOKENS`."""
    return max(BUCKET_TOKENS, 1 << (n_tokens - 1).bit_length())


def bucket_rows(n_rows: int) -> int:
    """The next power of two or one and a half of it, from `BUCKET_ROWS`."""
    power = max(BUCKET_ROWS, 1 << (n_rows - 1).bit_length())
    return power * 3 // 4 if n_rows <= power * 3 // 4 and power > BUCKET_ROWS else power
