"""What a server's blocks hold besides their tokens: prefixes that begin alike share their first ones.

A server shares blocks of equal tokens behind equal blocks. A salt stands in the first of them, and the one
of a whole prefix would keep prefixes apart that differ in their last span. Instead every block is named by
the spans in it: equal names and tokens, from the first block on, are equal rows. Knows no vllm.
"""

from __future__ import annotations

import json

from coinrag_integrations.serving.checking import Injection


def block_names(injection: Injection, beginning: str, size: int) -> list[str] | None:
    """For each block of `size` rows with rows of a prefix in it: what these are. None for one with slots.

    `beginning` is the salt of the head alone: of scope, KV, and secret. Then come the pieces of spans in a
    block: the first row there, how many, the chunk, and the first token of it. A row is a token of a chunk
    placed at its own number; only rows before slots move with these, so those are shared with the very
    same prefix only.
    """
    if any(ref.ratio > 1 for ref in injection.refs):
        return None
    pieces: list[list[tuple[int, int, str, int]]] = [
        [] for _ in range(0, injection.n_entries, size)
    ]
    row = len(injection.head)
    for ref in injection.refs:
        stop = row + ref.n_entries
        for block in range(row // size, (stop - 1) // size + 1):
            first, last = max(row, block * size), min(stop, (block + 1) * size)
            piece = (first - block * size, last - first, ref.chunk_id, ref.start + first - row)
            pieces[block].append(piece)
        row = stop
    return [json.dumps([beginning, *it]) for it in pieces]
