"""Opening an index writes nothing: what was changed is on the disk, and stays as it is."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from coinrag_integrations.engine.chunking import chunk_document
from coinrag_integrations.retrieval import ChromaFolder, SpanIndex
from coinrag_integrations.types import Document
from tests.adapters import run_python
from tests.tiny import HashEmbedder

SEARCH = """
    from contextlib import closing
    from pathlib import Path
    from coinrag_integrations.retrieval import ChromaFolder, SpanIndex
    from tests.tiny import HashEmbedder

    with closing(ChromaFolder.open(Path({folder!r}))) as folder:
        index = SpanIndex(folder, HashEmbedder(), "abc")
        print(index.counts()["chunks"], len(index.search("row 3")))
"""


def test_searching_in_another_process_leaves_the_files_alone(model, tmp_path):
    """Chroma by itself writes its vector index anew whenever a process first looks into it."""
    with closing(ChromaFolder.open(tmp_path)) as folder:
        index = SpanIndex(folder, HashEmbedder(), "abc", mark=tmp_path / "mark")
        for number in range(5):
            document = Document(document_id=str(number), text=f"row {number}")
            index.put(chunk_document(document, model.tokenizer, 32))
        index.delete([index.search("row 4")[0].ref.chunk_id])
    before = state(tmp_path)
    for _ in range(2):
        done = run_python(SEARCH.format(folder=str(tmp_path)))
        assert done.stdout.split() == ["4", "4"], done.stderr
        assert state(tmp_path) == before


def state(folder: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.glob("*/*.*") if path.is_file()]
    assert files
    return {str(it): (it.stat().st_mtime_ns, it.stat().st_size) for it in files}
