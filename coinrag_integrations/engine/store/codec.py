"""What is stored of a chunk's entries: as they are, or as 8- or 4-bit codes. Knows sizes, not files.

Codec "none" keeps entries in the model's dtype. "int8" and "int4" keep codes (`kernels.quantised`), an
fp16 scale and zero for every value vector, and for every key channel a scale and zero for each group of
consecutive stored entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from coinrag_integrations.engine.kernels import Bits, Quantise
from coinrag_integrations.engine.layout import KVLayout
from coinrag_integrations.errors import StoreError
from coinrag_integrations.types import Span

Memory = NDArray[np.uint8]
CodecName = Literal["none", "int8", "int4"]
SCALE_DTYPE = torch.float16
# A larger group stores fewer scales and follows the channels less closely. See docs/log.md.
_CODES: dict[str, tuple[Bits, int]] = {"int8": (8, 128), "int4": (4, 64)}
CODECS: tuple[CodecName, ...] = ("none", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a chunk file: how many rows it has for E entries, and what a row is.

    `group` is how many entries share a row.
    """

    name: str
    row: tuple[int, ...]
    dtype: torch.dtype
    group: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.row) * self.dtype.itemsize

    def n_rows(self, n_entries: int) -> int:
        """Rows for so many entries."""
        return -(-n_entries // self.group)

    def shape(self, n_entries: int) -> tuple[int, ...]:
        """Shape for so many entries."""
        return (self.n_rows(n_entries), *self.row)


@dataclass(frozen=True)
class Codec:
    """How entries of one layout are stored: one for each token, or a slot for every `ratio` of them."""

    name: CodecName
    layout: KVLayout
    ratio: int = 1

    @property
    def bits(self) -> Bits:
        """Bits of a code."""
        return _CODES[self.name][0]

    @property
    def group(self) -> int:
        """Consecutive entries that share the scales of their keys; 1 for codec "none"."""
        return 1 if self.name == "none" else _CODES[self.name][1]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The tensors of a chunk file; the first holds the entries or their codes."""
        n_layers, n_heads, dim = self.layout.n_layers, self.layout.n_kv_heads, self.layout.head_dim
        if self.name == "none":
            return (Part("kv", (n_layers, 2, n_heads, dim), self.layout.dtype),)
        codes = (n_layers, 2, n_heads, dim * self.bits // 8)
        return (
            Part("codes", codes, torch.uint8),
            Part("value_scales", (2, n_layers, n_heads), SCALE_DTYPE),
            Part("key_scales", (2, n_layers, n_heads, dim), SCALE_DTYPE, self.group),
        )

    def rows(self, ranges: Sequence[Span], span: Span) -> slice | None:
        """The entries of `ranges` (of tokens, one behind the other) that hold the tokens of `span`.

        None if some are not among them, or if it cuts a slot.
        """
        first = 0
        for covered in ranges:
            if covered.start <= span.start and span.stop <= covered.stop:
                start, stop = span.start - covered.start, span.stop - covered.start
                cut = start % self.ratio or (span.stop != covered.stop and stop % self.ratio)
                n_before = start // self.ratio
                return None if cut else slice(first + n_before, first + self.entries(stop))
            first += self.entries(len(covered))
        return None

    def entries(self, n_tokens: int) -> int:
        """Entries of so many consecutive tokens."""
        return -(-n_tokens // self.ratio)

    def n_entries(self, ranges: Iterable[Span]) -> int:
        """Entries of ranges of tokens."""
        return sum(self.entries(len(covered)) for covered in ranges)

    def n_bytes(self, n_entries: int) -> int:
        """Bytes of so many consecutive entries, with their scales, without checksums and header."""
        return sum(part.n_rows(n_entries) * part.row_bytes for part in self.parts)

    def pack(self, entries: torch.Tensor, quantise: Quantise) -> dict[str, torch.Tensor]:
        """Entries [E, L, 2, H, D] as the tensors of a chunk file, on the CPU.

        Raises:
            StoreError: an entry is not finite, or too large for the scales of codes.
        """
        if self.name == "none":
            return {"kv": entries.cpu().contiguous()}
        if not len(entries):
            return {p.name: torch.empty(p.shape(0), dtype=p.dtype) for p in self.parts}
        try:
            coded = quantise(entries.contiguous(), self.bits, self.group, SCALE_DTYPE)
        except ValueError as error:
            raise StoreError(f"codec {self.name!r} cannot hold this chunk: {error}") from error
        return {
            "codes": coded.codes.cpu(),
            "value_scales": torch.stack((coded.value_scale, coded.value_zero), dim=1).cpu(),
            "key_scales": torch.stack((coded.key_scale, coded.key_zero), dim=1).cpu(),
        }


def chunk_bytes(codec: Codec, n_entries: int) -> int:
    """Bytes of a chunk file with so many entries, but for a header of one or two kilobytes."""
    n_checksums = sum(part.n_rows(n_entries) for part in codec.parts)
    return codec.n_bytes(n_entries) + 8 * n_checksums


def memory_of(tensor: torch.Tensor) -> Memory:
    """The bytes of each row of a contiguous tensor on the CPU: uint8 [R, bytes], the same memory."""
    return tensor.view(torch.uint8).reshape(len(tensor), tensor[:1].nbytes).numpy()
