"""The losses of samples: entries composed so that gradients flow, several samples in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy, kl_div, pad
from transformers import PreTrainedModel

from coinrag_integrations.engine import LoadedModel
from coinrag_integrations.engine.hf_training import entries_of, logits_behind
from coinrag_integrations.engine.kernels.reference import rotate
from coinrag_integrations.engine.visibility import HIDDEN, visible
from coinrag_integrations.training.samples import Sample, Source

_NOTHING = -100  # a target that is none


def losses(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    kvs: Sequence[torch.Tensor],
    windows: Sequence[int | None],
) -> torch.Tensor:
    """Mean nats a token of each sample's answer, in one pass behind their entries `kvs`: fp32 [B]."""
    logits, answers, _ = online_logits(model, samples, kvs, windows)
    return nats(logits, answers)


def nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each line's targets: see `online_logits`; fp32 [B]."""
    each = cross_entropy(logits.mT, targets, ignore_index=_NOTHING, reduction="none")
    return each.sum(1) / (targets != _NOTHING).sum(1)


def divergences(logits: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean nats a token from what a teacher [B, n, V] says at some tokens to logits: fp32 [B]."""
    each = kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    there = targets != _NOTHING
    return (each * there).sum(1) / there.sum(1)


def online_logits(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    kvs: Sequence[torch.Tensor],
    windows: Sequence[int | None],
    *,
    with_questions: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits fp32 [B, n, V] from which tokens would be chosen, and these: of answers, of questions [B, n].

    One pass behind the samples' entries `kvs`. Entries are padded behind, ids before, so that answers
    end together; n is that of the longest answer, or `with_questions` of all that is computed.
    """
    device = kvs[0].device
    answers = _padded([sample.ids[-sample.n_answer :] for sample in samples], _NOTHING)
    asked = [
        [*sample.ids[1 : -sample.n_answer], *[_NOTHING] * sample.n_answer] for sample in samples
    ]
    questions, ends = _padded(asked, _NOTHING), answers.shape[1]
    if with_questions:
        ends = questions.shape[1]
        answers = pad(answers, (ends - answers.shape[1], 0), value=_NOTHING)
    targets = (answers.to(device), questions[:, -ends:].to(device))
    ids = _padded([sample.ids[:-1] for sample in samples], 0).to(device)
    if len(samples) == 1 and samples[0].is_plain:  # the model's own mask is right, and faster
        return logits_behind(model, ids, kvs[0], ends), *targets
    n_rows = max(kv.shape[4] for kv in kvs)
    kv = torch.cat([pad(it, (0, 0, 0, n_rows - it.shape[4])) for it in kvs], dim=2)
    rows = _padded([sample.rows for sample in samples], HIDDEN, behind=True).to(device)
    at = _padded([sample.at[:-1] for sample in samples], HIDDEN).to(device)
    seen = visible(torch.cat((rows, at), dim=1), at, windows)
    positions = at.masked_fill(at == HIDDEN, 0)
    return logits_behind(model, ids, kv, ends, positions, seen), *targets


def composed(model: LoadedModel, source: Source) -> torch.Tensor:
    """A source's entries by the weights as they are, as a store would hold and compose them.

    [L, 2, 1, H, N, D] in the layout's dtype. Gradients flow, unless they are switched off.
    """
    dtype, device = model.layout.dtype, model.device
    ids = _padded(source.sequences, 0, behind=True).to(device)
    encoded = entries_of(model.hf, ids, model.rope.turns)  # [B, T, L, 2, H, D]
    entries = torch.cat([encoded[i, start:stop] for i, start, stop in source.slices]).to(dtype)
    keys, values = entries.unbind(2)  # [N, L, H, D]
    turned = rotate(keys, model.rope.rotation(range(len(source)), device)).to(dtype)
    return torch.stack((turned, values), dim=2).permute(1, 2, 3, 0, 4)[:, :, None]


def _padded(lines: Sequence[Sequence[int]], filler: int, *, behind: bool = False) -> torch.Tensor:
    """Lines of one length: int64 [B, longest], filled up before their numbers, or behind them."""
    out = torch.full((len(lines), max(map(len, lines))), filler)
    for row, line in zip(out, lines, strict=True):
        where = slice(0, len(line)) if behind else slice(len(row) - len(line), None)
        row[where] = torch.tensor(line, dtype=torch.long)
    return out
