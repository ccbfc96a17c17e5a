"""What a search found, kept: the same as what methods are given, and read back as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coinrag_integrations.engine.prompt import PromptTemplate, build_prompt
from coinrag_integrations.errors import ConfigError
from coinrag_integrations.evaluation.errors.evidence import (
    EVIDENCE,
    EvidenceFile,
    evidence_of,
    read_evidence,
)
from coinrag_integrations.evaluation.rivals import make_task
from tests.evaluation.errors.passages import chunk, evidence
from tests.evaluation.example import EXAMPLE
from tests.evaluation.rivals.parts import chunks_of
from tests.tiny import HashEmbedder

ONE = evidence(
    chunk("[[Bastien Roule]] built [it.]", is_supporting=True), chunk("[Marenqué]", None)
)


def found(model, search="two-stage", chunks=None, example=EXAMPLE, n_chunks=2, n_nuggets=2):
    chunks = chunks_of(model) if chunks is None else chunks
    prompt = build_prompt(model.tokenizer, PromptTemplate())
    task = make_task(
        example.question,
        chunks,
        prompt,
        HashEmbedder(),
        n_chunks=n_chunks,
        n_nuggets=n_nuggets,
        search=search,
    )
    kept = evidence_of(example, chunks, task, settings="s", data="x", digest="1", search=search)
    return chunks, task, kept


@pytest.mark.parametrize("search", ["two-stage", "one-stage"])
def test_it_says_what_methods_are_given(model, search):
    chunks, task, kept = found(model, search)
    assert (kept.key, kept.question) == (("x", "1", search), EXAMPLE.question)
    assert [it.text for it in kept.chunks] == [it.text for it in chunks], "all, found or not"
    ranks = {it.chunk_id: rank for rank, it in enumerate(task.chunks, 1)}
    assert [it.rank for it in kept.chunks] == [ranks.get(it.chunk_id) for it in chunks]
    assert None in [it.rank for it in kept.chunks]
    assert [it.is_supporting for it in kept.chunks] == [it.document_id == "0" for it in chunks]
    n_loaded, nugget_ranks = 0, []
    for shown, it in zip(kept.chunks, chunks, strict=True):
        spans = [ref for ref in task.spans if ref.chunk_id == it.chunk_id]
        assert len(shown.nuggets) == len(it.nuggets) > 0
        for nugget, own in zip(shown.nuggets, it.nuggets, strict=True):
            assert shown.text[nugget.start : nugget.stop] == own.text
            held = any(s.start <= own.span.start and own.span.stop <= s.stop for s in spans)
            assert nugget.is_loaded == held
            n_loaded += held
            if nugget.rank is not None:
                assert task.ranked[nugget.rank - 1] == it.ref(own.span)
                nugget_ranks.append(nugget.rank)
                assert nugget.is_loaded or nugget.rank > 2
    assert n_loaded >= 2
    assert sorted(nugget_ranks) == list(range(1, len(task.ranked) + 1))


def test_a_chunk_without_nuggets_is_one_itself(model):
    bare = [replace(it, nuggets=()) for it in chunks_of(model)]
    _, task, kept = found(model, chunks=bare)
    assert len(task.spans) == 2
    for it in kept.chunks:
        assert [(n.start, n.stop, n.is_loaded) for n in it.nuggets] == [
            (0, len(it.text), it.rank is not None)
        ]


def test_nobody_need_say_what_supports(model):
    *_, kept = found(model, example=replace(EXAMPLE, supporting=frozenset()))
    assert {it.is_supporting for it in kept.chunks} == {None}


def test_it_is_read_back_as_it_was_written(model, tmp_path):
    *_, kept = found(model)
    with EvidenceFile(tmp_path, "s") as file:
        assert ONE.key not in file
        file.add(ONE)
        assert ONE.key in file
        file.add(replace(kept, example="2"))
    assert list(read_evidence(tmp_path)) == [ONE, replace(kept, example="2")]
    with (tmp_path / EVIDENCE).open("ab") as lines:
        lines.write(b'{"settings": "s"')
    with EvidenceFile(tmp_path, "s") as file, EvidenceFile(tmp_path, "other") as other:
        assert ONE.key in file
        assert ONE.key not in other, "other settings find other things"
        other.add(replace(ONE, settings="other"))
    assert len(list(read_evidence(tmp_path))) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": 3}, "question is 3"),
        ({"chunks": None}, "NoneType"),
        ({"chunks": [{"text": "a"}]}, "nuggets"),
        ({"answers": [1]}, "an answer is 1"),
        ({"nuggets": [[0, 99, None, True]]}, "outside its chunk: 0 to 99"),
        ({"nuggets": [[0, 1, "1", True]]}, "a nugget's rank is '1'"),
        ({"nuggets": [[0, 1]]}, "not enough values"),
        ({"rank": "first"}, "rank is 'first'"),
    ],
)
def test_something_else_is_one_clear_error(tmp_path, change, message):
    with EvidenceFile(tmp_path, "s") as file:
        file.add(ONE)
    value = json.loads((tmp_path / EVIDENCE).read_text())
    target = value["chunks"][0] if change.keys() & {"nuggets", "rank"} else value
    target.update(change)
    (tmp_path / EVIDENCE).write_text(json.dumps(value) + "\n")
    with pytest.raises(ConfigError, match=rf"holds something that is no evidence \(.*{message}"):
        EvidenceFile(tmp_path, "s")
