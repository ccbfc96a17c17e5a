"""The model card of an adapter: what it is for, what it was trained on, how it did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TITLES = {
    "lora": "Reader adapter",
    "full": "Reading model",
    "links": "Link tokens",
    "c2kv": "C2KV extractor",
}
_READS = {
    "spans": "composed KV of spans",
    "chunks": "composed KV of whole chunks",
    "text": "the same spans as text",
}


def model_card(
    base: str, config: Mapping[str, Any], report: Mapping[str, Any], data: Sequence[str]
) -> str:
    """Markdown. `data` names what the examples came from."""
    held = {int(step): loss for step, loss in report["held_out"].items()}
    best, minutes = report["best_step"], report["seconds"] / 60
    losses = "\n".join(f"| {step} | {loss:.3f} |" for step, loss in sorted(held.items()))
    sources = "\n".join(f"- {name}" for name in data) or "- not noted"
    return f"""# {_TITLES[config["kind"]]} for {base}

{_introduction(config)}

## Training

{report["step"]} steps of {config["batch"]} examples ({report["n_examples"]} in all), {minutes:.0f} min.
Nats a token of the answer on {config["n_held_out"]} held-out examples; the weights are those of
step {best}:

| step | held out |
|---:|---:|
{losses}

Data:

{sources}

Settings:

```json
{json.dumps(dict(config), indent=1)}
```
"""


def _introduction(config: Mapping[str, Any]) -> str:
    reads = _READS[config["context"]]
    if config["kind"] == "lora":
        return f"""LoRA of rank {config["rank"]} on all linear layers, for tokens that are computed online
(question and answer) behind {reads}. What is cached is the base model's and stays valid. It is in
peft's form; use it with `CoinRAG.open(adapter=…)`."""
    if config["kind"] == "links":
        return f"""Embeddings of {config["n_links"]} link tokens, which are computed with the question
behind each of the chunks (KVLink, arXiv 2502.16002; there the tokens differ from chunk to chunk, here
they are the same behind all). The model is frozen, what is cached stays valid."""
    if config["kind"] == "c2kv":
        ratios = " or ".join(map(str, sorted(set(config["ratios"]))))
        changes = f"Low-rank changes (rank {config['rank']}; in the paper, whole copies)"
        if config["copies"]:
            changes = "Whole copies"
        return f"""{changes} of the projections of queries, keys and values,
and one embedding, for slots: one cached entry in place of {ratios} tokens (C2KV, arXiv 2607.17715).
The model that encodes documents and the reader behind them are frozen. Losses are the reader's behind
slots; beside them it was taught by what the reader says behind whole chunks: at the answer with weight
{config["kl"]:g}, at the question with weight {config["kl_question"]:g}; and by how well the reader says a
chunk again behind its slots: with weight {config["reconstruction"]:g}."""
    through = "with" if config["through_cache"] else "without"
    return f"""All weights, trained on questions and answers behind {reads}, {through} gradients
through what was encoded. Use it with `CoinRAG.open(model=…)`: what the base model has cached does not
belong to it, and is encoded anew."""
