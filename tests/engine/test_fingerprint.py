from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest

from coinrag_integrations.engine import fingerprint
from coinrag_integrations.engine.fingerprint import Fingerprint, canonical_digest

PRINT = Fingerprint(weights="w", tokenizer="t", rope="r", layout="l", dtype="d", context="alone")


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint)])
def test_every_field_changes_the_digest_and_is_named_as_the_difference(name):
    value = 99 if name == "format_version" else "other"
    other = replace(PRINT, **{name: value})
    assert other.digest != PRINT.digest
    assert PRINT.differences(other) == other.differences(PRINT) == [name]


def test_a_round_trip_through_plain_values_is_the_identity():
    assert Fingerprint.from_dict(PRINT.to_dict()) == PRINT
    assert PRINT.differences(PRINT) == []


@pytest.mark.parametrize("change", [{"more": 1}, {"weights": ...}])
def test_missing_and_unknown_fields_are_refused(change):
    value = {k: v for k, v in {**PRINT.to_dict(), **change}.items() if v is not ...}
    with pytest.raises(ValueError, match="expected"):
        Fingerprint.from_dict(value)


def test_digests_are_the_same_in_every_process():
    code = (
        f"import runpy; d = runpy.run_path({fingerprint.__file__!r})['canonical_digest'];"
        "print(d({'b': [1, 2.5, 'é'], 'a': {'y': None, 'x': True}}))"
    )
    environment = {"PYTHONHASHSEED": "7", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == canonical_digest(
        {"a": {"x": True, "y": None}, "b": [1, 2.5, "é"]}
    )
    # Golden: a change of this value makes every existing store unreadable.
    assert canonical_digest({"a": 1}) == (
        "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    )
