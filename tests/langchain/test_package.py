from __future__ import annotations

import pytest

from coinrag_integrations import langchain
from tests.adapters import import_without, run_python


@pytest.mark.parametrize("missing", ["langchain_core", "langchain_text_splitters"])
def test_without_the_framework_the_error_names_the_extra(missing: str):
    message = import_without(missing, "coinrag_integrations.langchain")
    assert message.startswith("ImportError ")
    assert "pip install 'coinrag-integrations[langchain]'" in message


def test_public_names_are_sorted_and_there():
    assert langchain.__all__ == sorted(langchain.__all__)
    assert all(hasattr(langchain, name) for name in langchain.__all__)


def test_the_other_framework_is_not_loaded():
    done = run_python("""
        import sys
        import coinrag_integrations.langchain
        print([m for m in sys.modules if m.startswith("llama_index")])
    """)
    assert done.stdout.strip() == "[]", done.stderr
