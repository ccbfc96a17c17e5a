"""How wide to search, and among which documents."""

from __future__ import annotations

from dataclasses import dataclass

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.retrieval.filters import Condition, where_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalConfig:
    """How wide to search: `n_chunks` bounds stage one, `n_nuggets` stage two (paper: 5 and 10).

    `where` is a condition on documents' metadata (see `filters.where_of`).
    """

    n_chunks: int = 5
    n_nuggets: int = 10
    where: Condition | None = None

    def __post_init__(self) -> None:
        """Refuse searches for nothing, and conditions that Chroma could not check."""
        where_of(self.where)
        if self.n_chunks < 1 or self.n_nuggets < 1:
            raise ConfigError(
                f"n_chunks={self.n_chunks} and n_nuggets={self.n_nuggets} must be at least 1"
            )
