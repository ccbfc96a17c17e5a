"""One question with three documents, for tests of what is measured."""

from __future__ import annotations

from coinrag_integrations.evaluation.data import Example
from coinrag_integrations.types import Document

TEXTS = (
    "The tidal organ of Marenqué was built by Bastien Roule in 1923. It plays at every high tide.\n",
    "The keeper of the north pier writes down each note.\n\nNobody reads it; the book is kept.\n",
    "Copper pipes hang below the sea wall, and two keepers clean them each spring.\n",
)
EXAMPLE = Example(
    question="Who built the tidal organ?",
    answers=("Bastien Roule", "Roule"),
    documents=tuple(Document(document_id=str(i), text=text) for i, text in enumerate(TEXTS)),
    supporting=frozenset({"0"}),
)
