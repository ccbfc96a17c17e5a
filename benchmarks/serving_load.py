"""A vLLM server under load: composed prefixes against the text of the same retrieved chunks.

Clients on this machine ask the demo's questions, one after the other each, of one server with vLLM's own
prefix cache on. `plain` sends the retrieved chunks as text, `composed` the nuggets that were retrieved in
them. Both are emptied out of the server's cache before each row. All answers are compared: a composed one
with our own engine's for the same spans, a plain one with the server's own when it is asked alone.

    rps            answers a second
    ttft_p50_ms    from the request to the first text, at the client; ttft_p99_ms: the slowest of few
    equal_answers  composed answers that are our own engine's, of all that were asked for alone
    wrong          answers under load that are not those that the same server gave alone
    text           composed requests that were answered as text instead
    hung           requests without an answer in time
    ray_equal      a build by Ray's workers is a local build, byte for byte (`ray_equal`)

Needs vLLM (`make serving`). The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.ray_equal import is_ray_equal
from coinrag_integrations.demo.data import demo_documents, demo_questions
from coinrag_integrations.demo.model import ensure_demo_model
from coinrag_integrations.engine import EngineConfig, GenerationConfig, Text
from coinrag_integrations.engine.plan import Piece
from coinrag_integrations.errors import ServingError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import RetrievalConfig
from coinrag_integrations.serving import ServedModel
from coinrag_integrations.serving.launch import free_port, running, server_command

ROADS = ("plain", "composed")
RETRIEVAL = RetrievalConfig(n_chunks=5, n_nuggets=10)


@dataclass(frozen=True)
class Question:
    """A question, as both roads ask it, and what our own engine says of the spans."""

    roads: dict[str, list[Piece]]
    own: str


@dataclass(frozen=True)
class Said:
    """What came of one request."""

    text: str | None
    ttft_ms: float
    fell_back: bool


def main() -> None:
    """Build a store, start a server, and put it under load."""
    options = _options()
    generation = GenerationConfig(max_new_tokens=options.tokens)
    ray_equal = is_ray_equal()
    print(f"ray equal: {ray_equal}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        store, port = Path(scratch) / "store", free_port()
        config = EngineConfig(chunk_tokens=options.chunk_tokens, load="read")
        with CoinRAG.open(
            store,
            model=ensure_demo_model(),
            adapter="",
            dtype=options.dtype,
            config=config,
            retrieval=RETRIEVAL,
        ) as rag:
            rag.add(demo_documents()[: options.documents])
            asked = [it.question for it in demo_questions()[: options.requests]]
            questions = [_question(rag, it, generation) for it in asked]
            sizes = {road: _sizes(rag, questions, road) for road in ROADS}
            print(f"{options.dtype}, prompt tokens: {sizes}", flush=True)
            command = server_command(
                ensure_demo_model(),
                store,
                port,
                [
                    *("--dtype", options.dtype, "--enforce-eager"),
                    *("--max-model-len", "4096", "--max-num-seqs", "16"),
                ],
            )
            environment = {"CUDA_VISIBLE_DEVICES": "", "VLLM_SERVER_DEV_MODE": "1"}
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_WAIT_POLICY": "passive"}
            environment |= os.environ
            log = Path(scratch) / "server.log"
            # Made before the server is: it prepares the store.
            served = ServedModel.of(
                rag.engine, f"http://127.0.0.1:{port}", timeout_s=options.patience
            )
            with served, running(command, port, environment=environment, log=log) as address:
                result = _measure(served, address, questions, options, generation)
    print(json.dumps({**result, "ray_equal": ray_equal}))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=16, help="questions of a row, at most 40")
    parser.add_argument("--documents", type=int, help="of the demo's, for a quick try")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for one answer")
    return parser.parse_args()


def _question(rag: CoinRAG, question: str, generation: GenerationConfig) -> Question:
    """What is retrieved for a question, as text and as spans, both of the same chunks."""
    engine = rag.engine
    spans = [span.ref for span in rag.retrieve(question)]
    chunks = dict.fromkeys(span.ref.chunk_id for span in rag.retrieve(question, "chunk"))
    text = tuple(token for it in chunks for token in engine.catalog.chunk(it).token_ids)
    head, tail = Text(engine.prompt.head), Text(engine.prompt.tail(question))
    roads: dict[str, list[Piece]] = {
        "plain": [head, Text(text), tail],
        "composed": [head, *engine.prompt.context(spans), tail],
    }
    return Question(roads=roads, own=engine.answer(question, spans, generation).text)


def _sizes(rag: CoinRAG, questions: Sequence[Question], road: str) -> int:
    """Tokens of a prompt, on average."""
    return round(sum(len(p) for it in questions for p in it.roads[road]) / len(questions))


def _measure(
    served: ServedModel,
    address: str,
    questions: Sequence[Question],
    options: argparse.Namespace,
    generation: GenerationConfig,
) -> dict[str, Any]:
    alone: dict[str, list[str | None]] = {}
    wrong = hung = text = 0
    clients: dict[str, dict[str, dict[str, float]]] = {}
    for road in ROADS:  # what is compiled or opened once is not measured
        _ask(served, [questions[0].roads[road]], 1, generation)
    for n in sorted({1, *options.clients}):
        row: dict[str, dict[str, float]] = {}
        for road in ROADS:
            httpx.post(f"{address}/reset_prefix_cache", timeout=60).raise_for_status()
            begin = time.perf_counter()
            said = _ask(served, [it.roads[road] for it in questions], n, generation)
            seconds = time.perf_counter() - begin
            if n == 1:
                alone[road] = [it.text for it in said]
            wrong += sum(
                it.text is not None and it.text != expected
                for it, expected in zip(said, alone[road], strict=True)
            )
            hung += sum(it.text is None for it in said)
            text += road == "composed" and sum(it.fell_back for it in said)
            times = sorted(it.ttft_ms for it in said if it.text is not None)
            row[road] = {
                "rps": round(len(times) / seconds, 3),
                "ttft_p50_ms": _percentile(times, 50),
                "ttft_p99_ms": _percentile(times, 99),
            }
        clients[str(n)] = row
        print(f"{n} clients: {json.dumps(row)}", flush=True)
    equal = sum(said == it.own for said, it in zip(alone["composed"], questions, strict=True))
    return {
        "clients": clients,
        "equal_answers": equal,
        "answers": len(questions),
        "wrong": wrong,
        "text": text,
        "hung": hung,
    }


def _ask(
    served: ServedModel, prompts: Sequence[list[Piece]], n: int, generation: GenerationConfig
) -> list[Said]:
    """All prompts, by so many clients at once."""

    def one(pieces: list[Piece]) -> Said:
        stream = served.stream_pieces(pieces, generation)
        try:
            for _ in stream:
                pass
        except ServingError as error:
            print(error, flush=True)
            return Said(text=None, ttft_ms=math.inf, fell_back=False)
        answer = stream.answer
        return Said(
            text=answer.text, ttft_ms=answer.timings.ttft_ms, fell_back=bool(stream.fallback)
        )

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, prompts))


def _percentile(times: Sequence[float], q: int) -> float:
    """The nearest rank."""
    if not times:
        return math.inf
    return round(times[min(len(times) - 1, math.ceil(q / 100 * len(times)) - 1)], 1)


if __name__ == "__main__":
    main()
