"""Where answers behind C2KV's slots lose against whole chunks, and what training's objectives can tell.

By place in the answer (its first token, those in between, the one that ends it): how likely it is behind
slots and behind the same chunks whole, and how far the two are from each other. With `--gradients N`, of
N examples the gradients of each objective: the share of their squared length that all examples have in
common (the rest is noise, which only more examples average out), and the share that they have in common
with another objective's. The last line of stdout is one JSON object.

    python benchmarks/slot_signal.py hotpotqa.jsonl musique.jsonl --extractor demo --gradients 44
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy

from coinrag_integrations.engine import load_model
from coinrag_integrations.engine.adapter import with_adapter
from coinrag_integrations.errors import BudgetError
from coinrag_integrations.evaluation.data import Example, read_examples
from coinrag_integrations.settings import (
    load_adapter,
    make_embedder,
    read_extractor,
    resolve_model,
)
from coinrag_integrations.training import ReaderConfig
from coinrag_integrations.training.batches import online_logits
from coinrag_integrations.training.examples import mixed
from coinrag_integrations.training.samples import Sample, Sampler
from coinrag_integrations.training.slots import SlotLearner

OBJECTIVES = ("ce", "kl", "kl_question", "reconstruction")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--adapter", default="demo", help="'' for none")
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--extractor", help="a folder, or 'demo'; default: untrained")
    parser.add_argument("--ratio", type=int, default=4)
    parser.add_argument("--examples", type=int, default=80)
    parser.add_argument("--gradients", type=int, default=0)
    options = parser.parse_args()
    model = replace(load_model(resolve_model(options.model)), name=options.model)
    adapter = load_adapter(options.adapter)
    reader = model if adapter is None else with_adapter(model, adapter)
    config = replace(ReaderConfig.slot_recipe((options.ratio,)), **dict.fromkeys(OBJECTIVES, 1.0))
    learner = SlotLearner(model, config, reader)
    if options.extractor:
        learner.start_from(read_extractor(options.extractor, model))
    sampler = Sampler.of(model, make_embedder(options.embedder), config, reader=reader)
    samples = drawn(sampler, mixed(read_examples(options.data), config))
    report = {"places": by_place(learner, islice(samples, options.examples))}
    print(f"{'':16}{'tokens':>8}{'slots':>10}{'whole':>10}{'distance':>10}")
    for place, row in report["places"].items():
        print(f"{place:16}{row.pop('tokens'):8.0f}", *(f"{it:9.3f}" for it in row.values()))
    if options.gradients:
        report["signal"] = signal(gradients(learner, islice(samples, options.gradients)))
        print(f"{'':16}", *(f"{it:>14}" for it in OBJECTIVES))
        for name, row in report["signal"].items():
            print(f"{name:16}", *(f"{it:14.4f}" for it in row.values()))
    print(json.dumps({"extractor": options.extractor, "ratio": options.ratio, **report}))


def drawn(sampler: Sampler, examples: Iterator[Example]) -> Iterator[Sample]:
    """Samples of the examples that fit, without end."""
    for number in count():
        try:
            yield sampler.sample(next(examples), Random(number))
        except BudgetError:
            continue


@torch.no_grad()
def by_place(learner: SlotLearner, samples: Iterator[Sample]) -> dict[str, dict[str, float]]:
    """Nats by place in the answer. Each answer's are a mean over its tokens: the places add up to it.

    "slots" and "whole" are cross-entropies, "distance" is the Kullback-Leibler divergence.
    """
    names = ("tokens", "slots", "whole", "distance")
    places = {it: dict.fromkeys(names, 0.0) for it in ("first", "between", "end")}
    n = 0
    for sample in samples:
        n += 1
        kv = learner.composed(sample.kv)
        logits, answers, _ = online_logits(
            learner.reader.hf, [sample], [kv], learner.base.layer_windows
        )
        teacher = learner.teacher([sample])
        slots, whole = (
            cross_entropy(it[0], answers[0], reduction="none") for it in (logits, teacher)
        )
        ours, theirs = logits[0].log_softmax(-1), teacher[0].log_softmax(-1)
        distance = (theirs.exp() * (theirs - ours)).sum(-1)
        last = len(slots) - 1
        for i, row in enumerate(
            zip(slots.tolist(), whole.tolist(), distance.tolist(), strict=True)
        ):
            place = places["end" if i == last else "between" if i else "first"]
            place["tokens"] += 1
            for name, nats in zip(names[1:], row, strict=True):
                place[name] += nats / len(slots)
    return {
        place: {name: it if name == "tokens" else it / n for name, it in row.items()}
        for place, row in places.items()
    }


def gradients(learner: SlotLearner, samples: Iterator[Sample]) -> dict[str, torch.Tensor]:
    """Of each objective the gradients of single examples: fp32 [N, weights]."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in OBJECTIVES}
    for sample in samples:
        terms = learner.terms([sample])
        for name in OBJECTIVES:
            parts = torch.autograd.grad(
                terms[name].sum(), learner.weights, retain_graph=True, allow_unused=True
            )
            flat = [
                torch.zeros_like(w) if it is None else it
                for it, w in zip(parts, learner.weights, strict=True)
            ]
            found[name].append(torch.cat([it.flatten() for it in flat]))
    return {name: torch.stack(it) for name, it in found.items()}


def signal(gradients: Mapping[str, torch.Tensor]) -> dict[str, dict[str, float]]:
    """What two objectives' gradients have in common over examples: the mean product of two examples'.

    Each gradient is of length 1, so that no example counts more than another. Of an objective with
    itself it is the share of the squared length that is no noise.
    """
    units = {name: it / it.norm(dim=1, keepdim=True) for name, it in gradients.items()}

    def common(a: torch.Tensor, b: torch.Tensor) -> float:
        products = a @ b.T
        n = len(products)
        return float((products.sum() - products.diag().sum()) / (n * (n - 1)))

    return {a: {b: common(units[a], units[b]) for b in OBJECTIVES} for a in OBJECTIVES}


if __name__ == "__main__":
    main()
