"""The command line, run for real on a tiny model folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.table import Table

from coinrag_integrations.cli.options import parse_bytes
from coinrag_integrations.cli.output import Output
from coinrag_integrations.errors import ConfigError
from tests.commands import Run
from tests.tiny import save_tiny

KV_FILES = "tenants/default/main/kv/*/??/*.safetensors"
ARTICLE = (
    "The tidal organ of Marenqué was built by Bastien Roule in 1923. "
    "Its copper pipes hang below the sea wall and sound at every high tide. "
    "The town council of Marenqué pays two keepers to clean the pipes each spring.\n"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "organ.txt").write_text(ARTICLE, encoding="utf-8")
    (folder / "notes.md").write_text(
        "# Notes\n\nThe organ rests in winter storms.", encoding="utf-8"
    )
    return folder


def test_build_ask_inspect_and_doctor_work_on_one_store(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    built = run("build", docs, "--store", store, "--model", tiny)
    assert built.code == 0
    assert (built.value["n_added"], built.value["n_encoded"]) == (2, 2)
    assert built.value["bytes"] == sum(path.stat().st_size for path in store.glob(KV_FILES))

    again = run("build", docs, "--store", store)
    assert (again.code, again.value["n_unchanged"], again.value["n_encoded"]) == (0, 2, 0)

    question = "Who built the tidal organ?"
    asked = run("ask", "--store", store, question, "--show-spans", "--max-new-tokens", 4)
    assert asked.code == 0
    assert asked.value["spans"][0]["text"] in ARTICLE
    assert asked.value["spans"][0]["text"] in asked.text
    assert set(asked.value["spans"][0]) >= {"chunk_id", "start", "stop", "text", "score"}
    assert asked.value["usage"]["generated"] <= 4
    assert asked.value["ttft_ms"] > 0
    for mode in ("chunk", "full"):
        other = run("ask", "--store", store, question, "--mode", mode, "--max-new-tokens", 4)
        assert (other.code, other.value["mode"]) == (0, mode)

    listed = run("inspect", "--store", store)
    assert listed.value["document_ids"] == ["notes.md", "organ.txt"]
    (kv,) = listed.value["kv"].values()
    assert kv["files"] == 2
    shown = run("inspect", "--store", store, "--document", "organ.txt")
    assert shown.value["chunks"][0]["text"] == ARTICLE
    assert all(n["text"] in ARTICLE for n in shown.value["chunks"][0]["nuggets"])

    healthy = run("doctor", "--store", store)
    assert healthy.value["model"]["gate"]["passed"] is True
    assert healthy.value["kernels"] == {"name": "numba", "reason": "device is cpu"}
    rotation = {"turned": "16 of 16 dimensions", "pairs": "half-split", "kinds": 1}
    assert healthy.value["model"]["rotation"] == rotation | {"layers_turned": "3 of 3"}
    assert healthy.value["model"]["layer_windows"] == [None]
    assert healthy.value["model"]["fingerprint"] == kv["fingerprint"]


def test_a_store_is_looked_after_without_a_model(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    assert run("build", docs, "--store", store, "--model", tiny, "--coverage", "all").code == 0
    sound = run("verify", "--store", store)
    assert (sound.code, sound.value["sound"]) == (0, True)
    question = ("ask", "--store", store, "Who built the tidal organ?", "--max-new-tokens", 4)
    plain = run(*question).value["timings"]["bytes_read"]

    converted = run("convert", "--store", store, "--codec", "int8")
    assert converted.code == 0
    assert converted.value["after"] < 0.7 * converted.value["before"]  # 16 dimensions share a scale
    assert run(*question).value["timings"]["bytes_read"] < 0.7 * plain
    again = run("convert", "--store", store, "--codec", "int4")
    assert (again.code, again.value["error"]["type"]) == (1, "ConfigError")

    path = next(iter(store.glob(KV_FILES)))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    broken = run("verify", "--store", store)
    assert (broken.code, broken.value["sound"]) == (1, False)
    mended = run("verify", "--store", store, "--repair")
    assert (mended.code, mended.value["sound"], mended.value["repaired"]) == (0, True, 1)

    deleted = run("delete", "--store", store, "notes.md")
    assert (deleted.code, deleted.value["deleted"]) == (0, 1)
    assert run("delete", "--store", store, "notes.md").code == 1
    assert run("inspect", "--store", store).value["document_ids"] == ["organ.txt"]
    assert run("gc", "--store", store).code == 0
    assert run("verify", "--store", store).value["sound"] is True

    limited = run("limit", "--store", store, "--max-bytes", "20MB", "--quota", "default=10MB")
    assert limited.value["limits"] == {"max_bytes": 20_000_000, "tenant_bytes": {"default": 10**7}}
    lifted = run("limit", "--store", store, "--quota", "default=none")
    assert lifted.value["limits"] == {"max_bytes": 20_000_000, "tenant_bytes": {}}


def test_tenants_of_a_store_do_not_see_each_other(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    for tenant in ("acme", "zeta"):
        built = run("build", docs, "--store", store, "--model", tiny, "--tenant", tenant)
        assert built.code == 0
    assert run("inspect", "--store", store).code == 1
    assert run("delete", "--store", store, "--tenant", "acme", "organ.txt").value["deleted"] == 1
    seen = {
        tenant: run("inspect", "--store", store, "--tenant", tenant).value["document_ids"]
        for tenant in ("acme", "zeta")
    }
    assert seen == {"acme": ["notes.md"], "zeta": ["notes.md", "organ.txt"]}
    asked = run("ask", "--store", store, "--tenant", "acme", "Who built the tidal organ?")
    assert {span["document_id"] for span in asked.value["spans"]} == {"notes.md"}


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("200MB", 200_000_000), ("1.5GiB", 1_610_612_736), ("12", 12), ("3 kb", 3000), ("none", None)],
)
def test_sizes_are_read_as_people_write_them(text: str, n_bytes: int | None) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1XB", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no number of bytes"):
        parse_bytes(text)


def test_doctor_needs_neither_a_model_nor_a_store(run: Run) -> None:
    result = run("doctor")
    assert result.code == 0
    assert result.value["dtype"] in ("float32", "float16", "bfloat16")
    assert result.value["versions"]["torch"]


def test_unreadable_files_are_named_and_the_rest_is_built(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    (docs / "empty.txt").write_text("")
    (docs / "binary.txt").write_bytes(b"\x00\x01\x02\xff" * 64)
    result = run("build", docs, "--store", tmp_path / "store", "--model", tiny)
    assert result.code == 1
    assert result.value["documents"] == 2
    assert len(result.value["failed"]) == 2
    assert "binary.txt" in result.text
    assert "empty.txt" in result.text


def test_strict_stops_at_the_first_unreadable_file_and_writes_nothing(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    (docs / "a.txt").write_bytes(b"\x00")
    result = run("build", docs, "--strict", "--store", tmp_path / "store", "--model", tiny)
    assert (result.code, result.value["error"]["type"]) == (1, "DocumentError")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (("build", "{tmp}/nowhere", "--store", "{tmp}/s"), "DocumentError", "nowhere"),
        (
            ("build", "{docs}", "--store", "{tmp}/s", "--model", "{tmp}/x"),
            "ModelError",
            "config.json",
        ),
        (("ask", "--store", "{tmp}/s", "Why?"), "StoreError", "coinrag build"),
        (("inspect", "--store", "{tmp}/s"), "StoreError", "coinrag build"),
        (
            (
                "build",
                "{docs}",
                "--store",
                "{tmp}/s",
                "--model",
                "{tiny}",
                "--embedder",
                "word2vec",
            ),
            "ConfigError",
            "word2vec",
        ),
        (
            ("build", "{docs}", "--store", "{tmp}/s", "--model", "{tiny}", "--coverage", "most"),
            "ConfigError",
            "nuggets",
        ),
        (
            (
                "build",
                "{docs}",
                "--store",
                "{tmp}/s",
                "--model",
                "{tiny}",
                "--chroma",
                "http://127.0.0.1:9",
            ),
            "SpanIndexError",
            "chroma run",
        ),
    ],
)
def test_bad_input_is_one_clear_error_and_writes_no_store(
    run: Run,
    tiny: Path,
    docs: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    kind: str,
    words: str,
) -> None:
    filled = [a.format(tmp=tmp_path, docs=docs, tiny=tiny) for a in arguments]
    result = run(*filled)
    assert (result.code, result.value["error"]["type"]) == (1, kind)
    assert words in result.value["error"]["message"]
    assert "Traceback" not in result.text
    assert not (tmp_path / "s" / "store.json").exists()


def test_a_store_of_another_model_is_refused_naming_the_field(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    run("build", docs, "--store", store, "--model", tiny)
    other = save_tiny(tmp_path / "other", seed=1)
    result = run("ask", "--store", store, "Who?", "--model", other)
    assert result.value["error"]["type"] == "FingerprintMismatchError"
    assert "weights" in result.value["error"]["message"]


def test_an_unknown_mode_and_an_empty_question_are_refused(
    run: Run, tiny: Path, docs: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    run("build", docs, "--store", store, "--model", tiny)
    wrong = run("ask", "--store", store, "Who?", "--mode", "magic")
    assert "coinrag, chunk, full" in wrong.value["error"]["message"]
    assert run("ask", "--store", store, " ").value["error"]["type"] == "ConfigError"
    long = run("ask", "--store", store, "why " * 5000)
    assert long.value["error"]["type"] == "BudgetError"


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_build_continues_where_it_was(tiny: Path, tmp_path: Path) -> None:
    docs, store = tmp_path / "docs", tmp_path / "store"
    docs.mkdir()
    for i in range(12):
        text = "".join(
            f"Keeper {i}-{j} oiled the brass gate of dock {j} at dawn. " for j in range(400)
        )
        (docs / f"{i:02}.txt").write_text(text)
    command = [sys.executable, "-m", "coinrag_integrations", "build", str(docs)]
    command += ["--store", str(store), "--model", str(tiny), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 120
    while len(list(store.glob(KV_FILES))) < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert json.loads(out.splitlines()[-1])["error"]["type"] == "KeyboardInterrupt"
    kept = {path: path.stat().st_mtime_ns for path in store.glob(KV_FILES)}
    assert len(kept) >= 5

    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["documents"] == 12
    assert report["n_encoded"] == report["chunks"] - len(kept)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert not list(store.glob("tenants/**/.*.tmp"))


def test_texts_are_printed_as_they_are(capsys):
    """Brackets and colons are no markup: extras of packages, footnotes, answers."""
    texts = ("pip install 'x[eval]'", "see [1] and [bold]this[/bold] :smile: [/]")
    output = Output(as_json=True)
    for text in texts:
        output.say(text)
    table = Table("[red]head", title="[i]title")
    table.add_row(texts[1])
    output.say(table)
    printed = capsys.readouterr().err
    for text in (*texts, "[red]head", "[i]title"):
        assert text in printed
    assert printed.count(texts[1]) == 2
