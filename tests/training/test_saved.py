"""What trainings write, for others than who trained."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from coinrag_integrations.training.config import ReaderConfig
from coinrag_integrations.training.learners import make_learner
from tests.tiny import tiny_model

CONFIGS = [
    ReaderConfig(rank=2),
    ReaderConfig(kind="full"),
    ReaderConfig.link_recipe(),
    ReaderConfig.slot_recipe(),
    ReaderConfig.slot_recipe(copies=True),
]


@pytest.mark.parametrize("mode", [0o755, 0o700])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda it: it.kind)
def test_weights_are_read_by_those_who_may_read_their_folder(
    config: ReaderConfig, mode: int, tmp_path: Path
):
    tmp_path.chmod(mode)
    make_learner(tiny_model(), config, None).save(tmp_path, {})
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 1
    assert stat.S_IMODE(files[0].stat().st_mode) == mode & 0o666
    assert not list(tmp_path.glob(".*"))
