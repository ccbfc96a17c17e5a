"""The store's model as a LangChain completion LLM. `ChatCoinRAG` is what most applications want."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict, Field

from coinrag_integrations import _adapters
from coinrag_integrations.engine import Answer, strip_handles
from coinrag_integrations.langchain._served import Served, Stream
from coinrag_integrations.rag import CoinRAG


class CoinRAGLLM(Served, BaseLLM):
    """Goes on after a text, without a chat template; marked passages are read as KV.

    With `base_url` the model runs in a vLLM server: see `ChatCoinRAG`.

    >>> CoinRAGLLM(rag=rag, max_tokens=32).invoke("The tidal organ was built by")
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    rag: CoinRAG = Field(exclude=True, repr=False)
    max_tokens: int = Field(default=256, gt=0)
    temperature: float = Field(default=0.0, ge=0)
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    use_kv: bool = True

    @property
    def _llm_type(self) -> str:
        return "coinrag-completion"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes an answer: two models that differ share no cache."""
        engine = self.rag.engine
        return {
            "model_name": engine.model.name,
            "fingerprint": engine.fingerprint.digest,
            "adapter": engine.reader.adapter,
            "scope": str(engine.scope),
            "base_url": self.base_url,
            **_adapters.call_options(self, {}, also=("stop",)),
        }

    def get_token_ids(self, text: str) -> list[int]:
        """The model's own tokens of a text; handles are none."""
        return list(self.rag.engine.model.tokenizer.encode(strip_handles(text)).ids)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        generations = []
        for prompt in prompts:
            for _ in (stream := self._open(prompt, stop, kwargs)):
                pass
            generations.append([_generation(stream.answer)])
        return LLMResult(generations=generations)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        generations = []
        for prompt in prompts:
            stream = await asyncio.to_thread(self._open, prompt, stop, kwargs)
            async with aclosing(_adapters.off_loop(stream)) as pieces:
                async for _ in pieces:
                    pass
            generations.append([_generation(stream.answer)])
        return LLMResult(generations=generations)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        stream = self._open(prompt, stop, kwargs)
        try:
            for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            stream.close()
        yield GenerationChunk(text="", generation_info=_said_of(stream.answer))

    def _open(self, prompt: str, stop: list[str] | None, kwargs: dict[str, Any]) -> Stream:
        options = _adapters.call_options(self, kwargs)
        generation = _adapters.generation_of(options, self.stop if stop is None else stop)
        model = self._answering.of(self.rag.engine)
        return model.complete(prompt, generation, use_kv=options["use_kv"])


def _said_of(answer: Answer) -> dict[str, Any]:
    return {"coinrag": _adapters.report_of(answer)}


def _generation(answer: Answer) -> Generation:
    return Generation(text=strip_handles(answer.text), generation_info=_said_of(answer))
