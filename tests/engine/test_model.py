from __future__ import annotations

import pytest
import torch

from coinrag_integrations.engine import Engine, load_model
from coinrag_integrations.engine.model import choose_device, choose_dtype, hash_weights
from coinrag_integrations.errors import ConfigError, ModelError, UnsupportedModelError
from tests.tiny import fill, save_tiny, tiny_hf

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


def test_a_folder_is_loaded_and_answers(folder, tmp_path):
    model = load_model(folder, dtype="float32", device="cpu")
    assert model.name == str(folder)
    assert model.layout.dtype is torch.float32
    assert not model.hf.training
    with Engine(model, tmp_path) as engine:
        assert engine.answer("Who?", [fill(engine)[0].ref()]).usage.generated > 0


def test_a_loaded_folder_is_the_model_that_was_saved(folder):
    model = load_model(str(folder), dtype="float32")
    assert model.weights == hash_weights(tiny_hf())
    assert load_model(folder, dtype="bfloat16").weights != model.weights


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_dtype_is_the_one_asked_for(folder, dtype):
    assert load_model(folder, dtype=dtype).layout.dtype is getattr(torch, dtype)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no/such/folder", "../x"])
def test_a_folder_that_is_not_there_is_named(name):
    with pytest.raises(ModelError, match=r"no model at .*config\.json"):
        load_model(name)


def test_an_empty_folder_and_a_file_are_no_models(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ModelError, match="no model at"):
            load_model(path)


def test_a_hub_name_that_cannot_be_reached_is_an_error_of_ours():
    with pytest.raises(ModelError, match=r"cannot load the model 'no-such/model-anywhere'"):
        load_model("no-such/model-anywhere")


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"{}"])
def test_a_broken_file_in_the_folder_is_an_error_of_ours(tmp_path, broken, content):
    save_tiny(tmp_path)
    (tmp_path / broken).write_bytes(content)
    with pytest.raises(ModelError):
        load_model(tmp_path)


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_in_the_folder_is_an_error_of_ours(tmp_path, missing):
    save_tiny(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError):
        load_model(tmp_path)


def test_a_folder_of_an_unsupported_model_is_refused(tmp_path):
    import transformers

    save_tiny(tmp_path, config_class=transformers.GPT2Config)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        load_model(tmp_path)


def test_the_hash_of_weights_sees_every_value_and_is_stable():
    model = tiny_hf()
    before = hash_weights(model)
    assert hash_weights(tiny_hf()) == before
    assert hash_weights(tiny_hf(seed=1)) != before
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 4] += 1e-6
    assert hash_weights(model) != before


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "", "tpu!"])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ConfigError, match="use 'auto'"):
        choose_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_and_auto_is_the_cpu():
    with pytest.raises(ConfigError, match="sees no GPU"):
        choose_device("cuda")
    assert choose_device("auto") == CPU


def test_dtypes_have_names_and_others_are_refused():
    assert choose_dtype("float16", CPU) is torch.float16
    assert choose_dtype("auto", CPU) in (torch.float32, torch.bfloat16)
    with pytest.raises(ConfigError, match="not one of auto, float32"):
        choose_dtype("int8", CPU)


def test_an_unknown_dtype_is_named_as_such(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="dtype 'float8' is not one of"):
        load_model(tmp_path, dtype="float8", device="cpu")
