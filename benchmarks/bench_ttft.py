"""Where the time to the first token goes, against what no engine can beat. Random weights and KV.

Speed depends on a model's shape alone, so nothing is fetched. A question of 32 tokens is asked behind
spans of 19 tokens. Rows, each measured once a round, in turn:

    ttft           all of it, by the engine: spans read, copied, placed, the question computed
    ttft-new       the same with a number of tokens that was never seen before
    ttft-resident  the same with the entries in (pinned) host memory already: no store
    full           every token from scratch, by the model alone: what a cache saves
    read           spans from the store (in the page cache) into host memory
    copy           host memory to the GPU, as the engine does it
    angles         cosines and sines of all entries' positions
    place          entries to rows of the prefix
    prefill        the question behind a prefix that is there
    launch         what the host needs for its forward pass: near `prefill`, the GPU waits for Python
    decode         each further token (`--decode`)
    token          one token behind nothing: the weights, as the model reads them
    weights        every weight matrix that a token needs, summed: the floor of `prefill`
    bytes          the entries as one flat copy: the floor of `read`, `copy` and `place`

The floor is `weights` + `bytes`; `moving` is `read` + `copy` + `place`. With `--execution` the engine's
rows are there a second time, run that way. The last line of stdout is one JSON object.

On a CPU, run it with OMP_WAIT_POLICY=passive (see bench_place.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from coinrag_integrations.engine import (
    Engine,
    EngineConfig,
    GenerationConfig,
    LoadedModel,
    describe_model,
    hf,
)
from coinrag_integrations.engine.generation import generate
from coinrag_integrations.engine.model import choose_device, choose_dtype
from coinrag_integrations.engine.plan import PrefixPlan, Text, plan_prefix
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from coinrag_integrations.engine.runner import EagerRunner
from coinrag_integrations.engine.timings import Stopwatch, Timings
from coinrag_integrations.engine.upload import Uploader
from coinrag_integrations.evaluation.ttft import Spread, describe_machine
from coinrag_integrations.types import ChunkId, Span, SpanRef

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPES: dict[str, tuple[type, float, tuple[int, ...]]] = {  # class, theta of RoPE, sizes
    "qwen2-7b": (Qwen2Config, 1e6, (3584, 28, 28, 4, 18944, 152_064, False)),
    "smollm2-135m": (LlamaConfig, 1e5, (576, 30, 9, 3, 1536, 49_152, True)),
    "tiny": (LlamaConfig, 1e4, (64, 3, 4, 2, 96, 512, False)),
}
TOKENS = (465, 855, 3955)
QUESTION, CHUNK, SPAN, SPANS_OF_CHUNK, WARM_UP, DECODED = 32, 512, 19, 8, 3, 32
ONE_TOKEN, SOME_TOKENS = (GenerationConfig(max_new_tokens=n) for n in (1, DECODED + 1))
# What a row's time is: the host's until the GPU is idle again, or until all is launched; the GPU's own;
# or what the step returns.
Clock = Literal["host", "launch", "gpu", "returned"]
Rows = dict[str, tuple[Clock, Callable[[], Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some spans, and what is there of them before anything is timed."""

    refs: list[SpanRef]
    plan: PrefixPlan
    question: tuple[int, ...]
    staged: torch.Tensor  # entries in host memory
    prefix: Prefix  # placed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kernels", default="auto", choices=("auto", "torch", "numba", "triton"))
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--execution", default="eager", choices=("eager", "compiled", "graph"))
    options = parser.parse_args()
    device = choose_device(options.device)
    name = options.shape or ("qwen2-7b" if device.type == "cuda" else "smollm2-135m")
    begin = time.perf_counter()
    model = random_model(name, device)
    config = EngineConfig(coverage="all", on_miss="raise", kernels=options.kernels)
    with tempfile.TemporaryDirectory(prefix="coinrag-bench-") as folder, ExitStack() as stack:
        engines = {
            execution: stack.enter_context(
                Engine(model, folder, replace(config, execution=execution))
            )
            for execution in dict.fromkeys(("eager", options.execution))
        }
        engine = engines["eager"]
        refs, ready = fill_store(engine, max(options.tokens)), time.perf_counter() - begin
        print(
            f"{name}, {model.layout.dtype}, kernels: {engine.kernels.name}; made in {ready:.0f} s"
        )
        results = {n: measure(engines, list(first(refs, n)), options) for n in options.tokens}
        report = {
            "shape": name,
            "dtype": str(model.layout.dtype),
            "question_tokens": QUESTION,
            "results": results,
            "rounds": options.rounds,
            "kernels": engine.kernels.name,
            "gate": asdict(engine.gate),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "torch": torch.__version__,
            "machine": describe_machine(model.device),
        }
    print(json.dumps(report))


def random_model(name: str, device: torch.device, window: int = 8192) -> LoadedModel:
    """A model of that shape, made where it will run, in the dtype that the engine would choose."""
    config_class, theta, sizes = SHAPES[name]
    config = config_class(
        **dict(zip(_SIZES, sizes, strict=True)),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=window,
        bos_token_id=None,
        eos_token_id=None,  # nothing ends an answer early
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=choose_dtype("auto", device))
    bytes_only = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(bytes_only, []))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return describe_model(name, model.eval(), PreTrainedTokenizerFast(tokenizer_object=core))


def fill_store(engine: Engine, n_tokens: int) -> list[SpanRef]:
    """Store chunks of random entries; spans of them that together hold at least `n_tokens`."""
    layout = engine.model.layout
    kv = torch.randn(layout.staged(CHUNK)).to(layout.dtype)
    ids = [ChunkId(f"{i:032x}") for i in range(-(-n_tokens // (SPANS_OF_CHUNK * SPAN)))]
    for chunk_id in ids:
        engine.store.put(chunk_id, kv, [Span(0, CHUNK)])
    starts = range(0, CHUNK, CHUNK // SPANS_OF_CHUNK)
    return [SpanRef(chunk_id, i, i + SPAN) for chunk_id in ids for i in starts]


def first(refs: Sequence[SpanRef], n_tokens: int) -> Iterator[SpanRef]:
    """The first spans that together hold `n_tokens`, the last of them cut."""
    for ref in refs:
        if n_tokens > 0:
            yield SpanRef(ref.chunk_id, ref.start, ref.start + min(len(ref), n_tokens))
        n_tokens -= len(ref)


def measure(
    engines: dict[str, Engine], refs: list[SpanRef], options: argparse.Namespace
) -> dict[str, Any]:
    """Every row for some spans, as plain values for JSON."""
    engine = engines["eager"]
    device, case = engine.model.device, prepare(engine, refs)
    rows: Rows = {}
    timings = {execution: list[Timings]() for execution in engines}
    for execution, each in engines.items():
        suffix = "" if execution == "eager" else f"-{execution}"
        theirs = answers(each, case, timings[execution], options.decode)
        rows |= {f"{row}{suffix}": step for row, step in theirs.items()}
    rows |= parts(engine, case)
    times: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(options.rounds + WARM_UP):
        for row, (clock, step) in rows.items():
            times[row].append(run(step, clock, device))
    spreads = {row: Spread.of(values[WARM_UP:]) for row, values in times.items()}
    n_bytes = {row: case.staged.nbytes for row in ("read", "copy", "bytes") if row in rows}
    n_bytes["place"] = 2 * case.staged.nbytes
    n_bytes["weights"] = sum(matrix.nbytes for matrix in needed(engine.model))
    for row, s in spreads.items():
        speed = f"{n_bytes[row] / s.p50 / 1e6:9.1f} GB/s" if row in n_bytes else ""
        times_ms = f"{s.p50:10.3f} P50{s.mean:10.3f} mean{s.p99:10.3f} P99"
        print(f"{case.plan.n_entries:6} {row:20}{times_ms}{speed}")
    p50 = {row: spread.p50 for row, spread in spreads.items()}
    p50 |= {"floor": p50["weights"] + p50["bytes"], "moving": p50["read"] + p50["place"]}
    p50["moving"] += p50.get("copy", 0)
    ratios = quotients(p50)
    print("       " + ", ".join(f"{ratio} {value}" for ratio, value in ratios.items()))
    return {
        "ms": {row: [s.p50, s.mean, s.p99] for row, s in spreads.items()},
        "first_ms": {row: round(values[0], 3) for row, values in times.items()},
        "bytes": n_bytes,
        "floor_ms": round(p50["floor"], 3),
        "ratios": ratios,
        "engine_ms": {execution: medians(kept) for execution, kept in timings.items()},
        "peak_gpu_mb": {row: peak_mb(rows[row][1], device) for row in ("ttft", "full")},
    }


def quotients(p50: dict[str, float]) -> dict[str, float]:
    """What the medians are multiples of."""
    ttfts = [row for row in p50 if row.startswith("ttft")]
    pairs = [(row, "floor") for row in ttfts] + [("full", row) for row in ttfts]
    pairs += [(row, "weights") for row in p50 if row.startswith("prefill")]
    pairs += [("prefill", "token"), ("moving", "ttft")]
    return {f"{a}/{b}": round(p50[a] / p50[b], 3) for a, b in pairs}


def medians(timings: list[Timings]) -> dict[str, float]:
    """Of the parts of `ttft`, by the engine's own account."""
    names = ("load_ms", "compose_ms", "prefill_ms", "ttft_ms")
    values = {name: [getattr(t, name) for t in timings[WARM_UP:]] for name in names}
    return {name: round(float(np.median(times)), 3) for name, times in values.items()}


def prepare(engine: Engine, refs: list[SpanRef]) -> Case:
    """Read and place some spans, with room for the question behind them."""
    model, device, plan = engine.model, engine.model.device, plan_prefix(refs)
    stage = engine.store.stage(refs, pin=device.type == "cuda")
    assert not engine.store.read(stage).errors, "every span must be there"
    staged = stage.entries(slice(None))
    assert isinstance(staged, torch.Tensor), "codec none"
    prefix = place(engine, plan, staged.to(device))
    return Case(
        refs=refs, plan=plan, question=tokens(model, QUESTION), staged=staged, prefix=prefix
    )


def place(engine: Engine, plan: PrefixPlan, entries: torch.Tensor) -> Prefix:
    """What the engine does to entries on the device, with room for a question and a token."""
    model, device = engine.model, engine.model.device
    kv = empty_kv(model.layout, plan.n_entries + QUESTION + 1, device)
    turns = model.rope.rotation(plan.positions(), device)  # perhaps while entries are on their way
    engine.kernels.place(entries, turns, kv, torch.arange(plan.n_entries, device=device))
    return Prefix(kv=kv, plans=(plan,))


def ask(engine: Engine, behind: Prefix, question: Sequence[int]) -> None:
    """The first token of an answer."""
    watch, static = Stopwatch(engine.model.device), engine.static
    list(generate(engine.model, behind, [question], ONE_TOKEN, watch, static))


def answers(engine: Engine, case: Case, timings: list[Timings], decode: bool) -> Rows:
    """Whole answers, and questions alone, as an engine computes them; `ttft` leaves its times."""
    uploader, n, unseen = Uploader.of(engine.model.device), case.plan.n_entries, count(1)

    def answer(n_tokens: int, generation: GenerationConfig = ONE_TOKEN) -> Timings:
        pieces = [*first(case.refs, n_tokens), Text(case.question)]
        stream = engine.stream_pieces(pieces, generation)
        for _ in stream:
            pass
        return stream.answer.timings

    def resident() -> None:
        ask(engine, place(engine, case.plan, uploader.upload(case.staged)), case.question)

    rows: Rows = {
        "ttft": ("host", lambda: timings.append(answer(n))),
        "ttft-new": ("host", lambda: answer(n - next(unseen))),
        "ttft-resident": ("host", resident),
        "prefill": ("host", lambda: ask(engine, case.prefix, case.question)),
    }
    if decode:
        rows["decode"] = ("returned", lambda: answer(n, SOME_TOKENS).decode_ms / DECODED)
    return rows


def parts(engine: Engine, case: Case) -> Rows:
    """What an answer is made of, each alone, and the floors."""
    model, device, n = engine.model, engine.model.device, case.plan.n_entries
    stage = engine.store.stage(case.refs, pin=device.type == "cuda")
    staged, there, uploader = case.staged, case.staged.to(device, copy=True), Uploader.of(device)
    slots, positions = torch.arange(n, device=device), case.plan.positions()
    turns, kv, matrices = model.rope.rotation(positions, device), case.prefix.kv, needed(model)
    nothing = Prefix(kv=empty_kv(model.layout, 2, device), plans=(plan_prefix([]),))
    everything = torch.tensor([tokens(model, n + QUESTION)], device=device)
    ids, at = torch.tensor([case.question]), torch.arange(n, n + QUESTION)[None]

    def full() -> int:
        return int(hf.next_logits(model.hf, everything, DynamicCache()).argmax())

    rows: Rows = {
        "full": ("host", full),
        "read": ("host", lambda: engine.store.read(stage)),
        "angles": ("host", lambda: model.rope.rotation(positions, device)),
        "place": ("gpu", lambda: engine.kernels.place(there, turns, kv, slots)),
        "token": ("host", lambda: ask(engine, nothing, case.question[:1])),
        "weights": ("gpu", lambda: [matrix.sum() for matrix in matrices]),
        "bytes": ("gpu", lambda: there.copy_(staged, non_blocking=True)),
    }
    if device.type == "cuda":
        runner = functools.partial(EagerRunner, model, case.prefix, QUESTION + 1)
        rows["copy"] = ("host", lambda: uploader.upload(staged))
        rows["launch"] = ("launch", lambda: runner().run(ids, at))
    return rows


def tokens(model: LoadedModel, n: int) -> tuple[int, ...]:
    """Some tokens that the model knows."""
    return tuple((7919 * i + 11) % model.hf.config.vocab_size for i in range(n))


def needed(model: LoadedModel) -> list[torch.Tensor]:
    """The matrices that every token is multiplied by, seen as fp32, which sums at full speed.

    Of an embedding only a few rows are read, unless it is the output's matrix, too.
    """
    embedding = model.hf.get_input_embeddings().weight
    tied = model.hf.get_output_embeddings().weight is embedding
    return [
        weight.detach().view(torch.float32)
        for weight in model.hf.parameters()
        if weight.ndim > 1 and (tied or weight is not embedding)
    ]


def run(step: Callable[[], Any], clock: Clock, device: torch.device) -> float:
    """Milliseconds of a step that begins on an idle device."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    if clock == "returned":
        return float(step())
    if on_gpu and clock == "gpu":
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        step()
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended)
    begin = time.perf_counter()
    step()
    if on_gpu and clock == "host":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def peak_mb(step: Callable[[], object], device: torch.device) -> int | None:
    """The most GPU memory that tensors take during a step, the model included."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) >> 20


if __name__ == "__main__":
    main()
