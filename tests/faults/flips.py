"""Damage chunk files in every way that a disk, or a hand, may; what is read must be right or refused.

Each damaged file is read by an engine that has seen the file before (it has its header, and here the
damage keeps inode, size and time wherever it can) and by one that has not; both must refuse it before
anything is generated, and one that may recompute must give exactly what was stored.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig, LoadedModel
from coinrag_integrations.engine.composer import OnMiss
from coinrag_integrations.engine.store import CODECS
from coinrag_integrations.errors import StoreError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import SpanRef
from tests.faults import Scale
from tests.faults.workload import LAMP, MILL, ORGAN, refs_of
from tests.tiny import HashEmbedder, tiny_model

FLIPS = {"short": 20, "full": 340}  # for each codec
CONFIGS = tuple(
    EngineConfig(chunk_tokens=32, codec=codec, batch_tokens=1, load="read") for codec in CODECS
)
_ONE_TOKEN = GenerationConfig(max_new_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A chunk file: its bytes, the spans in it, and what each of them composes to."""

    path: Path
    content: bytes
    prefixes: Mapping[SpanRef, torch.Tensor]

    @property
    def refs(self) -> list[SpanRef]:
        """The spans, the largest first."""
        return sorted(self.prefixes, key=len, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Files that could be in a chunk's place: other chunks', and its own by another model."""

    chunks: Sequence[bytes]
    foreign: bytes


Damage = Callable[[bytes, Others, random.Random], bytes]


def run(scale: Scale) -> dict[str, Any]:
    """Damage files: how many `flips`, and how many of them were `undetected`."""
    console, rng = Console(stderr=True), random.Random(0)
    n_flips = n_undetected = 0
    for config in CONFIGS:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as open_ones:
            model = tiny_model()
            targets, foreign = build(model, Path(folder) / "store", Path(folder) / "other", config)
            warm = open_ones.enter_context(
                open_engine(model, Path(folder) / "store", config, "raise")
            )
            for target in targets:
                warm.compose(target.refs)  # now it knows every header
            turns = range(FLIPS[scale])
            title = f"flips, codec {config.codec}"
            for turn in track(turns, title, console=console, auto_refresh=False):
                name, damage = DAMAGES[turn % len(DAMAGES)]
                index = rng.randrange(len(targets))
                others = Others(
                    chunks=[t.content for i, t in enumerate(targets) if i != index],
                    foreign=foreign[index],
                )
                damaged = damage(targets[index].content, others, rng)
                faults = list(examine(warm, targets[index], damaged))
                n_flips += 1
                n_undetected += bool(faults)
                for fault in faults:
                    said = f"[{config.codec}] {name} {targets[index].path.name}: {fault}"
                    console.print(said, markup=False, highlight=False, soft_wrap=True)
    return {"flips": n_flips, "undetected": n_undetected}


def build(
    model: LoadedModel, folder: Path, other: Path, config: EngineConfig
) -> tuple[list[Target], list[bytes]]:
    """A store of whole and of partly covered chunks, and the same chunks' files by another model."""
    targets: list[Target] = []
    documents = [ORGAN, MILL, LAMP]
    with _rag(model, folder, config) as rag:
        rag.add(documents)
        chunks = [
            c for d in documents for c in map(rag.engine.catalog.chunk, _ids(rag, d.document_id))
        ]
        for chunk in chunks:
            spans = refs_of(rag, chunk)
            inner = [replace(ref, start=ref.start + 1) for ref in spans if len(ref) > 1]
            prefixes = {ref: rag.engine.compose([ref])[0].kv for ref in (*spans, *inner)}
            path = rag.engine.store.path(chunk.chunk_id)
            targets.append(Target(path=path, content=path.read_bytes(), prefixes=prefixes))
    with _rag(tiny_model(seed=1), other, config) as rag:
        rag.add(documents)
        foreign = [rag.engine.store.path(chunk.chunk_id).read_bytes() for chunk in chunks]
    return targets, foreign


def examine(warm: Engine, target: Target, damaged: bytes) -> Iterator[str]:
    """Put damaged bytes in a file's place, and say what of it is used that should not be.

    `warm` knows the file as it was. It raises what it cannot read.
    """

    def another(on_miss: OnMiss) -> Engine:
        return open_engine(warm.model, warm.disk.root, warm.config, on_miss)

    try:
        _overwrite(target.path, damaged)
        yield from _reads(warm, target, "an engine that knew the file")
        with another("raise") as cold:
            yield from _reads(cold, target, "a new engine")
        with another("recompute") as mending:
            for ref in target.refs:
                prefix, _ = mending.compose([ref])
                if not torch.equal(prefix.kv, target.prefixes[ref]):
                    yield f"recomputing {ref} gives other KV"
        with another("raise") as after:
            yield from _reads(after, target, "after mending", refuse=False)
    finally:
        target.path.unlink(missing_ok=True)
        target.path.write_bytes(target.content)


def _reads(engine: Engine, target: Target, who: str, *, refuse: bool = True) -> Iterator[str]:
    """What goes wrong when every span of a file is read; refusing is right if `refuse`."""
    refused = []
    for ref in target.refs:
        try:
            prefix, _ = engine.compose([ref])
        except StoreError as error:
            refused.append(ref)
            if not refuse:
                yield f"{who}: {ref} is refused: {error}"
        except Exception as error:  # noqa: BLE001  (what is counted here)
            yield f"{who}: {ref} raises {type(error).__name__}: {error}"
        else:
            if not torch.equal(prefix.kv, target.prefixes[ref]):
                yield f"{who}: {ref} has other KV than was stored"
    if refused:
        try:
            answer = engine.answer("Who built it?", refused[:1], _ONE_TOKEN)
        except StoreError:
            return
        yield f"{who}: {refused[0]} is refused, and answers {answer.text!r}"


# -- damages ---------------------------------------------------------------------------------------


def _regions(content: bytes) -> list[range]:
    """The parts of a safetensors file: header length, header, and the bytes of each tensor."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    tensors = [v["data_offsets"] for name, v in header.items() if name != "__metadata__"]
    extents = [range(start + first, start + stop) for first, stop in tensors]
    return [range(8), range(8, start), *(extent for extent in extents if extent)]


def _flip_bit(content: bytes, _: Others, rng: random.Random) -> bytes:
    """One bit, in any part of the file with the same chance."""
    at = rng.choice(rng.choice(_regions(content)))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def _flip_anywhere(content: bytes, _: Others, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def _change_bytes(content: bytes, _: Others, rng: random.Random) -> bytes:
    """Up to sixteen bytes of one part."""
    changed, region = bytearray(content), rng.choice(_regions(content))
    for at in rng.sample(region, min(len(region), rng.randint(2, 16))):
        changed[at] ^= rng.randint(1, 255)
    return bytes(changed)


def _change_digit(content: bytes, _: Others, rng: random.Random) -> bytes:
    """A digit of the header, which stays well-formed: shapes, offsets, ranges, checks."""
    region = _regions(content)[1]
    at = rng.choice([i for i in region if content[i : i + 1].isdigit()])
    digit = str((int(content[at : at + 1]) + rng.randint(1, 9)) % 10).encode()
    return content[:at] + digit + content[at + 1 :]


def _zero_block(content: bytes, _: Others, rng: random.Random) -> bytes:
    """A sector that was never written."""
    start = rng.randrange(0, len(content), 512)
    return (content[:start] + bytes(512) + content[start + 512 :])[: len(content)]


def _shift_block(content: bytes, _: Others, rng: random.Random) -> bytes:
    """A sector written where another belongs."""
    starts = rng.sample(range(0, len(content) - 512, 512), 2)
    block = content[starts[0] : starts[0] + 512]
    return content[: starts[1]] + block + content[starts[1] + 512 :]


def _swap_tensors(content: bytes, _: Others, rng: random.Random) -> bytes:
    """Bytes of one tensor in the place of another's."""
    first, second = rng.sample(_regions(content)[2:], 2)
    changed, n = bytearray(content), min(len(first), len(second))
    changed[first.start : first.start + n] = content[second.start : second.start + n]
    return bytes(changed)


def _truncate(content: bytes, _: Others, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def _extend(content: bytes, _: Others, rng: random.Random) -> bytes:
    return content + rng.randbytes(rng.randint(1, 5000))


def _other_chunk(_: bytes, others: Others, rng: random.Random) -> bytes:
    return rng.choice(others.chunks)


def _other_tail(content: bytes, others: Others, rng: random.Random) -> bytes:
    """The own header before another chunk's bytes."""
    start, other = _regions(content)[1].stop, rng.choice(others.chunks)
    tail = other[_regions(other)[1].stop :]
    return (content[:start] + tail + content[start + len(tail) :])[: len(content)]


def _other_model(_: bytes, others: Others, rng: random.Random) -> bytes:
    return others.foreign


DAMAGES: tuple[tuple[str, Damage], ...] = tuple(
    (damage.__name__.strip("_").replace("_", " "), damage)
    for damage in (
        *(_flip_bit, _flip_anywhere, _change_bytes) * 3,
        *(_change_digit, _zero_block, _shift_block, _swap_tensors, _truncate, _extend),
        *(_other_chunk, _other_tail, _other_model),
    )
)


# -- opening ---------------------------------------------------------------------------------------


def _overwrite(path: Path, content: bytes) -> None:
    """Change a file as decay does: the same inode, the same times."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _rag(model: LoadedModel, folder: Path, config: EngineConfig) -> CoinRAG:
    return CoinRAG.open(folder, model=model, embedder=HashEmbedder(), config=config)


def _ids(rag: CoinRAG, document_id: str) -> list[Any]:
    return rag.engine.catalog.chunk_ids(document_id)


def open_engine(model: LoadedModel, folder: Path, config: EngineConfig, on_miss: OnMiss) -> Engine:
    """An engine of its own over a store."""
    return Engine(model, folder, replace(config, on_miss=on_miss))
