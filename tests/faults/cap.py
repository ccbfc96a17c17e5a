"""Build more KV than a store may hold, and ask what `du` says meanwhile.

The cap holds at every moment: while documents are added, and while what was evicted is encoded again to
answer. Then every document must still be answered from the right KV. `du` adds up what it sees on its way,
so a sample of it may be off by the files that came and went meanwhile; that it is below the cap all the
same is what the store keeps its margin for.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from coinrag_integrations.engine import Engine, EngineConfig, GenerationConfig, LoadedModel
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.engine.store import Limits
from coinrag_integrations.errors import StoreError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig
from coinrag_integrations.types import Document, SpanRef
from tests.faults import Scale
from tests.tiny import HashEmbedder, placed, tiny_model

MIB = 1 << 20
CAPS = {"short": 16 * MIB, "full": 200 * MIB}
TIMES = 5  # so much more KV than fits
CHUNK_TOKENS = 64
CONFIG = EngineConfig(chunk_tokens=CHUNK_TOKENS, coverage="all", batch_tokens=1, load="read")
_FEW = RetrievalConfig(n_chunks=2, n_nuggets=4)
_ONE_TOKEN = GenerationConfig(max_new_tokens=1)


def run(scale: Scale) -> dict[str, Any]:
    """Build, ask, and build for two tenants: in how many samples of `du` was a `cap_exceeded`.

    Raises:
        AssertionError: a document is not answered, or not from the right KV.
    """
    console = Console(stderr=True)
    exceeded = 0
    model = wide_model(CAPS[scale])
    for title, part in (("one tenant", one_tenant), ("two tenants", two_tenants), ("pins", pins)):
        with tempfile.TemporaryDirectory() as folder:
            seen = part(model, Path(folder) / "store", CAPS[scale], console)
        for it in seen:
            exceeded += it.n_above
            console.print(
                f"cap, {title}: {it.n_samples} samples, the largest {it.largest / MIB:.1f} MiB of "
                f"{it.cap / MIB:.1f}, {it.n_above} above",
                soft_wrap=True,
            )
            if not it.n_samples:
                raise AssertionError("du was never heard")
    return {"cap_exceeded": exceeded}


# -- what is built ---------------------------------------------------------------------------------


def wide_model(cap: int) -> LoadedModel:
    """A model that is quick to run and has much KV: 16 or 64 kB a token."""
    n_heads = 4 if cap < 64 * MIB else 16
    return tiny_model(
        num_hidden_layers=2,
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads,
        head_dim=256,
        max_position_embeddings=1024,
    )


def documents(model: LoadedModel, n_bytes: int) -> list[Document]:
    """Documents whose KV takes so many bytes, each with words of its own."""
    n_tokens, made = n_bytes // model.layout.bytes_per_entry, list[Document]()
    while n_tokens > 0:
        n = len(made)
        text = " ".join(
            f"The {thing} of town{n}x is kept by {name} since {1800 + n}."
            for thing, name in (("organ", "Bastien Roule"), ("mill", "Ines Caldero"))
        )
        made.append(Document(document_id=f"town{n}", text=text))
        n_tokens -= len(model.tokenizer.encode(text).ids)
    return made


def question(document: Document) -> str:
    """A question with words of this document alone."""
    return f"Who keeps the organ of {document.document_id}x?"


def open_store(
    model: LoadedModel, folder: Path, limits: Limits, tenant: str = "default"
) -> CoinRAG:
    """A store with limits, of one tenant."""
    return CoinRAG.open(
        folder,
        model=model,
        embedder=HashEmbedder(),
        config=CONFIG,
        limits=limits,
        tenant=tenant,
        retrieval=_FEW,
        generation=_ONE_TOKEN,
    )


# -- what is seen ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Samples:
    """What `du` said of a folder."""

    cap: int
    n_samples: int = 0
    n_above: int = 0
    largest: int = 0

    def add(self, n_bytes: int) -> None:
        """Another sample."""
        self.n_samples += 1
        self.n_above += n_bytes > self.cap
        self.largest = max(self.largest, n_bytes)


@contextmanager
def sampled(folder: Path, cap: int) -> Iterator[Samples]:
    """Ask `du` for a folder's bytes, as fast as it answers, until the block ends."""
    samples, ended = Samples(cap), threading.Event()

    def sample() -> None:
        while not ended.is_set():
            if (n_bytes := disk_usage(folder)) is not None:
                samples.add(n_bytes)

    thread = threading.Thread(target=sample, name="du", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
    if (n_bytes := disk_usage(folder)) is not None:
        samples.add(n_bytes)


def disk_usage(folder: Path) -> int | None:
    """Bytes that a folder takes on disk; None while it is not there."""
    command = ["du", "-s", "--block-size=1", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return int(said[0]) if said else None


def wrong_prefixes(rag: CoinRAG, asked: Iterable[Document]) -> list[str]:
    """Documents that are lost, or of which a question is answered from other KV than a fresh encoding."""
    wrong: list[str] = []
    for document in asked:
        ids = rag.engine.catalog.chunk_ids(document.document_id)
        chunks = [rag.engine.catalog.chunk(id_) for id_ in ids]
        if "".join(chunk.text for chunk in chunks) != document.text:
            wrong.append(f"{document.document_id}: other text")
        spans = [span.ref for span in rag.ask(question(document)).spans]
        for refs in (spans, [chunk.ref() for chunk in chunks]):
            prefix, _ = rag.engine.compose(refs)
            fresh = composed_afresh(rag.engine, prefix.plans[0].refs)
            if not torch.allclose(prefix.kv, fresh, rtol=1e-5, atol=1e-5):
                wrong.append(f"{document.document_id}: other KV of {refs}")
    return wrong


def composed_afresh(engine: Engine, refs: Sequence[SpanRef]) -> torch.Tensor:
    """The prefix of these spans without the store: [L, 2, 1, H, N, D]."""
    head = engine.prompt.head
    entries = [encode(engine.model, [head])[0]]
    for ref in refs:
        kv = encode(engine.model, [engine.catalog.chunk(ref.chunk_id).token_ids])[0]
        entries.append(kv[ref.start : ref.stop])
    together = torch.cat(entries)
    return placed(engine.model, together, range(len(together)))


# -- parts -----------------------------------------------------------------------------------------


def one_tenant(model: LoadedModel, folder: Path, cap: int, console: Console) -> list[Samples]:
    """Add five times what fits, then ask for all of it."""
    made = documents(model, TIMES * cap)
    with open_store(model, folder, Limits(max_bytes=cap)) as rag, sampled(folder, cap) as samples:
        rag.add(made)
        if not cap / 4 < rag.engine.store.n_bytes() < cap:
            raise AssertionError(f"{rag.engine.store.n_bytes()} bytes of KV are no test of {cap}")
        told = track(made, "cap, asking", console=console, auto_refresh=False)
        if wrong := wrong_prefixes(rag, told):
            raise AssertionError(f"{len(wrong)} documents are wrong: {wrong[:3]}")
        if rag.engine.catalog.counts()["documents"] != len(made):
            raise AssertionError("documents are lost")
    return [samples]


def two_tenants(model: LoadedModel, folder: Path, cap: int, console: Console) -> list[Samples]:
    """A tenant with a quota evicts its own KV, and nobody else's."""
    quota = cap
    limits = Limits(max_bytes=2 * cap, tenant_bytes={"small": quota})
    mine, others = documents(model, 3 * cap), documents(model, cap // 4)
    with open_store(model, folder, limits, "large") as rag:
        rag.add(others)
    with (
        open_store(model, folder, limits, "small") as rag,
        sampled(folder / "tenants" / "small", quota) as samples,
        sampled(folder, 2 * cap) as whole,
    ):
        rag.add(mine)
        if wrong := wrong_prefixes(rag, mine[:: max(1, len(mine) // 20)]):
            raise AssertionError(f"{len(wrong)} documents are wrong: {wrong[:3]}")
    with open_store(model, folder, limits, "large") as rag:
        if not all(document_is_stored(rag, document) for document in others):
            raise AssertionError("one tenant's quota evicted another tenant's KV")
        if wrong := wrong_prefixes(rag, others):
            raise AssertionError(f"{len(wrong)} documents are wrong: {wrong[:3]}")
    return [samples, whole]


def pins(model: LoadedModel, folder: Path, cap: int, console: Console) -> list[Samples]:
    """What is pinned stays, whatever comes after; too much of it is refused, and harms nothing."""
    made = documents(model, 2 * cap)
    pinned, rest = made[: len(made) // 8], made[len(made) // 8 :]
    with open_store(model, folder, Limits(max_bytes=cap)) as rag, sampled(folder, cap) as samples:
        rag.add(pinned)
        rag.pin([document.document_id for document in pinned])
        rag.add(rest)
        if not all(document_is_stored(rag, document) for document in pinned):
            raise AssertionError("pinned KV was evicted")
        for document in rest:
            rag.pin([document.document_id])
            rag.ask(question(document))  # mends what was evicted, as long as there is room
        refused = False
        try:
            rag.add([Document(document_id="more", text=f"{document.text} And more of it." * 20)])
        except StoreError:
            refused = True
        if not refused:
            raise AssertionError("a store full of pinned KV took more")
        if wrong := wrong_prefixes(rag, made[:: max(1, len(made) // 20)]):
            raise AssertionError(f"{len(wrong)} documents are wrong: {wrong[:3]}")
        rag.pin([document.document_id for document in made], pinned=False)
        rag.add([Document(document_id="more", text=f"{document.text} And more of it.")])
    return [samples]


def document_is_stored(rag: CoinRAG, document: Document) -> bool:
    """Whether all of a document's KV is on disk."""
    ids = rag.engine.catalog.chunk_ids(document.document_id)
    return bool(ids) and all(rag.engine.is_stored(rag.engine.catalog.chunk(id_)) for id_ in ids)


if __name__ == "__main__":
    sys.stdout.write(f"{run('short' if '--short' in sys.argv else 'full')}\n")
