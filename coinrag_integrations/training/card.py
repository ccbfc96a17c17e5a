"""The model card of an adapter: what it is for, what it was trained on, how it did."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def model_card(
    base: str, config: Mapping[str, Any], report: Mapping[str, Any], data: Sequence[str]
) -> str:
    """Markdown. `data` names what the examples came from."""
    held = {int(step): loss for step, loss in report["held_out"].items()}
    best, minutes = report["best_step"], report["seconds"] / 60
    losses = "\n".join(f"| {step} | {loss:.3f} |" for step, loss in sorted(held.items()))
    sources = "\n".join(f"- {name}" for name in data) or "- not noted"
    reads = {"spans": "composed KV of spans", "text": "the same spans as text"}[config["context"]]
    return f"""# Reader adapter for {base}

LoRA of rank {config["rank"]} on all linear layers, for tokens that are computed online (question and
answer) behind {reads}. What is cached is the base model's and stays valid. It is in
peft's form; use it with `CoinRAG.open(adapter=…)`.

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
