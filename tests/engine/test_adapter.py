"""Adapters are merged where they belong, share everything else, and are refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from coinrag_integrations.engine import LoadedModel, packed
from coinrag_integrations.engine.adapter import (
    BASE_FILE,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    with_adapter,
)
from coinrag_integrations.errors import ModelError
from coinrag_integrations.rag import CoinRAG
from tests.tiny import HashEmbedder, tiny_model

NAME = "model.layers.0.self_attn.q_proj"


def write(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    rank: int = 2,
    base: dict | None = None,
    **config,
) -> Path:
    """An adapter as peft writes it, over modules of these shapes [out, in]."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (n_out, n_in) in shapes.items():
        for kind, shape in (("A", (rank, n_in)), ("B", (n_out, rank))):
            key = f"base_model.model.{name}.lora_{kind}.weight"
            tensors[key] = torch.randn(shape, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "bias": "none", **config}
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    if base is not None:
        (folder / BASE_FILE).write_text(json.dumps(base))
    return folder


@pytest.fixture
def shapes(model: LoadedModel) -> dict[str, tuple[int, int]]:
    modules = dict(model.hf.named_modules())
    names = [NAME, "model.layers.2.mlp.down_proj"]
    return {name: tuple(modules[name].weight.shape) for name in names}


@pytest.mark.parametrize(("options", "scale"), [({}, 2.0), ({"use_rslora": True}, 4 / 2**0.5)])
def test_the_change_is_scale_times_b_times_a(model, shapes, tmp_path, options, scale):
    adapter = Adapter.load(write(tmp_path, shapes, **options))
    reader = with_adapter(model, adapter)
    ours, theirs = dict(reader.hf.named_modules()), dict(model.hf.named_modules())
    for name, (a, b) in adapter.pairs.items():
        torch.testing.assert_close(ours[name].weight, theirs[name].weight + scale * b @ a)
    assert reader.adapter == adapter.digest != model.adapter


def test_everything_else_is_shared_and_the_base_stays(model, shapes, tmp_path):
    before = {name: value.clone() for name, value in model.hf.named_parameters()}
    reader = with_adapter(model, Adapter.load(write(tmp_path, shapes)))
    ours = dict(reader.hf.named_parameters())
    for name, value in model.hf.named_parameters():
        assert torch.equal(value, before[name])
        is_adapted = name.removesuffix(".weight") in shapes
        assert (ours[name].data_ptr() == value.data_ptr()) != is_adapted
    assert (reader.weights, reader.layout) == (model.weights, model.layout)
    assert reader.hf is not model.hf
    assert not any(
        parameter.requires_grad
        for parameter in reader.hf.parameters()
        if id(parameter) not in map(id, model.hf.parameters())
    )


def test_a_packed_model_gets_a_packed_reader(shapes, tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    if not packed.can_pack(model.hf):
        pytest.skip("oneDNN multiplies no bf16 here")
    adapter = Adapter.load(write(tmp_path, shapes))
    plain = with_adapter(model, adapter)
    packed.pack_linears(model.hf)
    reader = with_adapter(model, adapter)
    assert packed.is_packed(reader.hf)
    assert not packed.is_packed(plain.hf)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            reader.hf(ids).logits, plain.hf(ids).logits, atol=0.05, rtol=0.05
        )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": "many"}, "can be read"),
        ({"r": 0}, "can be read"),
        ({"lora_alpha": None}, "can be read"),
    ],
)
def test_other_kinds_of_adapters_are_refused(shapes, tmp_path, options, named):
    with pytest.raises(ModelError, match=named):
        Adapter.load(write(tmp_path, shapes, **options))


def test_damaged_and_missing_adapters_are_refused(shapes, tmp_path):
    with pytest.raises(ModelError, match=r"no adapter in .*missing"):
        Adapter.load(tmp_path / "missing")
    for file, content in (
        (WEIGHTS_FILE, b"{}" * 40),
        (CONFIG_FILE, b"[]"),
        (CONFIG_FILE, b"{"),
        (BASE_FILE, b"7"),
    ):
        folder = write(tmp_path / file / str(len(content)), shapes)
        (folder / file).write_bytes(content)
        with pytest.raises(ModelError, match="that can be read"):
            Adapter.load(folder)
    folder = write(tmp_path / "half", shapes)
    save_file({f"base_model.model.{NAME}.lora_A.weight": torch.zeros(2, 64)}, folder / WEIGHTS_FILE)
    with pytest.raises(ModelError, match="do not belong together"):
        Adapter.load(folder)


def test_an_adapter_of_another_model_is_refused(model, shapes, tmp_path):
    n_out, n_in = shapes[NAME]
    for i, wrong in enumerate(
        (
            {NAME: (n_out + 1, n_in)},
            {"model.layers.9.self_attn.q_proj": (n_out, n_in)},
            {"model.norm": (n_out, n_in)},
            {"model.embed_tokens": (512, 64)},
        )
    ):
        with pytest.raises(ModelError, match="does not fit 'tiny'"):
            with_adapter(model, Adapter.load(write(tmp_path / str(i), wrong)))
    own = {"weights": model.weights, "dtype": str(model.layout.dtype)}
    other = {**own, "weights": "0" * 32}
    with_adapter(model, Adapter.load(write(tmp_path / "own", shapes, base=own)))
    # Rounded to another dtype, the same weights have another hash.
    with_adapter(
        model, Adapter.load(write(tmp_path / "x", shapes, base=other | {"dtype": "torch.float16"}))
    )
    with pytest.raises(ModelError, match="over other weights"):
        with_adapter(model, Adapter.load(write(tmp_path / "other", shapes, base=other)))


def test_a_store_remembers_its_adapter(model, shapes, tmp_path):
    folder, store = write(tmp_path / "adapter", shapes), tmp_path / "store"
    digest = Adapter.load(folder).digest
    for given, expected in ((folder, digest), (None, digest), ("", None), (None, None)):
        with CoinRAG.open(store, model=model, embedder=HashEmbedder(), adapter=given) as rag:
            assert rag.engine.reader.adapter == expected
            assert rag.engine.model is model
    with pytest.raises(ModelError, match="no adapter in"):
        CoinRAG.open(store, model=model, embedder=HashEmbedder(), adapter=tmp_path / "none")
