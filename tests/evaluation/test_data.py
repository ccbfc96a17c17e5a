"""Questions with answers: read in turn, checked line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coinrag_integrations.errors import ConfigError, DocumentError
from coinrag_integrations.evaluation.data import demo_examples, read_examples


def row(question="Who?", answers=("Ada",), passages=None) -> dict:
    passages = passages or [{"title": "T", "text": f"About {question}", "is_supporting": True}]
    return {"question": question, "answers": list(answers), "passages": passages, "extra": 1}


def write(path: Path, *rows: object) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_files_are_read_in_turn_until_there_are_enough(tmp_path):
    a = write(tmp_path / "a.jsonl", *(row(f"a{i}") for i in range(4)))
    b = write(tmp_path / "b.jsonl", row("b0"), "", row("b1"))
    found = [example.question for example in read_examples([a, b])]
    assert found == ["a0", "b0", "a1", "b1", "a2", "a3"]
    assert [example.question for example in read_examples([a, b], 3)] == ["a0", "b0", "a1"]


def test_titles_head_their_passages_and_ids_differ(tmp_path):
    passages = [{"title": "T", "text": "One."}, {"text": "Two."}, {"title": "", "text": "Three."}]
    (example,) = read_examples([write(tmp_path / "a.jsonl", row(passages=passages))])
    assert [d.text for d in example.documents] == ["T\n\nOne.", "Two.", "Three."]
    assert len({d.document_id for d in example.documents}) == 3
    assert example.supporting == frozenset()


def test_supporting_documents_are_chosen_first_and_keep_their_order(tmp_path):
    passages = [{"text": str(i), "is_supporting": flag} for i, flag in enumerate((0, 1, None, 1))]
    (example,) = read_examples([write(tmp_path / "a.jsonl", row(passages=passages))])
    texts = [[d.text for d in example.chosen(n)] for n in (1, 2, 3, 9)]
    assert texts == [["1"], ["1", "3"], ["0", "1", "3"], ["0", "1", "2", "3"]]


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        "[" * 100_000,
        {"question": "Who?", "answers": ["Ada"]},
        row(" "),
        row(answers=()),
        row(answers=("",)),
        row() | {"answers": "Ada"},
        row(passages=[{"title": "T"}]),
        row(passages=["text"]),
        row(passages=[{"text": " "}]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_line_that_is_no_example_is_named(tmp_path, broken):
    path = write(tmp_path / "a.jsonl", row(), broken)
    with pytest.raises(DocumentError, match=r"a\.jsonl, line 2"):
        read_examples([path])


def test_files_that_are_not_there_or_no_text_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one"):
        read_examples([])
    with pytest.raises(DocumentError, match="nowhere"):
        read_examples([tmp_path / "nowhere.jsonl"])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DocumentError, match=r"binary\.jsonl"):
        read_examples([tmp_path / "binary.jsonl"])


def test_the_demos_examples_hold_their_answers_and_articles_beside_them():
    examples = demo_examples()
    assert len(examples) == 40
    assert len(demo_examples(3)) == 3
    for example in examples:
        held = [d for d in example.documents if d.document_id in example.supporting]
        assert any(example.answers[0] in d.text for d in held)
        assert len(example.documents) == len(held) + 3
