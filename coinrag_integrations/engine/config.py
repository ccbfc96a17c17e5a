"""The engine's options: frozen, and checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from coinrag_integrations.engine.chunking import CHUNK_TOKENS
from coinrag_integrations.engine.composer import OnMiss
from coinrag_integrations.engine.cost import Load
from coinrag_integrations.engine.encoder import Context
from coinrag_integrations.engine.forms import Coverage
from coinrag_integrations.engine.kernels import Implementation
from coinrag_integrations.engine.prompt import PromptTemplate
from coinrag_integrations.engine.runner import Execution
from coinrag_integrations.engine.store.codec import CODECS, CodecName
from coinrag_integrations.errors import ConfigError

MAX_RATIO = 32  # what C2KV was published for goes to 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How chunks are encoded and prefixes composed.

    `context` "alone" encodes chunks without the prompt, so they serve any prompt; "after_prompt"
    lets them see its head, which then is part of the fingerprint. `coverage` "nuggets" stores only
    the tokens of nuggets, "all" stores every token. For each of the ratios `c2kv`, slots of whole chunks
    are stored beside them. `codec` "none" stores entries as they are, "int8"
    and "int4" as codes of so many bits. `memory_bytes` of spans are kept in host memory once they were
    read, and `kept_bytes` of what conversations stood behind. `load` "auto" encodes a chunk anew when
    reading it would clearly take longer (from slow remote storage or a busy disk), "read" never does.
    `max_entries` bounds a prefix (None: the model's window does). `on_miss` says what
    happens when a span's KV is missing or corrupt. `execution` "compiled" runs questions and answers
    through `torch.compile` (tens of seconds the first time, needs a C++ compiler on a CPU), "graph" as
    CUDA graphs.
    """

    chunk_tokens: int = CHUNK_TOKENS
    context: Context = "alone"
    coverage: Coverage = "nuggets"
    c2kv: tuple[int, ...] = ()
    codec: CodecName = "none"
    on_miss: OnMiss = "recompute"
    max_entries: int | None = None
    memory_bytes: int = 0
    kept_bytes: int = 256 << 20
    load: Load = "auto"
    batch_tokens: int = 2048
    kernels: Implementation = "auto"
    execution: Execution = "eager"
    prompt: PromptTemplate = field(default_factory=PromptTemplate)

    def __post_init__(self) -> None:
        """Refuse unknown names; sizes are checked where they are used."""
        for name, value, known in (
            ("context", self.context, ("alone", "after_prompt")),
            ("coverage", self.coverage, ("nuggets", "all")),
            ("codec", self.codec, CODECS),
            ("load", self.load, ("auto", "read")),
            ("on_miss", self.on_miss, ("recompute", "raise")),
            ("execution", self.execution, ("eager", "compiled", "graph")),
            ("kernels", self.kernels, ("auto", "torch", "numba", "triton")),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}: use one of {', '.join(known)}")
        if any(not 2 <= ratio <= MAX_RATIO for ratio in self.c2kv) or len(set(self.c2kv)) != len(
            self.c2kv
        ):
            raise ConfigError(
                f"c2kv is {self.c2kv}: use different ratios from 2 to {MAX_RATIO} tokens a slot"
            )
        for name, size in (("memory_bytes", self.memory_bytes), ("kept_bytes", self.kept_bytes)):
            if size < 0:
                raise ConfigError(f"{name} is {size}: it cannot be negative")
