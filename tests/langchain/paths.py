"""Every way to an answer: what may be asked, and how it may be called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from coinrag_integrations.engine import GenerationConfig
from coinrag_integrations.langchain import (
    ChatCoinRAG,
    CoinRAGGenerator,
    CoinRAGLLM,
    CoinRAGRetriever,
    create_coinrag_chain,
)
from coinrag_integrations.rag import CoinRAG
from tests.adapters import QUESTION

ASK = ChatPromptTemplate.from_messages(
    [("system", "Answer from:\n{context}"), ("human", "{input}")]
)
KINDS = ("chat", "llm", "lcel", "stuff", "generator", "chain")


def runnable(rag: CoinRAG, kind: str, n: int = 8) -> tuple[Any, Any]:
    """A runnable that answers in at most `n` tokens, and what to call it with."""
    chat = ChatCoinRAG(rag=rag, max_tokens=n)
    own = GenerationConfig(max_new_tokens=n)
    found = CoinRAGRetriever(rag=rag, k=3).invoke(QUESTION)
    prompt = ChatPromptTemplate.from_messages([("human", "{input}")])
    return {
        "chat": lambda: (chat, QUESTION),
        "llm": lambda: (CoinRAGLLM(rag=rag, max_tokens=n), QUESTION),
        "lcel": lambda: (prompt | chat | StrOutputParser(), {"input": QUESTION}),
        "stuff": lambda: (
            create_stuff_documents_chain(chat, ASK),
            {"context": found, "input": QUESTION},
        ),
        "generator": lambda: (
            CoinRAGGenerator(rag=rag, generation=own),
            {"question": QUESTION, "documents": found},
        ),
        "chain": lambda: (create_coinrag_chain(rag, k=3, generation=own), QUESTION),
    }[kind]()


def words(value: Any) -> str:
    """The text of an answer, or of a part of one."""
    if isinstance(value, dict):
        value = value.get("answer", "")
    return value if isinstance(value, str) else str(value.content)


def ways(it: Any, value: Any, **options: Any) -> dict[str, Callable[[], Any]]:
    """Each way of calling a runnable, to its text."""

    async def asynced() -> str:
        return words(await it.ainvoke(value, **options))

    async def astreamed() -> str:
        return "".join([words(part) async for part in it.astream(value, **options)])

    async def abatched() -> str:
        return words((await it.abatch([value], **options))[0])

    async def later(work: Callable[[], str]) -> str:
        return await asyncio.to_thread(work)

    return {
        "invoke": lambda: later(lambda: words(it.invoke(value, **options))),
        "stream": lambda: later(lambda: "".join(map(words, it.stream(value, **options)))),
        "batch": lambda: later(lambda: words(it.batch([value], **options)[0])),
        "bind": lambda: later(lambda: words(it.bind(**options).invoke(value))),
        "ainvoke": asynced,
        "astream": astreamed,
        "abatch": abatched,
    }
