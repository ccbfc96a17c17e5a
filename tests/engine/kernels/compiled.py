"""Compile the Triton kernels ahead of time for GPUs that are not here; print one JSON object.

A program of its own, without `TRITON_INTERPRET`. Not a test module.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coinrag_integrations.engine.kernels import gpu

ARCHITECTURES = (80, 89, 90, 100)
# Width of a head, how much of it is turned, staged (8 and 4: codes), scales, out.
PLACED = {
    "place-half-D64": (64, 64, "bf16", None, "bf16"),
    "place-half-D96": (96, 96, "fp16", None, "fp16"),
    "place-half-D128": (128, 128, "bf16", None, "bf16"),
    "place-half-D256": (256, 256, "bf16", None, "bf16"),
    "place-half-fp32": (128, 128, "fp32", None, "fp32"),
    "place-interleaved-D128": (128, 128, "bf16", None, "bf16"),
    "place-interleaved-partial": (128, 64, "bf16", None, "bf16"),
    "place-half-int8": (128, 128, 8, "fp16", "bf16"),
    "place-half-int4": (128, 128, 4, "fp16", "bf16"),
    "place-half-partial-int4": (128, 64, 4, "fp32", "bf16"),
    "place-interleaved-int4": (80, 80, 4, "fp32", "bf16"),
}
# Width of a head, entries, bits, scales.
QUANTISED = {
    "quantise-int8": (128, "bf16", 8, "fp16"),
    "quantise-int4": (96, "fp16", 4, "fp32"),
}
SCALES = ("key_scale", "key_zero", "value_scale", "value_zero")


def place_source(variant: str) -> ASTSource:
    head_dim, width, stored, scales, out = PLACED[variant]
    coded = scales is not None
    pointers = {"cos": "fp32", "sin": "fp32", "layers": "i32", "slots": "i64", "out": out}
    pointers |= {"staged": "u8" if coded else stored}
    constants: dict[str, Any] = {
        **gpu.cut(head_dim),
        **gpu.cut_turned(head_dim, width),
        "BITS": stored if coded else 0,
        "INTERLEAVED": "interleaved" in variant,
    }
    if coded:
        pointers |= {**dict.fromkeys(SCALES, scales), "key_group": "i32"}
    else:
        constants |= {f"{name}_ptr": None for name in (*SCALES, "key_group")}
    return source(gpu._place_kernel, pointers, constants)


def quantise_source(variant: str) -> ASTSource:
    head_dim, entries, bits, scales = QUANTISED[variant]
    pointers = {"entries": entries, "codes": "u8", **dict.fromkeys(SCALES, scales)}
    return source(gpu._quantise_kernel, pointers, {**gpu.cut(head_dim), "BITS": bits})


def source(kernel: Any, pointers: dict[str, str], constants: dict[str, Any]) -> ASTSource:
    """A kernel as a launch would specialise it: pointers aligned, strides those of whole heads."""
    kinds = {
        **dict.fromkeys(kernel.arg_names, "i32"),
        **{f"{name}_ptr": f"*{kind}" for name, kind in pointers.items()},
        **dict.fromkeys(constants, "constexpr"),
    }
    aligned = {
        (param.num,): [["tt.divisibility", 16]]
        for param in kernel.params
        if param.name.startswith("s_")
        or (kinds[param.name].startswith("*") and not param.do_not_specialize_on_alignment)
    }
    return ASTSource(kernel, kinds, constants, aligned)


def compile_for(architecture: int, variant: str) -> dict[str, Any]:
    """What came out, and what ptxas says that it takes."""
    made_from = place_source(variant) if variant in PLACED else quantise_source(variant)
    with (
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        contextlib.redirect_stdout(io.StringIO()) as log,
    ):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True  # a cached kernel has no log
        target = GPUTarget("cuda", architecture, 32)
        made = triton.compile(made_from, target=target, options=gpu.OPTIONS)
    said, ptx = log.getvalue(), made.asm["ptx"]
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said)
    assert len(spills) == 3, said
    return {
        "cubin_bytes": len(made.asm["cubin"]),
        "is_elf": made.asm["cubin"][:4] == b"\x7fELF",
        "ptx_target": f"sm_{architecture}" in ptx,
        "registers": int(registers),
        "shared": made.metadata.shared,
        "spills": sum(map(int, spills)),
        "writes_16_bytes": "st.global.v4.b32" in ptx,
        "rounds_to_nearest": re.search(r"cvt\.rn\.b?f16", ptx) is not None,
    }


def compile_all() -> dict[str, dict[str, dict[str, Any]]]:
    """By architecture and variant."""
    return {
        f"sm_{architecture}": {
            variant: compile_for(architecture, variant) for variant in (*PLACED, *QUANTISED)
        }
        for architecture in ARCHITECTURES
    }


def summary() -> dict[str, dict[str, int]]:
    """The most that any variant takes, in bytes and registers a thread, by architecture."""
    return {
        architecture: {
            what: max(made[what] for made in variants.values())
            for what in ("spills", "registers", "shared")
        }
        for architecture, variants in compile_all().items()
    }


if __name__ == "__main__":
    json.dump(compile_all(), sys.stdout)
