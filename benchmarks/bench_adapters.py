"""What frameworks add to the time to the first piece of an answer, on the demo's corpus and model.

Rows, each question in turn: `rag` (`CoinRAG.stream`: retrieval and the engine), `llamaindex`
(`CoinRAGQueryEngine`, streaming), `handles` (the same passages marked in a prompt, through `CoinRAGLLM`:
no retrieval). `turn` are the later turns of a conversation, `turn-fresh` the same with nothing kept from
the turns before (retrieval is left out of both). The last line of stdout is one JSON object with P50,
mean and P99 of each, and what LlamaIndex adds, question by question.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from coinrag_integrations.demo.data import demo_documents, demo_questions
from coinrag_integrations.engine import GenerationConfig, Message, mark
from coinrag_integrations.evaluation.ttft import Spread, describe_machine
from coinrag_integrations.llamaindex import CoinRAGQueryEngine
from coinrag_integrations.rag import CoinRAG

ONE = GenerationConfig(max_new_tokens=1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=61)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="coinrag-bench-") as folder,
        CoinRAG.open(folder, model="demo", generation=ONE) as rag,
    ):
        rag.add(demo_documents()[: options.documents])
        questions = [question.question for question in demo_questions()]
        times = _measure(rag, questions, options.rounds)
    spreads = {name: Spread.of(values) for name, values in times.items()}
    added = [b - a for a, b in zip(times["rag"], times["llamaindex"], strict=True)]
    for name, spread in spreads.items():
        print(f"{name:12}{spread.p50:9.2f} ms P50{spread.mean:9.2f} mean{spread.p99:9.2f} P99")
    print(
        json.dumps(
            {
                "ms": {name: asdict(spread) for name, spread in spreads.items()},
                "llamaindex_adds_ms": asdict(Spread.of(added)),
                "n": len(added),
                "machine": describe_machine(torch.device("cpu")),
            }
        )
    )


def _measure(rag: CoinRAG, questions: list[str], rounds: int) -> dict[str, list[float]]:
    engine = CoinRAGQueryEngine.from_args(rag, generation=ONE, streaming=True)
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for i, question in enumerate(questions):
            prompt = _marked(rag, question)
            rows: dict[str, Callable[[], Iterator[str]]] = {
                "rag": lambda q=question: rag.stream(q, generation=ONE),
                "llamaindex": lambda q=question: iter(engine.query(q).response_gen),
                "handles": lambda p=prompt: rag.engine.chat(p, ONE),
            }
            # Taking turns in both orders, so that neither always comes first.
            for name in [*rows][:: 1 if (number + i) % 2 else -1]:
                rag.engine._conversations.kept.forget()
                spent = _first(rows[name])
                if number:
                    times.setdefault(name, []).append(spent)
        for name, spent in _turns(rag, questions[:4]):
            if number:
                times.setdefault(name, []).append(spent)
    return times


def _turns(rag: CoinRAG, questions: list[str]) -> Iterator[tuple[str, float]]:
    kept = rag.engine._conversations.kept
    for name in ("turn", "turn-fresh"):
        kept.forget()
        turns = [Message(role="system", content=rag.engine.config.prompt.system)]
        for question in questions:
            turns.append(_marked(rag, question)[-1])
            if name == "turn-fresh":
                kept.forget()
            spent = _first(lambda t=tuple(turns): rag.engine.chat(t, ONE))
            if len(turns) > 2:
                yield name, spent
            turns.append(Message(role="assistant", content="It is as the passages say."))


def _marked(rag: CoinRAG, question: str) -> list[Message]:
    """The store's prompt with marked passages."""
    handle, template = rag.engine.handles.handle, rag.engine.config.prompt
    passages = "\n".join(mark(handle(span.ref), span.text) for span in rag.retrieve(question))
    user = template.user.replace("{context}", passages).replace("{question}", question)
    return [Message(role="system", content=template.system), Message(role="user", content=user)]


def _first(start: Callable[[], Iterator[str]]) -> float:
    begin = time.perf_counter()
    stream = start()
    next(stream, None)
    spent = (time.perf_counter() - begin) * 1e3
    for _ in stream:  # to its end, so that nothing is left open
        pass
    return spent


if __name__ == "__main__":
    main()
