"""A store built by Ray's workers against one built here: the same files, byte for byte.

Some of the demo's documents, with the demo model. One thread for each process, as Ray gives its workers:
other numbers of threads add up in another order.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from coinrag_integrations.demo.data import demo_documents
from coinrag_integrations.demo.model import ensure_demo_model
from coinrag_integrations.engine import EngineConfig
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.serving.ray_build import RayEncoding

N_DOCUMENTS = 4


def is_ray_equal() -> bool:
    """Build both, and compare all KV files. Needs Ray."""
    import ray

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            local, remote = (Path(scratch) / name for name in ("local", "ray"))
            built, distributed = (_built(it, on_ray=it is remote) for it in (local, remote))
        return bool(built) and built == distributed
    finally:
        ray.shutdown()
        torch.set_num_threads(n_threads)


def _built(store: Path, *, on_ray: bool) -> dict[str, bytes]:
    """The KV files of a new store, by their place in it."""
    config = EngineConfig(chunk_tokens=128, load="read")
    with CoinRAG.open(store, model=ensure_demo_model(), dtype="float32", config=config) as rag:
        if on_ray:
            rag.ingestor.encoding = RayEncoding(rag, store, n_workers=2)
        rag.add(demo_documents()[:N_DOCUMENTS])
    files = (store / "tenants").rglob("*.safetensors")
    return {str(path.relative_to(store)): path.read_bytes() for path in files}


if __name__ == "__main__":
    print(is_ray_equal())
