"""Where spans are gathered before they are placed: rows of entries, or of codes with their scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from coinrag_integrations.engine.kernels import Quantised
from coinrag_integrations.engine.store.codec import Codec, Memory, Part, memory_of
from coinrag_integrations.types import SpanRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Rows for spans, one behind the other.

    `tensors` has one for each part of the codec, on the CPU, `memory` the bytes of their rows. Rows of
    key scales are reserved for the most groups that a span can touch; `key_group` [T] int32 says which
    of them an entry uses. `rows` and `groups` are those of each span.
    """

    codec: Codec
    refs: tuple[SpanRef, ...]
    rows: tuple[slice, ...]
    groups: tuple[slice, ...]
    tensors: Mapping[str, torch.Tensor]
    memory: Mapping[str, Memory]
    key_group: torch.Tensor

    @classmethod
    def allocate(cls, codec: Codec, refs: Sequence[SpanRef], *, pin: bool = False) -> Stage:
        """An uninitialised stage; `pin` its memory, so that a GPU can fetch it meanwhile."""
        lengths = [ref.n_entries for ref in refs]
        rows = tuple(_behind_each_other(lengths))
        # A span of n entries that starts anywhere touches at most so many groups.
        groups = tuple(
            _behind_each_other((n + codec.group - 2) // codec.group + 1 for n in lengths)
        )
        sizes = {True: rows[-1].stop if rows else 0, False: groups[-1].stop if groups else 0}
        tensors = {
            part.name: torch.empty(
                (sizes[part.group == 1], *part.row), dtype=part.dtype, pin_memory=pin
            )
            for part in codec.parts
        }
        return cls(
            codec=codec,
            refs=tuple(refs),
            rows=rows,
            groups=groups,
            tensors=tensors,
            memory={name: memory_of(tensor) for name, tensor in tensors.items()},
            key_group=torch.zeros(sizes[True], dtype=torch.int32),
        )

    def targets(self, index: int, stored: slice) -> Iterator[tuple[Part, slice, Memory]]:
        """For each part the rows to take of a chunk, and where their bytes go, for span `index`.

        `stored` are the chunk's entries that hold the span.
        """
        for part in self.codec.parts:
            if part.group == 1:
                yield part, stored, self.memory[part.name][self.rows[index]]
                continue
            first, stop = stored.start // part.group, -(-stored.stop // part.group)
            begin = self.groups[index].start
            entries = torch.arange(stored.start, stored.stop, dtype=torch.int32)
            self.key_group[self.rows[index]] = begin - first + entries // part.group
            yield part, slice(first, stop), self.memory[part.name][begin : begin + stop - first]

    def fill(
        self, index: int, parts: Mapping[str, torch.Tensor], stored: slice, *, origin: int = 0
    ) -> None:
        """Copy span `index` out of a chunk's `parts`, whose entries `stored` hold it.

        `origin`: the first entry in `parts`, of those of the chunk (and the first group is its).
        """
        for part, rows, target in self.targets(index, stored):
            first = origin // part.group
            target[:] = memory_of(parts[part.name])[rows.start - first : rows.stop - first]

    def entries(self, spans: slice) -> torch.Tensor | Quantised:
        """What to place for consecutive spans. Shares memory, but for the scales."""
        rows, groups = _union(self.rows[spans]), _union(self.groups[spans])
        if self.codec.name == "none":
            return self.tensors["kv"][rows]
        value_scale, value_zero = self.tensors["value_scales"][rows].unbind(1)
        key_scale, key_zero = self.tensors["key_scales"][groups].unbind(1)
        return Quantised(
            codes=self.tensors["codes"][rows],
            bits=self.codec.bits,
            key_scale=key_scale.contiguous(),
            key_zero=key_zero.contiguous(),
            key_group=self.key_group[rows] - groups.start,
            value_scale=value_scale.contiguous(),
            value_zero=value_zero.contiguous(),
        )


def _behind_each_other(lengths: Iterator[int] | Sequence[int]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length


def _union(slices: Sequence[slice]) -> slice:
    return slice(slices[0].start, slices[-1].stop) if slices else slice(0, 0)
