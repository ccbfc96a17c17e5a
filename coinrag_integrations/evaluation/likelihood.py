"""How likely a given answer is behind a prefix. Knows no spans, stores or codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from coinrag_integrations.engine import LoadedModel, hf
from coinrag_integrations.engine.generation import check_room
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix, empty_kv
from coinrag_integrations.engine.prompt import Prompt
from coinrag_integrations.engine.visibility import visible
from coinrag_integrations.errors import ConfigError


def answer_ids(prompt: Prompt, answer: str) -> tuple[int, ...]:
    """The tokens of an answer as the model would begin it: after a space where words go on.

    Raises:
        ConfigError: the answer is empty.
    """
    if not answer.strip():
        raise ConfigError("the answer is empty: give the words whose likelihood is asked for")
    tokenizer, last = prompt.tokenizer, prompt.after_question[-1:]
    is_control = bool(last) and last[0] in tokenizer.hf.all_special_ids
    begins = not last or is_control or tokenizer.decode(last)[-1:].isspace()
    return tokenizer.encode(answer.strip() if begins else f" {answer.strip()}").ids


def answer_logits(
    model: LoadedModel, prefix: Prefix, question: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """Logits from which each token of `answer` would be chosen: fp32 [len(answer), V].

    One forward pass over the plan's online text, question and answer behind a prefix of one plan.
    Writes into the prefix's room, or copies it where there is too little.

    Raises:
        ConfigError: no question or no answer, or several plans.
        BudgetError: prefix, question and answer do not fit the model's window.
    """
    if len(prefix.plans) != 1:
        raise ConfigError("likelihoods are computed behind one prefix")
    if not question or not answer:
        raise ConfigError("a likelihood needs a question and an answer of at least one token each")
    (plan,) = prefix.plans
    check_room(model, plan, len(question), len(answer))
    ids, at = (it.to(model.device) for it in online_text(plan, [*question, *answer[:-1]]))
    cache = hf.prefix_cache(prefix.with_room(ids.shape[1]), prefix.n_entries)
    seen = None  # nothing is cached: the model's own mask is right, and much faster
    if plan.n_entries:
        rows = torch.cat((prefix.positions().to(model.device), at), dim=1)
        seen = visible(rows, at, model.layer_windows)
    return hf.last_logits(model.hf, ids, cache, len(answer), at, seen)[0]


def online_text(plan: PrefixPlan, question: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions [1, m] of what is computed behind a plan's entries: its text, the question."""
    at = [*plan.online_positions(), *range(plan.n_rows, plan.n_rows + len(question))]
    return torch.tensor([[*plan.online_ids, *question]]), torch.tensor([at])


def losses(logits: torch.Tensor, answer: Sequence[int]) -> torch.Tensor:
    """The negative log-likelihood of each token of `answer` in nats: [n, V] -> fp32 [n]."""
    targets = torch.tensor(answer, device=logits.device)
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def no_prefix(model: LoadedModel) -> Prefix:
    """The prefix that holds nothing: what stands before the question is part of it."""
    plan = PrefixPlan(head=(), segments=(), online=(), n_entries=0, length=0)
    return Prefix(kv=empty_kv(model.layout, 0, model.device), plans=(plan,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Differences of two measurements of the same questions: mean, its standard error, P50, P95."""

    mean: float
    stderr: float
    p50: float
    p95: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Paired:
        """Of at least one difference."""
        p50, p95 = np.percentile(differences, (50, 95)).tolist()
        n = len(differences)
        stderr = float(np.std(differences, ddof=1)) / n**0.5 if n > 1 else 0.0
        return cls(
            mean=round(float(np.mean(differences)), 6),
            stderr=round(stderr, 6),
            p50=round(p50, 6),
            p95=round(p95, 6),
        )
