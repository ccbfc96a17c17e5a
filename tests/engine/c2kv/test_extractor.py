"""Extractors belong to their model, are what was saved, and share all that they do not change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coinrag_integrations.engine import packed
from coinrag_integrations.engine.c2kv import Extractor, SlotEncoder
from coinrag_integrations.engine.c2kv.extractor import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    projections,
    save_extractor,
)
from coinrag_integrations.engine.encoder import encode
from coinrag_integrations.errors import ConfigError, ModelError, UnsupportedModelError
from tests.engine.c2kv.parts import trained
from tests.tiny import SUPPORTED, supported_model, tiny_model

IDS = list(range(9, 40))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("init", ["last", "eos", "mean"])
@pytest.mark.parametrize("copies", [False, True])
def test_what_is_loaded_is_what_was_saved(model, tmp_path: Path, init: str, copies: bool):
    extractor = trained(model, init=init, overlap=2, copies=copies)
    save_extractor(tmp_path, extractor, {"note": 1})
    loaded = Extractor.load(tmp_path, model)
    nothing = {"shared": 0, "pairs": 0, "copies": 0, "digest": ""}
    assert replace(loaded, **nothing) == replace(extractor, **nothing)
    assert loaded.copies.keys() == extractor.copies.keys()
    assert torch.equal(
        SlotEncoder.of(model, loaded)([IDS], 4)[0], SlotEncoder.of(model, extractor)([IDS], 4)[0]
    )
    assert json.loads((tmp_path / CONFIG_FILE).read_text())["rank"] == (0 if copies else 3)
    assert loaded.digest == Extractor.load(tmp_path, model).digest
    noted = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**noted, "overlap": 3}))
    assert Extractor.load(tmp_path, model).digest != loaded.digest


def test_an_untrained_one_can_be_saved_too(model, tmp_path: Path):
    save_extractor(tmp_path, Extractor.untrained(model, init="eos"), {})
    loaded = Extractor.load(tmp_path, model)
    assert (loaded.pairs, loaded.copies, loaded.ratios, loaded.init) == ({}, {}, (), "eos")
    (end,) = [model.tokenizer.hf.eos_token_id]
    assert torch.equal(loaded.shared, model.hf.get_input_embeddings().weight[end].float())


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gpt-neox", "phi3"])
@pytest.mark.parametrize("copies", [False, True])
def test_only_projections_of_queries_keys_and_values_change(name: str, copies: bool):
    model = supported_model(name)
    before = {name: value.clone() for name, value in model.hf.named_parameters()}
    extractor = trained(model, copies=copies)
    ours = dict(extractor.merged(model).hf.named_parameters())
    changed = {f"{name}.weight" for name in projections(model)}
    if copies:
        changed |= {f"{name}.bias" for name in projections(model)} & before.keys()
        assert all(torch.equal(ours[name], extractor.copies[name]) for name in changed)
    for name, value in model.hf.named_parameters():
        assert torch.equal(value, before[name])
        assert (ours[name].data_ptr() == value.data_ptr()) == (name not in changed)
    assert Extractor.untrained(model).merged(model) is model


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_layer_has_its_projections(name: str):
    model = supported_model(name)
    found = projections(model)
    fused = any(it.endswith(("qkv_proj", "query_key_value")) for it in found)
    assert len(found) == model.layout.n_layers * (1 if fused else 3)


def test_other_models_are_refused(model, tmp_path: Path):
    extractor = trained(model)
    save_extractor(tmp_path, extractor, {})
    with pytest.raises(ModelError, match="trained for other weights"):
        Extractor.load(tmp_path, tiny_model(seed=1))
    with pytest.raises(ModelError, match="trained for other weights"):
        SlotEncoder.of(tiny_model(seed=1), extractor)
    rounded = tiny_model(dtype=torch.bfloat16)  # the same weights have another hash then
    assert Extractor.load(tmp_path, rounded).base == extractor.base
    with pytest.raises(ModelError, match="does not fit"):
        Extractor.load(tmp_path, tiny_model(dtype=torch.bfloat16, hidden_size=32))


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("k_proj.weight", (64, 64), r"k_proj.weight is \(64, 64\), the model's \(32, 64\)"),
        ("k_proj.bias", (32,), r"k_proj.bias is \(32,\), the model has none"),
        ("o_proj.weight", (64, 64), r"o_proj.weight is \(64, 64\), the model has none"),
    ],
)
def test_copies_that_do_not_fit_are_refused_by_name(model, tmp_path: Path, name, shape, said):
    extractor = trained(model, copies=True)
    wrong = {f"model.layers.1.self_attn.{name}": torch.zeros(shape)}
    save_extractor(tmp_path, replace(extractor, copies={**extractor.copies, **wrong}), {})
    with pytest.raises(ModelError, match=f"does not fit 'tiny': model.layers.1.self_attn.{said}"):
        Extractor.load(tmp_path, model)


def test_changes_beside_copies_are_added_to_them(model):
    extractor = trained(model, copies=True)
    (name, (a, b)), *_ = trained(model).pairs.items()
    both = replace(extractor, pairs={name: (a, b)}).merged(model)
    weight = dict(both.hf.named_parameters())[f"{name}.weight"]
    torch.testing.assert_close(weight, extractor.copies[f"{name}.weight"] + 0.5 * b @ a)


@pytest.mark.parametrize("copies", [False, True])
def test_a_packed_model_makes_the_same_slots(copies: bool):
    model = tiny_model(dtype=torch.bfloat16)
    if not packed.can_pack(model.hf):
        pytest.skip("oneDNN multiplies no bf16 here")
    extractor = trained(model, copies=copies)
    encoder = SlotEncoder.of(model, extractor)
    (entries,) = encode(model, [IDS])
    (plain,) = encoder([IDS], 4, [entries])
    packed.pack_linears(model.hf)
    fast = SlotEncoder.of(model, extractor)
    assert packed.is_packed(fast.projecting.hf)
    (slots,) = fast([IDS], 4, [entries])
    torch.testing.assert_close(slots, plain, atol=0.05, rtol=0.05)
    assert (slots - SlotEncoder.of(model)([IDS], 4, [entries])[0]).abs().max() > 0.5


def test_a_model_whose_projections_are_not_known_is_refused(model):
    class Other(torch.nn.Module):
        pass

    with pytest.raises(UnsupportedModelError, match="cannot tell its"):
        projections(replace(model, hf=Other()))


def test_broken_and_missing_files_are_refused(model, tmp_path: Path):
    with pytest.raises(ModelError, match="no C2KV extractor in"):
        Extractor.load(tmp_path / "missing", model)
    for file, content in (
        (WEIGHTS_FILE, b"{}" * 40),
        (CONFIG_FILE, b"[]"),
        (CONFIG_FILE, b"{"),
        (CONFIG_FILE, b"{}"),
    ):
        save_extractor(tmp_path, trained(model), {})
        (tmp_path / file).write_bytes(content)
        with pytest.raises(ModelError, match="that can be read"):
            Extractor.load(tmp_path, model)
    save_extractor(tmp_path, trained(model), {})
    noted = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps({**noted, "init": "middle"}))
    with pytest.raises(ModelError, match="init is 'middle'"):
        Extractor.load(tmp_path, model)
    with pytest.raises(ConfigError, match="init is 'first'"):
        Extractor.untrained(model, init="first")
