"""Put anything at all in a chunk file's place, and ask for anything by any id.

What is read must be right or refused by a `StoreError`, without hanging and without taking much memory; an
engine that may recompute must give exactly what was stored; no id may lead out of the store's folder. A
case follows from its number. Cases run in a process of their own, which has little memory to spare and is
killed when it falls silent.

Not asked for: a forger who writes other KV with the right checksums into a well-formed file is not found
out, since checksums are no signatures.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash
from rich.console import Console
from rich.progress import track

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig
from coinrag_integrations.engine.store.codec import CODECS, CodecName
from coinrag_integrations.errors import CoinRAGError, StoreError
from coinrag_integrations.types import ChunkId, Document, Nugget, Span, SpanRef
from tests.engine.store.parts import read
from tests.faults import Scale
from tests.tiny import TEXT, tiny_model

N_IDS = {"short": 90, "full": 2800}
N_RANDOM_FILES = {"short": 15, "full": 2300}  # for each codec, besides those that are listed
PATIENCE = 60  # seconds after which a case hangs
SPARE_BYTES = 512 << 20  # that a case may take
_ONE_TOKEN = GenerationConfig(max_new_tokens=1)
NOBODY = 65534
TERABYTE = 1 << 40
_FIRST = "before the first case"

Numbers = Sequence[int]
# By number: what the case is called, and what is wrong with it.
Case = tuple[int, str, Callable[[], list[str]]]
Worker = Callable[[Path, Numbers], Iterator[Case]]


def run(scale: Scale) -> dict[str, Any]:
    """Fuzz files and ids: how many were `fuzzed`, and how many `escaped` what is promised above."""
    console = Console(stderr=True)
    n_fuzzed, escaped = 0, list[str]()
    for title, worker, numbers in parts(scale):
        tried = track(
            supervise(worker, numbers),
            f"fuzz, {title}",
            total=len(numbers),
            console=console,
            auto_refresh=False,
        )
        for faults in tried:
            n_fuzzed += 1
            escaped += [f"{title}: {fault}" for fault in faults[:1]]
    for fault in escaped:
        console.print(fault, markup=False, highlight=False, soft_wrap=True)
    return {"fuzzed": n_fuzzed, "escaped": len(escaped)}


def parts(scale: Scale) -> Iterator[tuple[str, Worker, Numbers]]:
    """What is fuzzed: title, worker, and the numbers of the cases."""
    for codec in CODECS:
        n = len(LISTED) + N_RANDOM_FILES[scale]
        every = 1 if scale == "full" or codec == "none" else 4
        yield f"files, codec {codec}", partial(fuzz_files, codec=codec), range(0, n, every)
    yield "ids", fuzz_ids, range(N_IDS[scale])


# -- a process that may hang or die ----------------------------------------------------------------


def supervise(
    worker: Worker, numbers: Numbers, *, patience: float = PATIENCE
) -> Iterator[list[str]]:
    """What is wrong with each case. After one that hangs or kills its process, a new one goes on."""
    left = list(numbers)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)  # somebody else will look in as well
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, worker, Path(folder), left))
            process.start()
            theirs.close()
            try:
                yield from _listen(ours, left, patience)
            finally:
                process.kill()
                process.join()


def _listen(pipe: Connection, left: list[int], patience: float) -> Iterator[list[str]]:
    """Take finished cases out of `left` until there are none, or the process has failed at one."""
    name = _FIRST
    while left:
        try:
            if not pipe.poll(PATIENCE if name is _FIRST else patience):
                fault = f"{name}: hangs"
                break
            message = pipe.recv()
        except EOFError:
            fault = f"{name}: the process died"
            break
        if isinstance(message, str):
            name = f"case {left[0]} ({message})"
            continue
        yield [f"{name}: {fault}" for fault in message]
        left.pop(0)
    else:
        return
    if name is _FIRST:
        raise RuntimeError("the process that fuzzes does not start")
    left.pop(0)
    yield [fault]


def _work(pipe: Connection, worker: Worker, folder: Path, numbers: Numbers) -> None:
    logging.getLogger("coinrag_integrations").setLevel(logging.CRITICAL)
    for number, name, faults in worker(folder, numbers):
        del number
        pipe.send(name)
        try:
            found = faults()
        except Exception as error:  # noqa: BLE001  (it is told, and counted)
            found = [f"{type(error).__name__}: {error}"[:300]]
        pipe.send(found)


@contextmanager
def little_memory(spare: int = SPARE_BYTES) -> Iterator[None]:
    """An allocation of more than `spare` bytes, on top of what is in use, fails."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# -- what is asked of a file -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A chunk's file, two engines that read it, and what its spans compose to.

    Spans with None are not in the chunk. `covered` are those that the file holds.
    """

    path: Path
    content: bytes
    other: bytes
    strict: Engine
    lenient: Engine
    chunk_id: ChunkId
    covered: tuple[SpanRef, ...]
    prefixes: Mapping[SpanRef, torch.Tensor | None]
    entries: Mapping[SpanRef, torch.Tensor]

    @classmethod
    def build(cls, folder: Path, codec: CodecName, opened: ExitStack) -> Target:
        """A store of two chunks; of the first, two ranges are covered."""
        model = tiny_model(num_hidden_layers=2)
        config = EngineConfig(chunk_tokens=64, codec=codec, batch_tokens=1, load="read")
        lenient = opened.enter_context(Engine(model, folder, config))
        chunks = list(lenient.chunk(Document(document_id="doc", text=TEXT)))[:2]
        spans = [Span(2, 20), Span(31, 50)]
        chunks[0] = replace(chunks[0], nuggets=tuple(_nugget(span) for span in spans))
        for chunk, kv in lenient.encode(chunks):
            lenient.store_chunk(chunk, kv)
        lenient.catalog.begin_document("doc", "0", chunks)
        lenient.catalog.finish_document("doc", "0")
        strict = opened.enter_context(Engine(model, folder, replace(config, on_miss="raise")))
        id_, n = chunks[0].chunk_id, len(chunks[0])
        covered = [SpanRef(id_, *pair) for pair in ((2, 20), (31, 50), (33, 40))]
        outside = [SpanRef(id_, *pair) for pair in ((0, 1), (19, 32))]
        beyond = [SpanRef(id_, *pair) for pair in ((n - 1, n + 1), (10**6, 10**6 + 5))]
        inside = {ref: lenient.compose([ref])[0].kv for ref in (*covered, *outside)}
        path = lenient.store.path(id_)
        return cls(
            path=path,
            content=path.read_bytes(),
            other=lenient.store.path(chunks[1].chunk_id).read_bytes(),
            strict=strict,
            lenient=lenient,
            chunk_id=id_,
            covered=tuple(covered),
            prefixes={**inside, **dict.fromkeys(beyond)},
            entries={ref: read(lenient.store, ref).clone() for ref in covered},
        )

    def faults(self, *, mends: bool = True) -> list[str]:
        """What is wrong with how the file that is there now is read."""
        return list(
            chain(self._reads(), self._composes(self.strict, refuse=True), self._mends(mends))
        )

    def restore(self) -> None:
        """Put the right file back."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)
        self.path.write_bytes(self.content)

    def _reads(self) -> Iterator[str]:
        store, chunk = self.strict.store, self.strict.catalog.chunk(self.chunk_id)
        for what, use in (
            ("header", lambda: store.header(self.chunk_id)),
            ("verify", lambda: store.verify(self.chunk_id)),
            ("contains", lambda: self.chunk_id in store),
            ("is_stored", lambda: self.lenient.is_stored(chunk)),
        ):
            _, fault = attempt(use)
            if fault:
                yield f"{what}: {fault}"
        for ref in self.prefixes:
            found, fault = attempt(partial(read, store, ref))
            if fault:
                yield f"read {_short(ref)}: {fault}"
            elif found is not None and not same(found, self.entries.get(ref)):
                yield f"read {_short(ref)}: wrong entries"

    def _composes(self, engine: Engine, *, refuse: bool) -> Iterator[str]:
        """Each span; refusing it is right if `refuse`, or where the chunk has no such tokens."""
        for ref, expected in self.prefixes.items():
            composed, fault = attempt(lambda ref=ref: engine.compose([ref])[0].kv)
            how = f"{engine.config.on_miss}, compose {_short(ref)}"
            if fault:
                yield f"{how}: {fault}"
            elif composed is not None and not same(composed, expected):
                yield f"{how}: wrong prefix"
            elif composed is None and expected is not None and not refuse:
                yield f"{how}: refused"

    def _mends(self, mends: bool) -> Iterator[str]:
        yield from self._composes(self.lenient, refuse=False)
        if not mends:
            return
        for ref in self.covered:
            composed, fault = attempt(lambda ref=ref: self.strict.compose([ref])[0].kv)
            if composed is None or not same(composed, self.prefixes[ref]):
                yield f"after mending, compose {_short(ref)}: {fault or 'refused or wrong'}"


def attempt(use: Callable[[], Any]) -> tuple[Any, str | None]:
    """What it gives, None if it is refused, and what else it raises."""
    try:
        return use(), None
    except CoinRAGError as error:
        kind = "" if isinstance(error, StoreError | ValueError) else f"{type(error).__name__}: "
        return None, f"{kind}{error}"[:300] if kind else None
    except Exception as error:  # noqa: BLE001  (what is counted here)
        return None, f"{type(error).__name__}: {error}"[:300]


def same(found: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bytes; nothing is the same as None."""
    return expected is not None and found.shape == expected.shape and torch.equal(found, expected)


def fuzz_files(folder: Path, numbers: Numbers, codec: CodecName) -> Iterator[Case]:
    """Cases that put something in the place of a chunk's file."""
    outside = folder / "outside"
    outside.mkdir()
    with ExitStack() as opened:
        target = Target.build(folder / "store", codec, opened)
        if faults := target.faults():
            raise RuntimeError(f"the file as it was written: {faults}")
        (outside / "copy").write_bytes(target.content)
        (outside / "other").write_bytes(target.other)
        opened.enter_context(little_memory())
        for number in numbers:
            rng = random.Random(f"{codec} {number}")
            if number < len(LISTED):
                name, place = LISTED[number]
            else:
                name, place = "damaged", lambda t, rng: t.path.write_bytes(damage(t.content, rng))
            yield number, name, partial(_one_file, target, place, rng)


def _one_file(target: Target, place: Place, rng: random.Random) -> list[str]:
    try:
        place(target, rng)
        with as_nobody(target.path) as could_write:
            return target.faults(mends=could_write and not target.path.is_dir())
    finally:
        target.restore()


@contextmanager
def as_nobody(path: Path) -> Iterator[bool]:
    """Where a file is for nobody to read, be nobody: root may read everything. Else nothing happens."""
    if os.geteuid() or path.is_symlink() or not path.exists() or stat.S_IMODE(path.stat().st_mode):
        yield True
        return
    os.seteuid(NOBODY)
    try:
        yield False
    finally:
        os.seteuid(0)


def _nugget(span: Span) -> Nugget:
    return Nugget(text="", span=span, char_start=0, char_stop=0, match="exact", similarity=1.0)


def _short(ref: SpanRef) -> str:
    return f"[{_said(ref.start)}, {_said(ref.stop)})"


def _said(n: int) -> str:
    """A number in a few characters: Python refuses to write out those of thousands of digits."""
    return str(n) if n.bit_length() < 70 else f"a number of {n.bit_length()} bits"


# -- what is put in a file's place -----------------------------------------------------------------

Place = Callable[[Target, random.Random], object]


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a chunk file, and the bytes behind it."""
    (n,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + n]), content[8 + n :]


def join(header: str | bytes, body: bytes) -> bytes:
    """A chunk file with this header, whatever it says."""
    data = header.encode(errors="surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(data)) + data + body


def sign(header: dict[str, Any], text: str) -> dict[str, Any]:
    """The header with other metadata, as a forger would: the check agrees."""
    check = xxhash.xxh3_64_hexdigest(text.encode(errors="surrogatepass"))
    return {**header, "__metadata__": {**header["__metadata__"], "coinrag": text, "check": check}}


def forge(content: bytes, **changes: str) -> bytes:
    """The file with fields of its metadata replaced by JSON texts, and the check that fits."""
    header, body = split(content)
    text = header["__metadata__"]["coinrag"]
    for field, raw in changes.items():
        text = graft(json.loads(text), (field,), raw)
    return join(json.dumps(sign(header, text)), body)


def graft(value: Any, path: Sequence[Any], raw: str) -> str:
    """`value` as JSON, with the text `raw` at a place inside it, or for the whole of it."""
    if not path:
        return raw
    mark = "@graft@"
    node = copy = json.loads(json.dumps(value))
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = mark
    return json.dumps(copy).replace(f'"{mark}"', raw)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of everything inside a JSON value, itself included."""
    yield ()
    if isinstance(value, dict | list):
        for step in value if isinstance(value, dict) else range(len(value)):
            yield from ((step, *path) for path in places(value[step]))


def _nested(n: int, pair: str = "[]") -> str:
    return pair[0] * n + pair[1] * n


# JSON, or nearly, to put in the place of any value. A header may have a megabyte.
HOSTILE = (
    *("null", "true", "-1", "0", "1", "3", "40", "1000000000000", "-0.0", "1.5", "4.999999"),
    *(str((1 << bits) + d) for bits in (31, 32, 53, 63, 64) for d in (-1, 0)),
    *(str(-(1 << bits)) for bits in (31, 63, 64)),
    *("1" + "0" * 30, "9" * 4000, "9" * 5000, "9" * 500_000, "1e999", "-1e999", "NaN", "Infinity"),
    *(
        '""',
        '"x"',
        '"../../x"',
        '"/etc/passwd"',
        '"\\ud800"',
        '"\\u0000"',
        '"3"',
        '"' + "x" * 900_000 + '"',
    ),
    *("[]", "{}", "[[]]", "[0]", "[[0, 1]]", "[null]", "[0, 1, 2]", "[[0, 1, 2]]", '{"0": 1}'),
    *("[[0, 1e999]]", "[[-1e999, 5]]", "[[NaN, 5]]", "[0, 1e999]", "[NaN, NaN]", '["0", "9"]'),
    *(_nested(n) for n in (100, 300, 480, 700, 900, 950, 990, 100_000)),
    *("[" * 400_000, '{"a": ' * 100_000, '{"a": ' * 450 + "1" + "}" * 450),
    "[" + "[0, 1], " * 10_000 + "[0, 1]]",
)
# Ranges that are not those of two spans of a chunk of 64 tokens, in order, one behind the other. The
# first few hold as many entries as there are.
RANGES = {
    "overlapping": "[[2, 20], [19, 38]]",
    "the same twice": "[[2, 20], [2, 20], [2, 3]]",
    "in the wrong order": "[[31, 50], [2, 20]]",
    "one inside the other": "[[0, 27], [2, 12]]",
    "beyond the last token": "[[2, 20], [60, 79]]",
    "all beyond the last token": "[[100, 137]]",
    "with empty ones": "[[2, 20], [25, 25], [31, 50]]",
    "reversed": "[[20, 2], [50, 31]]",
    "negative": "[[-18, 0], [31, 50]]",
    "of 10^12 entries": "[[0, 1000000000000]]",
    "of 2^63 entries": "[[0, 9223372036854775808]]",
    "of 10^30 entries": f"[[0, 1{'0' * 30}]]",
    "of fractions": "[[2.9, 20.9], [31, 50]]",
    "of strings": '[["2", "20"], ["31", "50"]]',
    "of infinity": "[[2, 1e999]]",
    "of minus infinity": "[[-1e999, 2]]",
    "of nan": "[[NaN, 2]]",
    "of true": "[[false, true], [31, 50]]",
    "of 5,000 spans": "[" + ", ".join(f"[{i}, {i + 1}]" for i in range(0, 10_000, 2)) + "]",
}
TOKENS = ("0", "-1", "49", "50.5", "1e999", "NaN", "null", '"64"', "1" + "0" * 30, "[64]")
LENGTHS = (0, 1, 2, 7, 1 << 20, (1 << 20) + 1, 16 << 20, 1 << 31, 1 << 40, (1 << 63) - 8, 1 << 63)
HEADERS = {
    "an empty object": b"{}",
    "null": b"null",
    "a number": b"1e999",
    "a word": b'"kv"',
    "a list": b"[]",
    "spaces": b" " * 500_000,
    "no JSON": b"\x00" * 600,
    "not UTF-8": b'{"\xff\xfe": 1}',
    "UTF-16": "{}".encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "half of one": b'{"__metadata__": {"coinrag": "{',
    "a deep list": b"[" * 500_000,
    "a deep object": b'{"a":' * 150_000,
    "a closed deep list": b"[" * 900 + b"]" * 900,
    "a large number": b"9" * 900_000,
    "a long word": b'"' + b"x" * 900_000 + b'"',
    "many keys": b"{" + b",".join(b'"%d":0' % i for i in range(20_000)) + b"}",
}


def damage(content: bytes, rng: random.Random) -> bytes:
    """A chunk file of which something was replaced by something hostile."""
    return rng.choice((_grafted, _grafted_metadata, _extents, _length, _repeated, _soup, _spliced))(
        content, rng
    )


def _grafted(content: bytes, rng: random.Random) -> bytes:
    """Any value of the header."""
    header, body = split(content)
    return join(graft(header, rng.choice(list(places(header))), rng.choice(HOSTILE)), body)


def _grafted_metadata(content: bytes, rng: random.Random) -> bytes:
    """Any value of the metadata; mostly the check agrees."""
    header, body = split(content)
    meta = json.loads(header["__metadata__"]["coinrag"])
    text = graft(meta, rng.choice(list(places(meta))), rng.choice(HOSTILE))
    if rng.random() < 0.8:
        return join(json.dumps(sign(header, text)), body)
    header["__metadata__"]["coinrag"] = text
    return join(json.dumps(header), body)


def _extents(content: bytes, rng: random.Random) -> bytes:
    """Where one tensor or two lie, and what they are said to be."""
    header, body = split(content)
    tensors = [name for name in header if name != "__metadata__"]
    limits = (0, 1, 8, len(body) - 8, len(body), len(body) + 8, TERABYTE, 1 << 63, 1 << 70, -8)
    for name in rng.sample(tensors, rng.randint(1, 2)):
        it = header[name]
        change = rng.randrange(5)
        if change == 0:
            it["data_offsets"] = [rng.choice(limits), rng.choice(limits)]
        elif change == 1:  # of the right length elsewhere
            shift = rng.choice([*limits, 1, -1, 4])
            it["data_offsets"] = [offset + shift for offset in it["data_offsets"]]
        elif change == 2:  # on another tensor
            it["data_offsets"] = header[rng.choice(tensors)]["data_offsets"]
        elif change == 3:
            it["dtype"] = rng.choice(["F32", "F64", "U8", "BF16", "BOOL", "f32", "", "X" * 1000])
        else:
            it["shape"] = rng.choice(
                [[], [1 << 40], [-1], it["shape"][::-1], [*it["shape"], 1], [1 << 62] * 4]
            )
    return join(json.dumps(header), body)


def _length(content: bytes, rng: random.Random) -> bytes:
    """How long the header is said to be."""
    (n,) = struct.unpack("<Q", content[:8])
    said = rng.choice([*LENGTHS, rng.getrandbits(64), n + rng.randint(-9, 9), len(content) - 8])
    return struct.pack("<Q", said % (1 << 64)) + content[8:]


def _repeated(content: bytes, rng: random.Random) -> bytes:
    """A key twice, with another value before or behind."""
    header, body = split(content)
    key, raw = json.dumps(rng.choice(list(header))), rng.choice(HOSTILE)
    text = json.dumps(header)
    before = rng.random() < 0.5
    return join(f"{{{key}: {raw}, {text[1:]}" if before else f"{text[:-1]}, {key}: {raw}}}", body)


def _soup(content: bytes, rng: random.Random) -> bytes:
    """Bytes without a meaning, as long as anything, or behind a well-formed beginning."""
    kept = rng.choice([0, 0, 8, rng.randrange(len(content))])
    return content[:kept] + rng.randbytes(rng.choice([0, 1, 9, 100, 4096, len(content)]))


def _spliced(content: bytes, rng: random.Random) -> bytes:
    """A piece of the file in another place of it, or twice, or gone."""
    a, b = sorted(rng.sample(range(len(content)), 2))
    return rng.choice(
        [content[:a] + content[b:], content[:b] + content[a:], content[b:] + content[:b]]
    )


def _listed() -> Iterator[tuple[str, Place]]:
    """Everything that every store must meet."""
    for what, ranges in RANGES.items():
        yield f"ranges {what}", _written(partial(forge, ranges=ranges))
        yield (
            f"ranges {what}, many tokens",
            _written(partial(forge, ranges=ranges, n_tokens="1" + "0" * 31)),
        )
    for tokens in TOKENS:
        yield f"{tokens:.20} tokens", _written(partial(forge, n_tokens=tokens))
    for length in LENGTHS:
        said = struct.pack("<Q", length)
        yield f"header of {length} bytes", _written(lambda c, said=said: said + c[8:])
    for what, raw in HEADERS.items():
        yield f"header that is {what}", _written(lambda c, raw=raw: join(raw, split(c)[1]))
        yield f"metadata that is {what}", _written(partial(_metadata, raw=raw))
    for field in ("chunk_id", "fingerprint", "format_version"):
        for depth in (300, 480, 700, 900):
            raw = _nested(depth)
            yield f"{field} {depth} deep", _written(partial(forge, **{field: raw}))
    yield "nothing", _written(lambda c: b"")
    yield "another chunk", lambda t, rng: t.path.write_bytes(t.other)
    yield "not there", lambda t, rng: t.path.unlink()
    yield "a folder", _made(lambda path, t: path.mkdir())
    yield (
        "a folder that is not empty",
        _made(lambda path, t: (path / "a" / "b").mkdir(parents=True)),
    )
    yield "a pipe", _made(lambda path, t: os.mkfifo(path))
    yield "a socket", _made(lambda path, t: os.mknod(path, stat.S_IFSOCK | 0o600))
    yield "a device", _device
    for link in ("/etc/passwd", "/dev/zero", "/dev/full", "/proc/self/mem", "/proc/self/maps", "/"):
        yield f"a link to {link}", _made(lambda path, t, link=link: path.symlink_to(link))
    yield "a link to itself", _made(lambda path, t: path.symlink_to(path))
    yield "a link to nothing", _made(lambda path, t: path.symlink_to("nothing"))
    yield "a link to another chunk", _made(lambda path, t: path.symlink_to(_outside(t) / "other"))
    yield "a link to a copy", _made(lambda path, t: path.symlink_to(_outside(t) / "copy"))
    yield "a link to a pipe", _made(_link_to_pipe)
    yield "a terabyte of nothing", _made(lambda path, t: _sparse(path, b"", TERABYTE))
    yield "a terabyte behind it", _made(lambda path, t: _sparse(path, t.content, TERABYTE))
    yield "a terabyte that it describes", _made(lambda path, t: _sparse(path, *_huge(t.content)))
    yield "not readable", lambda t, rng: t.path.chmod(0)


def _written(change: Callable[[bytes], bytes]) -> Place:
    return lambda target, rng: target.path.write_bytes(change(target.content))


def _made(make: Callable[[Path, Target], object]) -> Place:
    """Something in the place of the file."""

    def place(target: Target, _: random.Random) -> None:
        target.path.unlink()
        make(target.path, target)

    return place


def _metadata(content: bytes, raw: bytes) -> bytes:
    header, body = split(content)
    return join(json.dumps(sign(header, raw.decode("latin-1"))), body)


def _outside(target: Target) -> Path:
    return target.strict.disk.root.parent / "outside"


def _device(target: Target, _: random.Random) -> None:
    target.path.unlink()
    try:
        os.mknod(target.path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:  # only root may
        target.path.symlink_to("/dev/zero")


def _link_to_pipe(path: Path, target: Target) -> None:
    pipe = _outside(target) / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    path.symlink_to(pipe)


def _sparse(path: Path, content: bytes, size: int) -> None:
    """A file of which the disk holds only the beginning, where its file system has files so large."""
    path.write_bytes(content)
    with suppress(OSError):
        os.truncate(path, size)


def _huge(content: bytes) -> tuple[bytes, int]:
    """A header, signed, of a file of half a terabyte in which everything fits together; its size."""
    header, _ = split(content)
    meta = json.loads(header["__metadata__"]["coinrag"])
    n_entries = sum(stop - start for start, stop in meta["ranges"])
    times, end = (1 << 30) // n_entries, 0
    for name, it in sorted(header.items(), key=lambda item: str(item[1].get("data_offsets"))):
        if name != "__metadata__":
            first, stop = it["data_offsets"]
            it["shape"][0] *= times
            it["data_offsets"] = [end, end + (stop - first) * times]
            end += (stop - first) * times
    meta["n_tokens"], meta["ranges"] = n_entries * times, [[0, n_entries * times]]
    head = join(json.dumps(sign(header, json.dumps(meta))), b"")
    return head, len(head) + end


LISTED: tuple[tuple[str, Place], ...] = tuple(_listed())


# -- ids -------------------------------------------------------------------------------------------

_VALID = "0123456789abcdef" * 2
IDS = (
    *(
        "",
        ".",
        "..",
        "/",
        "~",
        "-",
        "*",
        "?",
        "*/*",
        "??/*",
        "%2e%2e",
        "CON",
        "a:b",
        "file:///etc/passwd",
    ),
    *("../x", "../../x", "../" * 8 + "etc/passwd", "/etc/passwd", "aa/../../../outside/secret"),
    *("..\\..\\x", "\\\\host\\x", "\x00", "aa\x00bb", "/etc/passwd\x00", _VALID[:31] + "\x00"),
    *(
        _VALID + "\n",
        _VALID[:31] + "\n",
        "\n" + _VALID,
        _VALID + "\r\n",
        _VALID + " ",
        " " + _VALID,
    ),
    *(
        _VALID + ".",
        _VALID + "/",
        _VALID + "/..",
        "./" + _VALID,
        _VALID + ".safetensors",
        _VALID[:31],
    ),
    *(_VALID + "0", _VALID.upper(), "A" * 32, "g" * 32, "-" + _VALID[1:], "0x" + _VALID[2:]),
    *(
        "\u0661" * 32,
        "\uff10" * 32,
        "\u0430" * 32,
        "\U0001d7d8" * 32,
        "\u00b2" * 32,
        "a\u0301" * 16,
    ),
    *(
        "\u202e" + _VALID[1:],
        _VALID[:31] + "\u200b",
        _VALID[:31] + "\ufeff",
        "\ud800" * 32,
        _VALID + "\udfff",
    ),
    *(
        "a" * 255,
        "a" * 4096,
        "../" * 4000,
        "a" * 1_000_000,
        "\U0001f600" * 32,
        "'; DROP TABLE chunks; --",
    ),
    *(
        "catalog",
        "fingerprint",
        ".writer",
        "tenants/default/main",
        "<|im_end|>",
        "{}",
        "$(id)",
        "`id`",
    ),
)
_INTS = (
    *(
        0,
        1,
        2,
        19,
        20,
        31,
        50,
        63,
        64,
        65,
        511,
        4096,
        10**6,
        10**9,
        10**12,
        10**18,
        10**30,
        10**5000,
    ),
    *((1 << bits) + d for bits in (31, 32, 53, 63, 64) for d in (-1, 0, 1)),
    *(-1, -5, -(1 << 31), -(1 << 63), -(10**30)),
)


def fuzz_ids(folder: Path, numbers: Numbers) -> Iterator[Case]:
    """Cases that ask for, or delete, something by an id that is not one of a chunk."""
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    with ExitStack() as opened:
        target = Target.build(folder / "store", "none", opened)
        watch = Watch(folder / "store")
        sys.addaudithook(watch)
        for use in _uses(target, ChunkId(_VALID), SpanRef(ChunkId(_VALID), 0, 1)).values():
            attempt(use)  # what is imported and opened the first time
        opened.enter_context(little_memory())
        before = contents(folder)
        for number in numbers:
            rng = random.Random(f"id {number}")
            id_ = IDS[number] if number < len(IDS) else random_id(rng, target.chunk_id)
            yield number, f"{id_!r:.80}", partial(_one_id, target, watch, id_, rng, before)


def random_id(rng: random.Random, known: str) -> str:
    """Nearly the id of a chunk, or nothing like it."""
    signs = [
        *"0123456789abcdefABCDEFg./\\~-_\0\n\r\t *?",
        *(chr(rng.randrange(0x11_0000)) for _ in "abc"),
    ]
    kind = rng.randrange(4)
    if kind == 0:
        return "".join(rng.choices(signs, k=rng.choice([1, 5, 31, 32, 33, 300])))
    if kind == 1:
        return "/".join(
            rng.choices(["..", ".", "", known, known[:2], "tmp", "etc", "\0"], k=rng.randint(2, 9))
        )
    if kind == 2:
        return rng.choice(IDS) + rng.choice(IDS)
    at = rng.randrange(len(known))
    other = [sign for sign in signs if sign != known[at]]
    return known[:at] + rng.choice(other) + known[at + rng.randint(0, 1) :]


def _uses(target: Target, id_: ChunkId, ref: SpanRef | None) -> dict[str, Callable[[], object]]:
    """Everything that takes an id of a chunk, or a span of one, from somebody else."""
    strict, lenient, store = target.strict, target.lenient, target.strict.store
    uses: dict[str, Callable[[], object]] = {
        "path": lambda: store.path(id_),
        "contains": lambda: id_ in store,
        "header": lambda: store.header(id_),
        "verify": lambda: store.verify(id_),
        "tier": lambda: store.tier(id_),
        "delete": lambda: store.delete(id_),
        "remove_chunk": lambda: lenient.remove_chunk(id_),
        "catalog.chunk": lambda: lenient.catalog.chunk(id_),
        "catalog.live": lambda: lenient.catalog.live([id_]),
        "catalog.chunk_ids": lambda: lenient.catalog.chunk_ids(id_),
        "catalog.content": lambda: lenient.catalog.content(id_),
        "catalog.delete_document": lambda: lenient.catalog.delete_document(id_),
        "catalog.pin": lambda: lenient.catalog.pin([id_]),
        "catalog.unpin": lambda: lenient.catalog.pin([id_], pinned=False),
        "catalog.purge": lambda: lenient.catalog.purge([id_]),
        "stream_full": lambda: strict.stream_full("Who?", [id_]),
    }
    if ref is not None:
        uses |= {
            "read": lambda: read(store, ref) if len(ref) < 5000 else None,
            "compose, raise": lambda: strict.compose([ref]),
            "compose, recompute": lambda: lenient.compose([ref]),
            "answer": lambda: lenient.stream("Who?", [ref]),
            "answer_batch": lambda: lenient.answer_batch([("Who?", [ref])], _ONE_TOKEN),
        }
    return uses


def _one_id(
    target: Target, watch: Watch, id_: str, rng: random.Random, before: Mapping[str, bytes]
) -> list[str]:
    faults: list[str] = []
    a, b = rng.choice(_INTS), rng.choice(_INTS)
    spans = [(0, 1), (a, b), (a, a + rng.randint(1, 9))]
    for owner in (id_, target.chunk_id):
        for start, stop in spans:
            ref, fault = attempt(lambda o=owner, s=start, e=stop: SpanRef(ChunkId(o), s, e))
            if fault:
                faults.append(f"SpanRef({_said(start)}, {_said(stop)}): {fault}")
            uses = _uses(target, ChunkId(id_), ref)
            for what, use in uses.items():
                if owner != id_ and "ref" not in use.__code__.co_freevars:
                    continue
                with watch:
                    _, fault = attempt(use)
                if fault:
                    faults.append(f"{what} {'' if ref is None else _short(ref)}: {fault}")
    faults += [f"touched {path}" for path in watch.taken()]
    after = contents(target.strict.disk.root.parent)
    if after != before:
        faults.append(
            f"changed {sorted(k for k in {**before, **after} if before.get(k) != after.get(k))}"
        )
    return faults


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that is not the catalog's, which notes pins and garbage."""
    return {
        str(path.relative_to(folder)): b"" if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.name.startswith("catalog.sqlite")
    }


class Watch:
    """An audit hook that notes which paths outside of a folder are opened, made, listed or removed.

    Hooks stay for as long as their process; this one looks only inside of a `with`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._outside: list[str] = []
        self._looks = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._looks or not event.startswith(
            ("open", "os.", "shutil.", "glob.", "sqlite3.connect")
        ):
            return
        n_paths = 2 if event in ("os.rename", "os.link", "os.symlink") else 1
        for path in args[:n_paths]:
            if isinstance(path, str | bytes | os.PathLike):
                real = os.path.realpath(os.fsdecode(path))
                if os.path.commonpath([real, self._folder]) != self._folder:
                    self._outside.append(f"{event} {real}")

    def __enter__(self) -> None:
        self._looks = True

    def __exit__(self, *_: object) -> None:
        self._looks = False

    def taken(self) -> list[str]:
        """What was noted since the last time."""
        outside, self._outside = self._outside, []
        return outside


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run("short" if "--short" in sys.argv else "full")) + "\n")
