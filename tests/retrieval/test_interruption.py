"""A change of the index that did not end is noticed and made good, from the catalog."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coinrag_integrations.errors import SpanIndexError
from coinrag_integrations.rag import CoinRAG
from coinrag_integrations.retrieval import SpanIndex
from coinrag_integrations.retrieval.interruption import Interruption
from coinrag_integrations.types import ChunkId, Document

TEXTS = ["The mill of Tarsk ground forty tons of rye.", "Ines Caldero painted the pier green."]
DOCUMENTS = [Document(document_id=str(i), text=text * 3) for i, text in enumerate(TEXTS)]


@pytest.fixture
def marked(rag: CoinRAG, tmp_path: Path) -> CoinRAG:
    """A store whose index leaves marks."""
    rag.index._mark = tmp_path / "store" / "index.changing"
    rag.add(DOCUMENTS)
    return rag


def found(rag: CoinRAG) -> list[tuple[str, str]]:
    return [(span.document_id, span.text) for text in TEXTS for span in rag.retrieve(text)]


def test_nothing_is_left_of_a_change_that_ended(marked):
    assert marked.index.interruption is None
    assert marked.delete(["0"]) == 1
    assert marked.index.interruption is None


def test_an_exception_between_two_rows_leaves_a_mark_and_the_next_writer_makes_it_good(
    marked, monkeypatch
):
    before = found(marked)
    with monkeypatch.context() as patch:

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(SpanIndex, "_add", stop)
        changed = [Document(document_id="0", text=DOCUMENTS[0].text, metadata={"new": 1})]
        with pytest.raises(KeyboardInterrupt):
            marked.add(changed)
    interruption = marked.index.interruption
    assert interruption is not None
    assert not interruption.torn
    assert set(interruption.chunk_ids) == set(marked.engine.catalog.chunk_ids("0"))
    assert found(marked) != before, "rows are gone, until somebody makes it good"
    marked.ingestor.mend()
    assert marked.index.interruption is None
    assert found(marked) == before


def test_who_dies_while_mending_leaves_an_index_that_is_not_trusted(marked, tmp_path, monkeypatch):
    mark = tmp_path / "store" / "index.changing"
    Interruption(torn=False, chunk_ids=tuple(marked.engine.catalog.chunk_ids("0"))).write(mark)
    with monkeypatch.context() as patch:

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(SpanIndex, "_add", stop)
        with pytest.raises(KeyboardInterrupt):
            marked.ingestor.mend()
    assert Interruption.read(mark) == Interruption(torn=True, chunk_ids=())
    marked.ingestor.mend()
    assert marked.index.interruption is None
    assert {span.document_id for span in marked.retrieve(TEXTS[0])} == {"0", "1"}


def test_after_a_death_every_row_is_written_anew(marked, tmp_path):
    before, counts = found(marked), marked.index.counts()
    marked.index._chunks.delete(marked.engine.catalog.chunk_ids("1"))
    Interruption(torn=True, chunk_ids=()).write(tmp_path / "store" / "index.changing")
    marked.ingestor.mend()
    assert (found(marked), marked.index.counts()) == (before, counts)
    assert marked.index.interruption is None


KILLED = """
import os, signal, sys
from pathlib import Path
from coinrag_integrations.retrieval import ChromaFolder, SpanIndex
from tests.tiny import HashEmbedder
folder = Path(sys.argv[1])
index = SpanIndex(ChromaFolder.open(folder / "chroma"), HashEmbedder(), mark=folder / "mark")
index.delete(["a" * 32])
with index._changing(["b" * 32]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_a_mark(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    interruption = Interruption.read(tmp_path / "mark")
    assert interruption == Interruption(torn=True, chunk_ids=(ChunkId("b" * 32),))


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"torn": 1, "chunk_ids": 3})])
def test_a_mark_that_cannot_be_read_is_an_error_that_names_it(tmp_path, text):
    mark = tmp_path / "mark"
    mark.write_text(text)
    with pytest.raises(SpanIndexError, match=r"cannot read .*mark"):
        Interruption.read(mark)
