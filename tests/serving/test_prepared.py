"""What a server reads of a model without loading it."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.errors import CorruptChunkError, StoreError
from coinrag_integrations.serving.prepared import (
    FOLDER,
    NOTE,
    Prepared,
    head_id,
    prepare,
    save_reader,
)
from coinrag_integrations.types import Scope
from tests.tiny import SUPPORTED, supported_model


def opened(engine, **options) -> Prepared:
    return Prepared.open(engine.disk.root, engine.scope, **options)


def test_what_is_prepared_is_what_the_engine_has(served):
    engine = served.engine
    prepared = opened(engine)
    assert prepared.fingerprint == engine.fingerprint
    assert (prepared.rope, prepared.layout) == (engine.model.rope, engine.model.layout)
    head = engine.prompt.head
    assert prepared.has_head(head)
    assert torch.equal(prepared.head(head), encode(engine.model, [head])[0])


def test_other_heads_can_be_prepared(served):
    other = tuple(range(40, 60))
    assert not opened(served.engine).has_head(other)
    prepare(served.engine, [other])
    prepare(served.engine, [other])  # nothing happens
    assert torch.equal(opened(served.engine).head(other), encode(served.engine.model, [other])[0])


def test_a_damaged_head_is_not_used(served):
    head = served.engine.prompt.head
    path = opened(served.engine).heads.path(head_id(head))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptChunkError):
        opened(served.engine).head(head)


@pytest.mark.parametrize("family", SUPPORTED)
def test_the_rotations_of_all_families_come_back(family, tmp_path):
    from coinrag_integrations.engine import Engine

    with Engine(supported_model(family), tmp_path) as engine:
        prepare(engine)
        assert opened(engine).rope == engine.model.rope


def test_a_store_that_was_not_prepared_says_so(engine):
    with pytest.raises(StoreError, match=r"but none: run .*prepare"):
        opened(engine)
    with pytest.raises(StoreError, match="none"):
        Prepared.open(engine.disk.root, Scope(tenant="nobody"))


def test_one_of_several_fingerprints_has_to_be_named(served):
    folder = served.engine.folder / FOLDER
    digest = served.engine.fingerprint.digest[:16]
    (folder / "0000").mkdir()
    (folder / "0000" / NOTE).write_text("{}")
    with pytest.raises(StoreError, match=f"0000, {digest}"):
        opened(served.engine)
    assert opened(served.engine, fingerprint=digest[:6]).fingerprint == served.engine.fingerprint


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"format": 2}', '{"format": 1, "forms": []}'])
def test_a_damaged_note_says_so(served, damage):
    (note,) = (served.engine.folder / FOLDER).glob(f"*/{NOTE}")
    note.write_text(damage)
    with pytest.raises(StoreError, match="Prepare it anew"):
        opened(served.engine)


def test_rotations_of_another_model_are_refused(served):
    (note,) = (served.engine.folder / FOLDER).glob(f"*/{NOTE}")
    value = json.loads(note.read_text())
    value["rope"]["rotaries"][0]["inv_freq"][0] += 1e-9
    note.write_text(json.dumps(value))
    with pytest.raises(StoreError, match="not those of its fingerprint"):
        opened(served.engine)


def test_heads_are_stored_as_they_are_where_chunks_are_codes(model, tmp_path):
    from coinrag_integrations.engine import Engine, EngineConfig

    with Engine(model, tmp_path, EngineConfig(codec="int8")) as engine:
        prepare(engine)
        prepared = opened(engine)
        assert prepared.heads.fingerprint == replace(engine.fingerprint, codec="none")
        head = engine.prompt.head
        assert torch.equal(prepared.head(head), encode(model, [head])[0])


def test_a_saved_model_is_read_by_those_who_may_read_its_folder(served, tmp_path: Path):
    """A server runs under another account than who prepares it."""
    tmp_path.chmod(0o755)
    save_reader(served.engine, tmp_path)
    files = list(tmp_path.glob("*.safetensors"))
    assert files
    assert all(stat.S_IMODE(it.stat().st_mode) == 0o644 for it in files)
