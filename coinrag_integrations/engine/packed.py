"""Weights packed once for oneDNN, so that a short question streams them at full speed. CPU only.

A linear layer whose weights lie as they were loaded is repacked by oneDNN at every call. With thousands
of tokens that is lost in the arithmetic; with the thirty of a question it is half of the time.
"""

from __future__ import annotations

import torch
from torch import nn

# Above this size the second copy is not made unless it is asked for.
AUTO_BYTES = 2 << 30
# More tokens than this gain nothing from packing.
MAX_TOKENS = 256
_TYPICAL_TOKENS = 32


def can_pack(model: nn.Module) -> bool:
    """Whether oneDNN multiplies this model's dtype on this machine."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operations = torch.ops.mkldnn
    if parameter.dtype is torch.bfloat16:
        return bool(operations._is_mkldnn_bf16_supported())
    if parameter.dtype is torch.float16:
        return bool(operations._is_mkldnn_fp16_supported())
    return False


def packed_bytes(model: nn.Module) -> int:
    """What packing takes: a second copy of every linear layer's weights."""
    return sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))


def pack_linears(model: nn.Module) -> None:
    """Let every linear layer of `model` multiply by packed weights where few tokens are given.

    The parameters stay as they are, and are used for many tokens, for gradients and when compiled;
    `unpack_linears` undoes it. So does changing a layer's parameters, for that layer.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = torch.ops.mkldnn._reorder_linear_weight(
                module.weight.detach(), _TYPICAL_TOKENS
            )
            module.forward = _Forward(module, weight)  # type: ignore[method-assign, assignment]


def is_packed(model: nn.Module) -> bool:
    """Whether any linear layer of `model` has packed weights."""
    forwards = (vars(m).get("forward") for m in model.modules() if isinstance(m, nn.Linear))
    return any(isinstance(it, _Forward) and it.packed is not None for it in forwards)


def unpack_linears(model: nn.Module) -> None:
    """Give every linear layer its own forward again."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            vars(module).pop("forward", None)


class _Forward:
    """A linear layer's forward over packed weights (None: over its parameters)."""

    def __init__(self, module: nn.Linear, packed: torch.Tensor | None) -> None:
        self.module, self.packed = module, packed
        # A copy is made before its module has its weight.
        self.state = None if packed is None else _state(module.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x [..., in] -> [..., out]."""
        few = x.numel() <= MAX_TOKENS * x.shape[-1]
        plain = self.packed is None or torch.is_grad_enabled() or torch.compiler.is_compiling()
        if plain or not few or _state(self.module.weight) != self.state:
            return nn.functional.linear(x, self.module.weight, self.module.bias)
        return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
            x, self.packed, self.module.bias, "none", [], ""
        )

    def __reduce__(self) -> tuple[type[_Forward], tuple[nn.Linear, None]]:
        """Copies and pickles use the parameters: packed weights have no bytes to be copied."""
        return _Forward, (self.module, None)


def _state(weight: torch.Tensor) -> tuple[int, int]:
    """Changes when the weight is replaced, or written to."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
