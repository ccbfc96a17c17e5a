"""How wide to search, among which documents, and as what to read what is found."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.retrieval.filters import Condition, where_of

Form = Literal["spans", "chunks", "c2kv", "hybrid", "slots", "background"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalConfig:
    """How wide to search: `n_chunks` bounds stage one, `n_nuggets` stage two (paper: 5 and 10).

    `where` is a condition on documents' metadata (see `filters.where_of`). `form` is as what it is read:
    "spans", the nuggets; "chunks", all of their chunks; "c2kv", slots of these; "hybrid", the `n_raw` best
    chunks as they are, the others as slots; "slots", those whose tokens meet a nugget; "background", the
    nuggets, and slots for the rest of their chunks. A slot stands for `ratio` tokens (None: for as many as
    the store's first ones).
    """

    n_chunks: int = 5
    n_nuggets: int = 10
    where: Condition | None = None
    form: Form = "spans"
    ratio: int | None = None
    n_raw: int = 1

    def __post_init__(self) -> None:
        """Refuse searches for nothing, unknown forms, and conditions that Chroma could not check."""
        where_of(self.where)
        if self.form not in get_args(Form):
            raise ConfigError(f"form is {self.form!r}: use one of {', '.join(get_args(Form))}")
        for name, value, least in (
            ("n_chunks", self.n_chunks, 1),
            ("n_nuggets", self.n_nuggets, 1),
            ("n_raw", self.n_raw, 0),
            ("ratio", 2 if self.ratio is None else self.ratio, 2),
        ):
            if not isinstance(value, Integral) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
