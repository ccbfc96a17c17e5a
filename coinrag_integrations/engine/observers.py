"""Who is told of searches and answers: nobody, unless somebody asks to be. Observers change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from coinrag_integrations.engine.answer import Answer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A search of a store: the form that was asked for, how many chunks were looked into at most, and
    in how many spans it came back after so many milliseconds.
    """

    form: str
    n_chunks: int
    n_spans: int
    milliseconds: float


class Observer(Protocol):
    """Is called in the thread that searched or answered, when that is done."""

    def searched(self, search: Search) -> None:
        """Spans were retrieved."""
        ...

    def answered(self, answers: Sequence[Answer]) -> None:
        """Answers have ended that were computed together; perhaps because somebody stopped them."""
        ...


T = TypeVar("T")
_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Tell an observer of all searches and answers of this process, until what is returned is called."""
    _observers.append(observer)

    def stop() -> None:
        if observer in _observers:
            _observers.remove(observer)

    return stop


def searched(search: Search) -> None:
    """Tell all observers of a search."""
    for observer in list(_observers):
        _tell(observer.searched, search)


def answered(answers: Callable[[], Sequence[Answer]]) -> None:
    """Tell all observers of answers, which are only looked at if there is any."""
    if _observers:
        there = answers()
        for observer in list(_observers):
            _tell(observer.answered, there)


def _tell(told: Callable[[T], None], what: T) -> None:
    try:
        told(what)
    except Exception:  # an observer's fault is not the answer's
        logger.exception("an observer failed")
