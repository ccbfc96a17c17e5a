from __future__ import annotations

from coinrag_integrations import llamaindex
from tests.adapters import import_without, run_python


def test_without_the_framework_the_error_names_the_extra():
    message = import_without("llama_index", "coinrag_integrations.llamaindex")
    assert message.startswith("ImportError ")
    assert "pip install 'coinrag-integrations[llamaindex]'" in message


def test_public_names_are_sorted_and_there():
    assert llamaindex.__all__ == sorted(llamaindex.__all__)
    assert all(hasattr(llamaindex, name) for name in llamaindex.__all__)


def test_the_other_framework_is_not_loaded():
    done = run_python("""
        import sys
        import coinrag_integrations.llamaindex
        print([m for m in sys.modules if m.startswith("langchain")])
    """)
    assert done.stdout.strip() == "[]", done.stderr
