"""A build by many processes: the bytes of a build by one, whoever of them dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from coinrag_integrations.engine import EngineConfig
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.ingest import Ingestor
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.types import Document
from tests.tiny import HashEmbedder, byte_tokenizer, tiny_hf

ray = pytest.importorskip("ray")

CONFIG = EngineConfig(chunk_tokens=64, coverage="all", c2kv=(4,), batch_tokens=256)
DOCUMENTS = [
    Document(
        document_id=str(i),
        text=" ".join(f"Word {i} of {j} stands here." for j in range(8 + 3 * i)),
    )
    for i in range(8)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model as workers load it."""
    path = tmp_path_factory.mktemp("model")
    tiny_hf(dtype=torch.float32).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def _cluster():
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, ignore_reinit_error=True)
    yield
    ray.shutdown()


def build(store: Path, folder: Path, *, on_ray: bool, documents=DOCUMENTS, **options) -> object:
    from coinrag_integrations.serving.ray_build import RayEncoding

    with CoinRAG.open(
        store,
        model=str(folder),
        embedder=HashEmbedder(),
        config=CONFIG,
        extractor="untrained",
        **options,
    ) as rag:
        if on_ray:
            rag.ingestor.encoding = RayEncoding(rag, store, n_workers=2)
        report = rag.add(documents)
        for chunk in rag.engine.catalog.chunks():
            assert rag.engine.is_stored(chunk)
    return report


def bytes_of(store: Path) -> dict[str, bytes]:
    """Every KV file by its place in the store."""
    files = (store / "tenants").rglob("*.safetensors")
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def local(folder, tmp_path_factory) -> Path:
    store = tmp_path_factory.mktemp("local")
    build(store, folder, on_ray=False)
    return store


def test_many_workers_write_the_bytes_of_one(local, folder, tmp_path):
    report = build(tmp_path, folder, on_ray=True)
    assert report.n_added == len(DOCUMENTS)
    assert report.n_encoded == report.n_chunks > 20
    assert bytes_of(tmp_path) == bytes_of(local)
    assert len(bytes_of(local)) == 2 * report.n_chunks
    again = build(tmp_path, folder, on_ray=True)
    assert (again.n_unchanged, again.n_encoded) == (len(DOCUMENTS), 0)


def test_a_worker_that_is_killed_loses_nothing(local, folder, tmp_path):
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            if any((tmp_path / "tenants").rglob("*.safetensors")):
                for pid in workers():
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    build(tmp_path, folder, on_ray=True)
    thread.join()
    assert killed
    assert bytes_of(tmp_path) == bytes_of(local)
    assert not list((tmp_path / "tenants").rglob(".*.tmp"))


def test_a_build_that_was_interrupted_goes_on_with_workers(local, folder, tmp_path):
    build(tmp_path, folder, on_ray=False, documents=DOCUMENTS[:3])
    report = build(tmp_path, folder, on_ray=True)
    assert (report.n_unchanged, report.n_added) == (3, len(DOCUMENTS) - 3)
    assert bytes_of(tmp_path).keys() == bytes_of(local).keys()


def test_workers_write_to_remote_storage(folder, tmp_path):
    remote = f"file://{tmp_path / 'remote'}"
    report = build(tmp_path / "store", folder, on_ray=True, documents=DOCUMENTS[:2], remote=remote)
    assert not bytes_of(tmp_path / "store")
    assert len(list((tmp_path / "remote").rglob("*.safetensors"))) == 2 * report.n_chunks


def test_a_document_that_comes_twice_is_there_in_its_last_version(folder, tmp_path):
    later = Document(document_id="0", text="Another text of the first document.")
    report = build(tmp_path, folder, on_ray=True, documents=[*DOCUMENTS[:3], later])
    assert (report.n_added, report.n_updated) == (3, 1)


def test_no_workers_encode_nothing(folder, tmp_path):
    from coinrag_integrations.serving.ray_build import RayEncoding

    with CoinRAG.open(
        tmp_path, model=str(folder), embedder=HashEmbedder(), config=CONFIG, extractor="untrained"
    ) as rag:
        with pytest.raises(ConfigError, match="at least 1"):
            RayEncoding(rag, tmp_path, n_workers=0)
        assert isinstance(rag.ingestor, Ingestor)


def workers() -> list[int]:
    """The processes of Ray's actors, with the one that has worked longest first."""
    found = []
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"MapWorker" in status.read_bytes():
                found.append(int(status.parent.name))
        except OSError:
            continue
    return sorted(found)
