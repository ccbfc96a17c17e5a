from __future__ import annotations

import pytest

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.langchain import ChatCoinRAG, CoinRAGLLM, CoinRAGRetriever
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION


@pytest.fixture
def llm(filled: CoinRAG) -> CoinRAGLLM:
    return CoinRAGLLM(rag=filled, max_tokens=8)


async def test_it_goes_on_after_a_text(llm: CoinRAGLLM, filled: CoinRAG):
    expected = "".join(filled.engine.complete("The organ", GenerationConfig(max_new_tokens=8)))
    assert llm.invoke("The organ") == expected != ""
    assert "".join(llm.stream("The organ")) == expected
    assert await llm.ainvoke("The organ") == expected
    assert "".join([piece async for piece in llm.astream("The organ")]) == expected
    assert llm.batch(["The organ"] * 3) == [expected] * 3


def test_marked_passages_are_read_as_kv(llm: CoinRAGLLM, filled: CoinRAG):
    (document, *_) = CoinRAGRetriever(rag=filled).invoke(QUESTION)
    *_, last = llm._stream(f"{document.page_content} was")
    assert last.generation_info["coinrag"]["spans"] == [
        [document.metadata[f"coinrag_{key}"] for key in ("chunk_id", "start", "stop")]
    ]


def test_options_and_caches_are_as_for_the_chat_model(llm: CoinRAGLLM, filled: CoinRAG):
    whole = llm.invoke("Who?", max_tokens=30)
    stop = whole[len(whole) // 2 :][:3]
    assert llm.invoke("Who?", max_tokens=30, stop=[stop]) == whole[: whole.index(stop)].rstrip()
    with pytest.raises(ConfigError, match="num_beams: no such option"):
        llm.invoke("Who?", num_beams=2)
    assert llm.get_num_tokens("The organ") == ChatCoinRAG(rag=filled).get_num_tokens("The organ")
    other = CoinRAGLLM(rag=filled, max_tokens=9)
    assert other._identifying_params != llm._identifying_params
