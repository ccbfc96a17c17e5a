"""Compile the Triton kernel ahead of time for GPUs that are not here; print one JSON object.

A program of its own, without `TRITON_INTERPRET`. Not a test module.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coinrag_integrations.engine.kernels.place import BLOCK_ENTRIES, _place_kernel

ARCHITECTURES, DTYPES, HEAD_DIMS = (80, 89, 90, 100), ("bf16", "fp16"), (64, 96)


def compile_for(architecture: int, dtype: str, head_dim: int) -> dict[str, object]:
    """The sizes of what came out."""
    half = head_dim // 2
    constants = {"HALF": half, "BT": BLOCK_ENTRIES, "BD": triton.next_power_of_2(half)}
    signature = {
        **dict.fromkeys(("staged_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
        **dict.fromkeys("TLHN", "i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    # In the order of the kernel's own arguments.
    signature = {name: signature[name] for name in _place_kernel.arg_names}
    source = ASTSource(_place_kernel, signature, constants)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    return {
        "cubin_bytes": len(made.asm["cubin"]),
        "is_elf": made.asm["cubin"][:4] == b"\x7fELF",
        "ptx_target": f"sm_{architecture}" in made.asm["ptx"],
    }


if __name__ == "__main__":
    json.dump(
        {
            f"sm_{architecture}-{dtype}-D{head_dim}": compile_for(architecture, dtype, head_dim)
            for architecture in ARCHITECTURES
            for dtype in DTYPES
            for head_dim in HEAD_DIMS
        },
        sys.stdout,
    )
