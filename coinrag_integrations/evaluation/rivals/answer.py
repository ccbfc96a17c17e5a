"""From a composed context to an answer and to the likelihood of one: greedy, timed. Knows no method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from coinrag_integrations.engine.generation import check_room
from coinrag_integrations.engine.hf_partial import attention_apart, blend
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.plan import PrefixPlan
from coinrag_integrations.engine.prefix import Prefix
from coinrag_integrations.engine.runner import EagerRunner
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.engine.visibility import visible
from coinrag_integrations.evaluation.likelihood import answer_logits, online_text
from coinrag_integrations.evaluation.rivals.kitchen import MAX_NEW_TOKENS
from coinrag_integrations.evaluation.rivals.task import Apart, Blend, Composed


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A greedy answer."""

    tokens: tuple[int, ...]
    text: str


def say(
    model: LoadedModel,
    composed: Composed,
    tail: Sequence[int],
    watch: Stopwatch,
    max_new_tokens: int = MAX_NEW_TOKENS,
    *,
    first_line: bool = True,
) -> Said:
    """Prefill what is left to compute and the question, then decode, with `first_line` one line only.

    Notes the first token's time. A composed context may be used once: its rows are written to.

    Raises:
        BudgetError: context, question and answer do not fit the model's window.
    """
    check_room(model, composed.prefix.plans[0], len(tail), max_new_tokens)
    tokens: list[int] = []
    text = ""
    with torch.no_grad(), _attention(model, composed.apart):
        for token in _greedy(model, composed, tail, watch, max_new_tokens):
            if token in model.stop_ids:
                break
            tokens.append(token)
            text = model.tokenizer.decode(tokens)
            if first_line and "\n" in text.lstrip():
                break
    text = text.strip()
    if first_line:
        text = (text.splitlines() or [""])[0].strip()
    return Said(tokens=tuple(tokens), text=text)


def likelihood_logits(
    model: LoadedModel, composed: Composed, tail: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """Logits from which each token of `answer` would be chosen: fp32 [len(answer), V].

    A composed context may be used once: its rows are written to.

    Raises:
        BudgetError: context, question and answer do not fit the model's window.
    """
    if composed.blend is not None:
        check_room(model, composed.prefix.plans[0], len(tail), len(answer))
        return _blended(model, composed, composed.blend, [*tail, *answer[:-1]], len(answer))[0]
    with torch.no_grad(), _attention(model, composed.apart):
        return answer_logits(model, composed.prefix, tail, answer)


def _greedy(
    model: LoadedModel, composed: Composed, tail: Sequence[int], watch: Stopwatch, n_new: int
) -> Iterator[int]:
    with watch.part("prefill"):
        if composed.blend is None:
            ids, at = online_text(composed.prefix.plans[0], tail)
            runner = EagerRunner(model, composed.prefix, ids.shape[1] + n_new)
            logits = runner.run(ids, at)
        else:
            logits, prefix = _blended(model, composed, composed.blend, tail, 1)
            at = torch.tensor([[prefix.n_entries - 1]])
            runner = EagerRunner(model, prefix, n_new)
        token = int(logits[0].argmax())
    watch.first_token()
    for _ in range(1, n_new):
        yield token
        at = at[:, -1:] + 1
        token = int(runner.run(torch.tensor([[token]]), at)[0].argmax())
    yield token


def _blended(
    model: LoadedModel, composed: Composed, how: Blend, behind: Sequence[int], n: int
) -> tuple[torch.Tensor, Prefix]:
    """Logits [n, V] after the last n tokens of `behind`, and the prefix that holds them too."""
    plan = composed.prefix.plans[0]
    n_rows = plan.n_entries + len(behind)
    kv = composed.prefix.with_room(len(behind))
    rows = torch.arange(n_rows, device=model.device)[None]
    at = rows[:, plan.n_entries - len(how.ids) :]
    logits = blend(
        model.hf,
        torch.tensor([[*how.ids, *behind]], device=model.device),
        kv[..., :n_rows, :],
        at,
        visible(rows, at, model.layer_windows),
        n_cached=len(how.ids),
        n_chosen=how.n_chosen,
        n=n,
    )
    head = (*plan.head, *how.ids, *behind)
    whole = PrefixPlan(head=head, segments=(), online=(), n_entries=n_rows, length=n_rows)
    return logits, Prefix(kv=kv, plans=(whole,))


def _attention(model: LoadedModel, apart: Apart | None) -> AbstractContextManager[None]:
    if apart is None:
        return nullcontext()
    return attention_apart(model.hf, apart.rows, apart.temperature, apart.scale)
