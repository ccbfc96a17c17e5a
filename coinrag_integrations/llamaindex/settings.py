"""LlamaIndex's global settings, for applications that build their engines from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llama_index.core.settings import Settings

from coinrag_integrations.llamaindex.llm import CoinRAGLLM
from coinrag_integrations.llamaindex.prompt_helper import MarkedPromptHelper, count_with
from coinrag_integrations.rag import CoinRAG


def use_coinrag(rag: CoinRAG, **fields: Any) -> CoinRAGLLM:
    """Make the store's model LlamaIndex's default LLM, and count tokens as it does.

    `fields` are those of the `CoinRAGLLM`, which is returned. Nothing else of this package touches
    `Settings`. Chat engines and agents of LlamaIndex take their prompt helper from there.
    """
    llm = CoinRAGLLM.from_defaults(rag, **fields)
    Settings.llm = llm
    Settings.tokenizer = count_with(rag)
    Settings.prompt_helper = MarkedPromptHelper.from_rag(rag, llm)
    return llm


@contextmanager
def using_coinrag(rag: CoinRAG, **fields: Any) -> Iterator[CoinRAGLLM]:
    """Like `use_coinrag`, within a block; afterwards everything is as before."""
    names = ("_llm", "_tokenizer", "_prompt_helper")
    before = {name: getattr(Settings, name) for name in names}
    try:
        yield use_coinrag(rag, **fields)
    finally:
        for name, value in before.items():
            setattr(Settings, name, value)
