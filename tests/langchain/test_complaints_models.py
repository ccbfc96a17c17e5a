"""What users of LangChain complained about elsewhere, as tests: calls, prompts, errors and streams.

The table of all complaints stands in test_complaints.py. LC is langchain-ai/langchain, LI
run-llama/llama_index, HF huggingface/transformers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from tokenizers.processors import TemplateProcessing

from coinrag_integrations.engine import AnswerStream, Engine, EngineConfig
from coinrag_integrations.engine import generation as decoding
from coinrag_integrations.engine.model import describe_model
from coinrag_integrations.errors import BudgetError, ConfigError
from coinrag_integrations.langchain import (
    ChatCoinRAG,
    CoinRAGGenerator,
    CoinRAGLLM,
    CoinRAGRetriever,
)
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex, open_client
from tests.adapters import QUESTION, leaving_the_loop_free
from tests.langchain.paths import KINDS, runnable, ways, words
from tests.tiny import CHAT_TEMPLATE, HashEmbedder, byte_tokenizer, tiny_hf

# -- the event loop --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_event_loop_stays_free_on_every_path(
    filled: CoinRAG, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """LC 30704: async methods that block. Tokens that take longer than the ticker's tick show it."""
    it, value = runnable(filled, kind)
    expected, choose = words(it.invoke(value)), decoding._choose

    def slow(*args: Any) -> list[int]:
        time.sleep(0.04)
        return choose(*args)

    async def streamed() -> str:
        return "".join([words(part) async for part in it.astream(value)])

    monkeypatch.setattr(decoding, "_choose", slow)
    assert words(await leaving_the_loop_free(it.ainvoke(value))) == expected
    assert await leaving_the_loop_free(streamed()) == expected


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_cancelling_stops_the_generation_on_every_path(
    filled: CoinRAG, opened: list[AnswerStream], kind: str, streaming: bool
):
    it, value = runnable(filled, kind, 3000)

    async def work() -> None:
        if streaming:
            async for _ in it.astream(value):
                pass
        else:
            await it.ainvoke(value)

    task = asyncio.create_task(work())
    while not opened or not opened[0].answer.usage.generated:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.1)  # what is computed at that moment ends
    (stream,) = opened
    n = stream.answer.usage.generated
    await asyncio.sleep(0.1)
    assert stream.answer.usage.generated == n < 3000
    assert list(stream) == []


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "llm"])
async def test_options_of_a_call_take_effect_every_way(filled: CoinRAG, kind: str):
    """LC 19770, 1717: local models that ignore `stop` or other options where they stream."""
    it, value = runnable(filled, kind, 4)
    whole, encode = words(it.invoke(value, max_tokens=30)), filled.engine.model.tokenizer.encode
    threes = (whole[i : i + 3] for i in range(len(whole) // 2, len(whole) - 2))
    stop = next(it for it in threes if len(encode(it).ids) > 1)  # ends within a token, or after two
    cut = whole[: whole.index(stop)].rstrip()
    hot = {"max_tokens": 30, "temperature": 5.0, "seed": 3}
    sampled = words(it.invoke(value, **hot))
    assert len({cut, whole, sampled, words(it.invoke(value))}) == 4
    for options, expected in (
        ({"max_tokens": 30}, whole),
        ({"max_tokens": 30, "stop": [stop]}, cut),
        ({"max_tokens": 30, "stop": ["never said", stop]}, cut),
        (hot, sampled),
    ):
        for name, call in ways(it, value, **options).items():
            assert await call() == expected, (name, options)


@pytest.mark.parametrize("kind", ["chat", "llm", "generator", "chain", "retriever"])
async def test_unknown_options_are_refused_every_way(filled: CoinRAG, kind: str):
    retriever = CoinRAGRetriever(rag=filled), QUESTION
    it, value = retriever if kind == "retriever" else runnable(filled, kind)
    for name, call in ways(it, value, num_beams=2).items():
        with pytest.raises((ConfigError, TypeError), match="num_beams"):
            await call()
        assert name


@pytest.mark.parametrize("made", [CoinRAGRetriever, CoinRAGLLM, CoinRAGGenerator])
def test_unknown_fields_are_refused(filled: CoinRAG, made: Any):
    """`search_kwargs={"k": 3}` of another retriever would otherwise find ten."""
    with pytest.raises(ValueError, match="search_kwargs"):
        made(rag=filled, search_kwargs={"k": 3})


# -- prompts ---------------------------------------------------------------------------------------


def test_a_prompt_begins_once(tmp_path: Path):
    """HF 31796, 37686: a rendered template that is tokenised again begins twice."""
    hf = byte_tokenizer()
    hf.bos_token, hf.chat_template = "<|endoftext|>", "{{ bos_token }}" + CHAT_TEMPLATE
    (begin,) = hf.convert_tokens_to_ids(["<|endoftext|>"])
    hf.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    assert hf("a").input_ids[0] == begin  # a tokenizer that puts its token in front of anything
    model = describe_model("tiny", tiny_hf(), hf)
    index = SpanIndex(open_client(None), HashEmbedder(), f"t{uuid4().hex}")
    with Engine(model, tmp_path, EngineConfig(chunk_tokens=32, kept_bytes=0)) as engine:
        rag = CoinRAG(engine, index)
        turns = [("system", "Be short."), ("human", "Who?"), ("ai", "Me."), ("human", "And when?")]
        shown = [
            {"role": {"human": "user", "ai": "assistant"}.get(role, role), "content": said}
            for role, said in turns
        ]
        expected = hf.apply_chat_template(
            shown, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        assert expected.count(begin) == 1
        chat = ChatCoinRAG(rag=rag, max_tokens=1)
        assert chat.invoke(turns).usage_metadata["input_tokens"] == len(expected)
        # Of a text the model sees one more token than counted: the one that begins it.
        llm = CoinRAGLLM(rag=rag, max_tokens=1)
        said = llm.generate(["Who?"]).generations[0][0]
        assert said.generation_info["coinrag"]["usage"]["online"] == llm.get_num_tokens("Who?") + 1
        assert chat.get_num_tokens("Who?") == len(hf("Who?", add_special_tokens=False).input_ids)
        assert (engine.prompt.head[0], engine.prompt.head.count(begin)) == (begin, 1)


async def test_what_does_not_fit_is_refused_with_the_numbers(filled: CoinRAG):
    """LI 6465, 14722: a prompt that is too long is cut, or fails deep inside."""
    window = filled.engine.model.window
    for kind in KINDS:
        it, value = runnable(filled, kind)
        long = QUESTION * 600
        if isinstance(value, dict):
            value = {k: long if isinstance(v, str) else v for k, v in value.items()}
        else:
            value = long
        for name, call in ways(it, value).items():
            with pytest.raises(BudgetError, match=f"exceed the model's window of {window}"):
                await call()
            assert name
        again, value = runnable(filled, kind)
        assert words(again.invoke(value))


# -- errors and streams ----------------------------------------------------------------------------


class Errors(BaseCallbackHandler):
    """Keeps the errors that it is told of."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def on_llm_error(self, error: BaseException, **_: Any) -> None:
        self.errors.append(error)

    on_chain_error = on_llm_error


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_while_generating_reaches_every_reader(
    filled: CoinRAG, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """HF 22576: a thread that dies leaves a stream that waits for ever."""
    it, value = runnable(filled, kind)
    expected, choose = words(it.invoke(value)), decoding._choose
    for name, call in ways(it, value).items():
        count = itertools.count()

        def fails(*args: Any, at: Any = count) -> list[int]:
            if next(at) == 2:
                raise RuntimeError("the device is gone")
            return choose(*args)

        with monkeypatch.context() as patch:
            patch.setattr(decoding, "_choose", fails)
            with pytest.raises(RuntimeError, match="the device is gone"):
                await asyncio.wait_for(call(), 30)
        assert words(it.invoke(value)) == expected, name
    heard = Errors()
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "_choose", _gone)
        with pytest.raises(RuntimeError, match="gone"):
            it.invoke(value, config={"callbacks": [heard]})
    assert {str(error) for error in heard.errors} == {"gone"}


def _gone(*_: Any) -> list[int]:
    raise RuntimeError("gone")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_first_piece_comes_first(filled: CoinRAG, opened: list[AnswerStream], kind: str):
    """LC 2309, 2918: streams that come in one piece, when everything is there."""
    it, value = runnable(filled, kind, 24)
    whole = words(it.invoke(value))
    opened.clear()
    for part in (parts := it.stream(value)):
        if words(part):
            break
    assert opened[-1].answer.usage.generated < 5
    assert words(part) + "".join(map(words, parts)) == whole
    pieces, n_generated = [], []
    async for part in it.astream(value):
        pieces.append(words(part))
        n_generated.append(opened[-1].answer.usage.generated)
    assert "".join(pieces) == whole
    assert len(set(n_generated)) > 3


@pytest.mark.parametrize("kind", KINDS)
async def test_letters_of_several_tokens_come_whole(
    filled: CoinRAG, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """LI 16024, 13289: half an emoji is shown as \N{REPLACEMENT CHARACTER}."""
    text = "Tea 🫖, 👩‍👩‍👧 e\u0301 and 灯台."
    tokenizer = filled.engine.model.tokenizer
    ids = [*tokenizer.encode(text).ids, *tokenizer.encode_template("<|im_end|>")]
    assert len(ids) > len(text) + 10
    it, value = runnable(filled, kind, len(ids))

    def choose(choosers: Any, logits: torch.Tensor) -> list[int]:
        """What a model would say that knows about tea."""
        (chooser,) = choosers
        chooser.said = getattr(chooser, "said", -1) + 1
        return [ids[chooser.said]]

    monkeypatch.setattr(decoding, "_choose", choose)
    for name, call in ways(it, value).items():
        assert await call() == text, name
    for pieces in (
        [words(part) for part in it.stream(value)],
        [words(part) async for part in it.astream(value)],
    ):
        assert len(pieces) > 10
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
