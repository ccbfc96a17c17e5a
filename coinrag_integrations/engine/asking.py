"""From pieces to an answer that is about to be computed: plan, compose, check that it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coinrag_integrations.engine.answer import AnswerBatch, Keep
from coinrag_integrations.engine.composer import Composed, Composer
from coinrag_integrations.engine.generation import GenerationConfig, check_room
from coinrag_integrations.engine.model import LoadedModel
from coinrag_integrations.engine.plan import Piece, PrefixPlan, Text, plan_prefix
from coinrag_integrations.engine.runner import StaticRunners
from coinrag_integrations.engine.timings import Stopwatch
from coinrag_integrations.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A model that answers, a composer of what it stands behind, and how much that may be."""

    model: LoadedModel
    composer: Composer
    static: StaticRunners | None
    max_entries: int

    def plan(self, pieces: Sequence[Piece], n_kept: int = 0) -> PrefixPlan:
        """See `Engine.plan_pieces`."""
        return plan_prefix(
            pieces, max_entries=self.max_entries, window=self.model.window, n_kept=n_kept
        )

    def compose(
        self,
        plans: Sequence[PrefixPlan],
        watch: Stopwatch,
        room: int,
        kept: torch.Tensor | None = None,
    ) -> Composed:
        """The prefixes of plans, a single one perhaps behind `kept` rows [L, 2, H, n, D]."""
        return self.composer.compose(plans, watch, room=room, kept=kept)

    def one(
        self,
        pieces: Sequence[Piece],
        generation: GenerationConfig,
        kept: torch.Tensor | None = None,
        keep: Keep | None = None,
    ) -> AnswerBatch:
        """Be ready to go on after pieces, the last of them text, behind `kept` rows.

        Raises:
            ConfigError: the last piece is not text.
            BudgetError: pieces and answer do not fit.
        """
        watch = Stopwatch(self.model.device)
        *before, last = pieces or [Text(())]
        if not isinstance(last, Text) or not last.ids:
            raise ConfigError("the last piece must be text: there is nothing to go on after")
        plan = self.plan(before, 0 if kept is None else kept.shape[3])
        return self.several([(plan, last.ids)], generation, watch, kept, keep)

    def several(
        self,
        requests: Sequence[tuple[PrefixPlan, Sequence[int]]],
        generation: GenerationConfig,
        watch: Stopwatch,
        kept: torch.Tensor | None = None,
        keep: Keep | None = None,
    ) -> AnswerBatch:
        """Compose every plan, and be ready to answer the question behind it.

        Raises:
            BudgetError: a plan, its question and the answer do not fit.
        """
        for plan, question in requests:
            check_room(self.model, plan, len(question), generation.max_new_tokens)
        plans, questions = zip(*requests, strict=True)
        width = max(plan.n_online + len(question) for plan, question in requests)
        composed = self.compose(plans, watch, width + generation.max_new_tokens, kept)
        return AnswerBatch(self.model, composed, questions, generation, watch, self.static, keep)
