"""LongBench's archive, made small, read through `datasets`; and the hub: there, gone, and not reached."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import pytest

from coinrag_integrations.errors import ConfigError, DocumentError
from coinrag_integrations.evaluation.data import read_named
from coinrag_integrations.evaluation.longbench import NAMES, read_longbench, split_passages
from tests.chroma_server import free_port

CONTEXT = "Passage 1:\nParis\nParis is a city.\nSince long.\n\nPassage 2:\nRome\nRome is another."


@pytest.fixture(autouse=True)
def _own_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from datasets import config
    from huggingface_hub import constants

    monkeypatch.delenv("COINRAG_LONGBENCH", raising=False)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def row(question: str = "Which city?", context: str = CONTEXT, **others: object) -> dict:
    return {
        "input": question,
        "context": context,
        "answers": ["Paris", "Rome"],
        "length": len(context.split()),
        "dataset": "some",
        "language": "en",
        "all_classes": None,
        "_id": "8f1c",
        **others,
    }


def lines(*rows: object) -> str:
    return "".join(
        f"{r if isinstance(r, str) else json.dumps(r, ensure_ascii=False)}\n" for r in rows
    )


def archive(path: Path, **members: str | bytes) -> Path:
    with ZipFile(path, "w") as file:
        for name, text in members.items():
            file.writestr(f"data/{name}.jsonl", text)
    return path


def test_the_archive_is_read_by_its_name(tmp_path, monkeypatch):
    rows = [row(f"q{i}") for i in range(5)]
    monkeypatch.setenv("COINRAG_LONGBENCH", str(archive(tmp_path / "a.zip", hotpotqa=lines(*rows))))
    found = read_named(["longbench:hotpotqa", "demo"], limit=3)
    assert list(found) == ["longbench-hotpotqa", "demo"]
    first, *others = found["longbench-hotpotqa"]
    assert [first.question] + [it.question for it in others] == ["q0", "q1", "q2"]
    assert first.answers == ("Paris", "Rome")
    assert [d.text for d in first.documents] == [
        "Paris\n\nParis is a city.\nSince long.",
        "Rome\n\nRome is another.",
    ]
    assert first.supporting == frozenset()
    ids = {d.document_id for it in found["longbench-hotpotqa"] for d in it.documents}
    assert len(ids) == 6
    assert len(read_longbench("hotpotqa", source=tmp_path / "a.zip")) == 5


@pytest.mark.parametrize("place", ["data.zip", "data/qasper.jsonl", "qasper.jsonl"])
@pytest.mark.parametrize("folder", ["plain", "with [odd] *chars* é"])
def test_a_folder_may_hold_the_archive_or_its_files(tmp_path, folder, place):
    path = tmp_path / folder / place
    path.parent.mkdir(parents=True)
    if path.suffix == ".zip":
        archive(path, qasper=lines(row()))
    else:
        path.write_text(lines(row()), encoding="utf-8")
    (example,) = read_longbench("qasper", source=tmp_path / folder)
    assert [d.text for d in example.documents] == [CONTEXT]  # one paper: no passages to split


def test_every_data_set_has_a_question_and_documents(tmp_path):
    source = archive(
        tmp_path / "a.zip",
        **{n: lines(row("" if n in ("gov_report", "multi_news") else "Who?")) for n in NAMES},
    )
    examples = {name: read_longbench(name, source=source)[0] for name in NAMES}
    assert {name for name, it in examples.items() if len(it.documents) == 2} == {
        "hotpotqa",
        "2wikimqa",
        "musique",
        "multi_news",
    }
    asked = {name: it.question for name, it in examples.items() if it.question != "Who?"}
    assert set(asked) == {"gov_report", "multi_news"}
    assert all("Summarise" in question for question in asked.values())


def test_words_are_those_that_were_written(tmp_path):
    odd = row(
        "1999-01-02",
        "Passage 1:\nT\u2028\x85\r\nx",
        answers=["1999-01-01", " ", "12"],
        all_classes=["x"],
    )
    source = archive(tmp_path / "a.zip", musique=lines(odd, row()))
    example, _ = read_longbench("musique", source=source)
    assert (example.question, example.answers) == ("1999-01-02", ("1999-01-01", "12"))
    (document,) = read_longbench(
        "narrativeqa", source=archive(tmp_path / "b.zip", narrativeqa=lines(odd))
    )[0].documents
    assert document.text == "Passage 1:\nT\u2028\x85\r\nx"


def test_passages_are_split_where_their_numbers_go_on():
    assert split_passages("one\ntext") == ["one\ntext"]
    assert split_passages("Passage 1: a\nPassage 2:\n\n b \n\nPassage 3:\n") == ["a", "b"]
    assert split_passages("before\nPassage 1:\na") == ["before", "a"]
    out_of_turn = "a\nPassage 7:\nof the book, see Passage 2: there\nPassage 1:\nb"
    assert split_passages(f"Passage 1:\n{out_of_turn}\nPassage 2:\nc") == [out_of_turn, "c"]


@pytest.mark.parametrize("name", ["triviaqa", "samsum", "trec", "dureader", "lcc", "nothing", ""])
def test_what_is_not_made_for_retrieval_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="use one of hotpotqa"):
        read_longbench(name, source=tmp_path)
    with pytest.raises(ConfigError, match="use one of hotpotqa"):
        read_named([f"longbench:{name}"])


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        '"text"',
        "[" * 100_000,
        {"input": "Who?", "answers": ["Ada"]},
        row(" "),
        row(context=" "),
        row(answers=[]),
        row(answers=[" "]),
        row(answers=None),
        row(answers=[1]),
        row() | {"context": None},
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_line_that_is_no_example_is_named(tmp_path, broken):
    source = archive(tmp_path / "a.zip", hotpotqa=lines(row(), "", broken))
    with pytest.raises(DocumentError, match=r"hotpotqa\.jsonl.*a\.zip, line 2"):
        read_longbench("hotpotqa", source=source)
    assert len(read_longbench("hotpotqa", 1, source)) == 1


def test_files_that_are_not_longbenchs_are_refused(tmp_path):
    source = archive(tmp_path / "a.zip", hotpotqa=b"\xff\xfe\n", musique="\n")
    with pytest.raises(DocumentError, match="UTF-8"):
        read_longbench("hotpotqa", source=source)
    with pytest.raises(DocumentError, match="no questions"):
        read_longbench("musique", source=source)
    with pytest.raises(DocumentError, match="qasper"):
        read_longbench("qasper", source=source)
    for nowhere in (tmp_path / "nowhere.zip", tmp_path):
        with pytest.raises(DocumentError, match=r"data\.zip"):
            read_longbench("qasper", source=nowhere)
    whole = source.read_bytes()
    for cut in (b"", b"no archive", whole[: len(whole) // 2]):
        source.write_bytes(cut)
        with pytest.raises(DocumentError, match="fetch it again"):
            read_longbench("hotpotqa", source=source)


def test_without_datasets_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"coinrag-integrations\[eval\]"):
        read_longbench("hotpotqa", source=tmp_path)


def test_an_archive_that_the_hub_gave_before_is_read_without_it(tmp_path):
    repository = tmp_path / "hub" / "datasets--zai-org--LongBench"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots" / ("a" * 40)).mkdir(parents=True)
    archive(repository / "snapshots" / ("a" * 40) / "data.zip", qmsum=lines(row()))
    assert len(read_longbench("qmsum")) == 1


@pytest.mark.parametrize("variable", [None, ""])
def test_offline_the_error_says_what_to_do(monkeypatch, variable):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    if variable is not None:
        monkeypatch.setenv("COINRAG_LONGBENCH", variable)
    with pytest.raises(DocumentError, match=r"offline.*data\.zip.*COINRAG_LONGBENCH"):
        read_longbench("hotpotqa")


def hub_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its client had found this address in the environment."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextmanager
def hub(content: bytes) -> Iterator[str]:
    """A server that has LongBench's archive, as the hub gives it."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            found = self.path == "/datasets/zai-org/LongBench/resolve/main/data.zip"
            self.send_response(200 if found else 404)
            self.send_header("ETag", '"e1"')
            self.send_header("X-Repo-Commit", "b" * 40)
            self.send_header("Content-Length", str(len(content) if found else 0))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_hub_is_asked_once(tmp_path, monkeypatch):
    content = archive(tmp_path / "a.zip", hotpotqa=lines(row("From the hub?"))).read_bytes()
    with hub(content) as endpoint:
        hub_at(endpoint, monkeypatch)
        assert read_longbench("hotpotqa")[0].question == "From the hub?"
    assert read_longbench("hotpotqa")[0].question == "From the hub?"  # where nobody answers


@pytest.mark.parametrize("is_there", [False, True], ids=["nobody", "somebody else"])
def test_a_hub_that_is_not_there_is_given_up_at_once(monkeypatch, is_there):
    with hub(b"") as endpoint:
        hub_at(
            f"{endpoint}/elsewhere" if is_there else f"http://127.0.0.1:{free_port()}", monkeypatch
        )
        started = time.monotonic()
        with pytest.raises(DocumentError, match=r"from the hub.*data\.zip.*COINRAG_LONGBENCH"):
            read_longbench("hotpotqa")
        assert time.monotonic() - started < 10  # the hub's client alone tries for 23 s
