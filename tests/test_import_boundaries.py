"""What an import loads, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "chromadb", "llama_index", "langchain_core", "triton", "typer"]
FRAMEWORKS = ["chromadb", "llama_index", "langchain_core", "langchain_text_splitters"]


def loaded_by(*modules: str) -> set[str]:
    code = (
        f"import json, sys, {', '.join(modules)};"
        "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("coinrag_integrations", HEAVY),
        ("coinrag_integrations.types", HEAVY),
        ("coinrag_integrations.errors", HEAVY),
        ("coinrag_integrations.nuggets", HEAVY),
        ("coinrag_integrations.retrieval", HEAVY),
        ("coinrag_integrations.rag", [*FRAMEWORKS, "typer"]),  # loads the engine too
        ("coinrag_integrations.llamaindex", ["langchain_core", "langchain_text_splitters"]),
        ("coinrag_integrations.langchain", ["llama_index"]),
    ],
)
def test_an_import_loads_only_what_it_needs(module, never):
    loaded = loaded_by(module)
    assert "coinrag_integrations" in loaded
    assert loaded.isdisjoint(never)


def test_chroma_in_memory_needs_no_torch():
    code = (
        "import sys; from coinrag_integrations.retrieval import open_client; open_client(None);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_engine_changes_nothing_of_transformers():
    code = (
        "import transformers.models.llama.modeling_llama as llama;"
        "before = llama.apply_rotary_pos_emb; import coinrag_integrations.rag;"
        "assert llama.apply_rotary_pos_emb is before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
