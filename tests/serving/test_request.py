"""What a request may say of its prefix: handles, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.errors import ConfigError
from coinrag_integrations.serving.request import MAX_HANDLES, PrefixRequest
from coinrag_integrations.types import Scope

NAME = ":abcdefghijklmnopqrstuvwx"
REQUEST = PrefixRequest(
    scope=Scope(tenant="acme", collection="docs"),
    n_head=7,
    handles=(NAME, f"16{NAME}"),
)
PARAMS = REQUEST.to_params()


def test_a_request_comes_back():
    assert PrefixRequest.from_params(PARAMS) == REQUEST
    assert PARAMS["handles"] == [NAME, f"16{NAME}"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"path": "/etc/passwd"}, "unknown fields"),
        ({"kv": [[0.0]]}, "unknown fields"),
        ({"do_remote_prefill": True}, "unknown fields"),
        ({3: 4}, "unknown fields"),
        ({"coinrag": 2}, "of version 2"),
        ({"coinrag": True}, "of version True"),
        ({"coinrag": None}, "of version None"),
        ({"tenant": ["a"]}, "must be texts"),
        ({"tenant": "../x"}, "is no name"),
        ({"collection": "a/b"}, "is no name"),
        ({"n_head": -1}, "n_head"),
        ({"n_head": 1.5}, "n_head"),
        ({"n_head": True}, "n_head"),
        ({"n_head": "7"}, "n_head"),
        ({"handles": NAME}, "must be a list"),
        ({"handles": {NAME: 1}}, "must be a list"),
        ({"handles": [NAME] * (MAX_HANDLES + 1)}, "must be a list"),
        ({"handles": [NAME[1:]]}, "24 letters"),
        ({"handles": [["0" * 32, 0, 4]]}, "24 letters"),
        ({"handles": [NAME.upper()]}, "24 letters"),
        ({"handles": [NAME + "\n"]}, "24 letters"),
        ({"handles": [f"0{NAME}"]}, "24 letters"),
        ({"handles": [f"100{NAME}"]}, "24 letters"),
        ({"handles": [torch.zeros(3)]}, "24 letters"),
        ({"handles": ["/data/kv/ab.safetensors"]}, "24 letters"),
    ],
)
def test_what_is_not_ours_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        PrefixRequest.from_params({**PARAMS, **change})


@pytest.mark.parametrize("missing", PARAMS)
def test_every_field_is_needed(missing):
    with pytest.raises(ConfigError, match=missing):
        PrefixRequest.from_params({k: v for k, v in PARAMS.items() if k != missing})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*PARAMS, "x"]), inner),
        max_leaves=8,
    )
)
def test_anything_else_is_a_config_error(params):
    with pytest.raises(ConfigError):
        PrefixRequest.from_params(params)
