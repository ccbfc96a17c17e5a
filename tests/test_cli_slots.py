"""C2KV's slots from the command line, on a tiny model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from coinrag_integrations.cli.demo import open_demo
from coinrag_integrations.cli.options import parse_ratios
from coinrag_integrations.cli.output import Output
from coinrag_integrations.errors import ConfigError
from tests.commands import Run
from tests.slots import DOCUMENTS, save_both
from tests.tiny import HashEmbedder, save_tiny

QUESTION = "Who built the tidal organ?"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedder of the tests under a name that stores can remember."""
    monkeypatch.setattr("coinrag_integrations.settings.MiniLMEmbedder", HashEmbedder)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for document in DOCUMENTS:
        (folder / f"{document.document_id}.txt").write_text(document.text, encoding="utf-8")
    return folder


def test_a_store_with_slots_is_built_asked_and_looked_at(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    build = ("build", docs, "--store", store, "--coverage", "all", "--chunk-tokens", 256)
    built = run(*build, "--model", tiny, "--c2kv", "4,8", "--extractor", "untrained")
    assert (built.code, built.value["n_added"]) == (0, len(DOCUMENTS))
    sizes = [path.stat().st_size for path in store.rglob("*.safetensors")]
    assert (built.value["bytes"], len(sizes)) == (sum(sizes), 3 * built.value["chunks"])
    again = run(*build)
    assert (again.value["n_unchanged"], again.value["n_encoded"]) == (len(DOCUMENTS), 0)

    def ratios(*options: object) -> list[int]:
        asked = run("ask", "--store", store, QUESTION, "--max-new-tokens", 2, *options)
        assert asked.code == 0, asked.text
        assert asked.value["recomputed"] == 0
        return [span["ratio"] for span in asked.value["spans"]]

    assert set(ratios()) == set(ratios("--mode", "chunk")) == {1}
    assert set(ratios("--mode", "c2kv")) == {4}
    assert set(ratios("--mode", "c2kv", "--ratio", 8)) == {8}
    assert ratios("--mode", "hybrid", "--n-chunks", 3) == [1, 4, 4]
    assert ratios("--mode", "hybrid", "--n-chunks", 3, "--n-raw", 2) == [1, 1, 4]
    assert set(ratios("--form", "slots")) == {4}
    background = ratios("--form", "background", "--ratio", 8, "--n-nuggets", 1)
    assert (background.count(1), set(background)) == (1, {1, 8})

    listed = run("inspect", "--store", store)
    assert "slots of 4 and 8 tokens, made by extractor untrained" in " ".join(listed.text.split())
    kv = {item["ratio"]: item for item in listed.value["kv"].values()}
    assert kv.keys() == {1, 4, 8}
    assert len({item["files"] for item in kv.values()}) == 1
    assert kv[8]["fingerprint"]["extractor"].startswith("c2kv:untrained")
    names = set(listed.value["kv"])
    assert listed.value["bytes"] == sum(sizes)

    healthy = run("doctor", "--store", store)
    slots = healthy.value["model"]["slots"]
    assert slots == {str(k): kv[k]["fingerprint"]["extractor"] for k in (4, 8)}
    assert set(run("inspect", "--store", store).value["kv"]) == names  # doctor made none
    verified = run("verify", "--store", store)
    assert verified.code == 0
    for words in ("(tokens' entries)", "(slots of 4 tokens)", "(slots of 8 tokens)"):
        assert words in verified.text
    assert {it["ratio"] for it in verified.value["scopes"][0]["variants"]} == {1, 4, 8}


def test_an_extractor_is_kept_by_doctor(run: Run, docs: Path, tmp_path: Path) -> None:
    """Looking at a store makes no room for slots of another extractor in it."""
    model, extractor = save_both(tmp_path)
    store = tmp_path / "store"
    options = ("--model", model, "--c2kv", "4", "--extractor", extractor)
    assert run("build", docs, "--store", store, *options).code == 0
    names = set(run("inspect", "--store", store).value["kv"])
    assert run("doctor", "--store", store).code == 0
    assert set(run("inspect", "--store", store).value["kv"]) == names


def test_the_demos_store_keeps_the_slots_that_it_was_given(
    run: Run, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening it for the demo, or to measure, opens it as it is."""
    monkeypatch.setattr("coinrag_integrations.demo.data.demo_documents", lambda: DOCUMENTS)
    model, extractor = save_both(tmp_path)
    store = tmp_path / "store"
    with open_demo(Output(as_json=True), store, str(model)) as rag:
        assert rag.engine.config.coverage == "all"
        assert rag.engine.config.c2kv == ()
    slots = ("--c2kv", 4, "--extractor", extractor)
    assert run("build", docs, "--store", store, *slots).code == 0
    with open_demo(Output(as_json=True), store, str(model)) as rag:
        assert (rag.engine.config.coverage, rag.engine.config.c2kv) == ("all", (4,))
    asked = run("ask", "--store", store, "--mode", "c2kv", QUESTION)
    assert asked.value["recomputed"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--c2kv", "four", "--extractor", "untrained"), "give whole numbers, as 4 or 4,8"),
        (("--c2kv", "1", "--extractor", "untrained"), "from 2 to 32"),
        (("--c2kv", "4,4", "--extractor", "untrained"), "different ratios"),
        (("--c2kv", "0", "--extractor", "untrained"), "from 2 to 32"),
        (("--c2kv", "4"), "--extractor FOLDER"),
        (("--extractor", "untrained"), "none are asked for: add --c2kv 4"),
    ],
)
def test_slots_that_cannot_be_made_are_one_clear_error(
    run: Run, tiny: Path, docs: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    result = run("build", docs, "--store", tmp_path / "s", "--model", tiny, *options)
    assert (result.code, result.value["error"]["type"]) == (1, "ConfigError")
    assert words in result.value["error"]["message"]
    assert not (tmp_path / "s").exists()


def test_a_question_for_what_is_not_there_says_what_to_do(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert run("build", docs, "--store", store, "--model", tiny).code == 0
    for options, words in (
        (("--mode", "c2kv"), "--c2kv 4"),
        (("--form", "slots", "--ratio", 8), "--c2kv 8"),
        (("--mode", "slots"), "coinrag, chunk, full, c2kv, hybrid"),
        (("--form", "slot"), "spans, chunks, c2kv, hybrid, slots, background"),
        (("--mode", "chunk", "--form", "slots"), "leave out --form, or --mode chunk"),
        (("--ratio", 4), "none are read: add --mode c2kv"),
        (("--mode", "full", "--ratio", 4), "none are read: add --mode c2kv"),
    ):
        result = run("ask", "--store", store, QUESTION, *options)
        assert (result.code, result.value["error"]["type"]) == (1, "ConfigError")
        assert words in result.value["error"]["message"]


@pytest.mark.parametrize(("text", "ratios"), [("4", (4,)), ("4,8", (4, 8)), ("", ())])
def test_ratios_are_whole_numbers(text: str, ratios: tuple[int, ...]) -> None:
    assert parse_ratios("--c2kv", text) == ratios


@pytest.mark.parametrize("text", ["4;8", "4.5", ",", "4,"])
def test_what_is_no_ratio_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--c2kv"):
        parse_ratios("--c2kv", text)
