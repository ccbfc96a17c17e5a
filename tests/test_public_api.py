from __future__ import annotations

import importlib

import pytest

import coinrag_integrations
from coinrag_integrations import errors

MODULES = [
    "coinrag_integrations",
    "coinrag_integrations.engine",
    "coinrag_integrations.engine.store",
    "coinrag_integrations.nuggets",
    "coinrag_integrations.retrieval",
    "coinrag_integrations.llamaindex",
    "coinrag_integrations.langchain",
]


@pytest.mark.parametrize("name", MODULES)
def test_what_is_public_is_sorted_there_and_documented(name):
    module = importlib.import_module(name)

    # Ruff's order: constants, classes, functions, each by name.
    def rank(public: str) -> tuple[int, str]:
        return (0 if public.isupper() else 1 if public[0].isupper() else 2, public)

    assert list(module.__all__) == sorted(module.__all__, key=rank)
    assert len(set(module.__all__)) == len(module.__all__)
    assert module.__doc__
    for public in module.__all__:
        value = getattr(module, public)
        if callable(value):
            assert value.__doc__, public


def test_the_version_is_a_version():
    assert all(part.isdigit() for part in coinrag_integrations.__version__.split(".")[:2])


def all_errors() -> list[type[Exception]]:
    return [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]


def test_every_error_is_ours_documented_and_drawn_in_the_tree():
    for error in all_errors():
        assert issubclass(error, errors.CoinRAGError)
        assert error.__doc__
        assert error.__name__ in errors.__doc__


@pytest.mark.parametrize("error", all_errors(), ids=lambda e: e.__name__)
def test_the_text_of_an_error_is_its_message(error):
    assert str(error("what, where, what to do")) == "what, where, what to do"
    assert str(error()) == ""


def test_errors_are_caught_as_what_python_calls_them():
    for error in (errors.ConfigError, errors.SpanError, errors.BudgetError, errors.DocumentError):
        assert issubclass(error, ValueError)
    assert issubclass(errors.ChunkNotFoundError, KeyError)
    for error in (errors.ChunkNotFoundError, errors.CorruptChunkError):
        assert issubclass(error, errors.StoreError)
    assert issubclass(errors.UnsupportedModelError, errors.ModelError)
