"""Run the Triton kernel in its interpreter against the reference; print one JSON object.

A program of its own: `TRITON_INTERPRET` must be set before the kernel is defined, and would change
what the rest of the tests choose. Not a test module.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from coinrag_integrations.engine import Engine, EngineConfig
from coinrag_integrations.engine.kernels import choose_kernels, reference
from coinrag_integrations.engine.kernels.place import place
from coinrag_integrations.engine.rope import RopeTable
from tests.tiny import fill, supported_model

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = {
    f"T{t}-L{n}-H{h}-D{d}": (t, n, h, d)
    for t, n, h, d in [
        (1, 1, 1, 8),
        (1, 3, 2, 64),
        (7, 2, 3, 16),
        (7, 1, 1, 96),
        (33, 1, 2, 96),
        (33, 3, 1, 128),
        (33, 2, 3, 8),
        (70, 2, 2, 64),
        (70, 1, 3, 128),
        (32, 1, 1, 16),
        (64, 2, 1, 8),
    ]
}
START, BEHIND = 5, 3


def compare(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, object]:
    """Both implementations into NaN-filled buffers with rows before and behind the entries."""
    n, n_layers, n_heads, dim = shape
    random = torch.Generator().manual_seed(n * dim)
    staged = (8 * torch.randn(n, n_layers, 2, n_heads, dim, generator=random)).to(dtype)
    table = RopeTable(inv_freq=tuple(1e4 ** (-2 * i / dim) for i in range(dim // 2)))
    angles = table.angles(range(-20, n - 20), CPU)
    outs = []
    for implementation in (reference.place, place):
        out = torch.full((n_layers, 2, n_heads, START + n + BEHIND, dim), torch.nan, dtype=dtype)
        before = staged.clone()
        implementation(staged, *angles, out, START)
        assert torch.equal(staged, before)
        outs.append(out)
    expected, found = outs
    rows = slice(START, START + n)
    difference = (found - expected)[:, 0, :, rows].double().abs()
    # One ulp of the result, and of fp32 at the size of the pair: its two products may be fused.
    eps = torch.finfo(dtype).eps
    pair = staged.permute(1, 2, 3, 0, 4)[:, 0].double().unflatten(-1, (2, -1)).norm(dim=-2)
    pair = torch.cat((pair, pair), -1)
    allowed = eps * expected[:, 0, :, rows].double().abs() + 2**-23 * pair
    return {
        "keys_within_one_ulp": bool((difference <= allowed).all()),
        "values_equal": torch.equal(found[:, 1, :, rows], expected[:, 1, :, rows]),
        "values_are_the_input": torch.equal(
            found[:, 1, :, rows], staged.permute(1, 2, 3, 0, 4)[:, 1]
        ),
        "no_hole": not bool(found[:, :, :, rows].isnan().any()),
        "others_untouched": bool(
            found[:, :, :, :START].isnan().all() and found[:, :, :, rows.stop :].isnan().all()
        ),
        "turned": not torch.equal(found[:, 0, :, rows], staged.permute(1, 2, 3, 0, 4)[:, 0]),
    }


def answer() -> dict[str, object]:
    """The same question through both implementations."""
    model = supported_model("llama")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for kernels in ("torch", "triton"):
            config = EngineConfig(chunk_tokens=32, coverage="all", kernels=kernels)
            with Engine(model, Path(folder), config) as engine:
                refs = [chunk.ref() for chunk in fill(engine)]
                kv = engine.compose(refs)[0].kv
                text = engine.answer("Who built it?", refs).text
                found[kernels] = (engine.kernels.name, text, kv)
    same = torch.allclose(found["torch"][2], found["triton"][2], rtol=1e-5, atol=1e-5)
    return {
        "names": [found["torch"][0], found["triton"][0]],
        "texts": [found["torch"][1], found["triton"][1]],
        "prefixes_close": same,
        "auto": choose_kernels("auto", CPU).name,
    }


def nothing() -> dict[str, object]:
    """No entries at all."""
    out = torch.full((1, 2, 1, 4, 8), torch.nan)
    empty = torch.empty(0, 4)
    place(torch.empty(0, 1, 2, 1, 8), empty, empty, out, 2)
    return {"others_untouched": bool(out.isnan().all())}


if __name__ == "__main__":
    results = {
        f"{name}-{dtype}": compare(shape, DTYPES[dtype])
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }
    json.dump({"cases": results, "answer": answer(), "nothing": nothing()}, sys.stdout)
