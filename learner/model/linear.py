"""Linear layers that multiply bfloat16 factors in float32, for CPUs that are faster at it (`learner.model.compute_type`).

A bfloat16 product is summed in float32 and rounded once. Converting the factors to float32, which is exact, and rounding the product gives
the same result up to the order of the sum. Tensors saved for backward stay bfloat16; only one layer at a time has float32 factors.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.model.compute_type import multiplies_in_float32


def multiply_fast(module: nn.Module) -> None:
    """`multiply_in_float32` on processors that are faster at it; nothing on others."""
    if multiplies_in_float32():
        multiply_in_float32(module)


def multiply_in_float32(module: nn.Module) -> None:
    """Makes all plain linear layers of `module` Float32Linear, in place. Only those with bfloat16 factors on a CPU compute differently."""
    for part in module.modules():
        if type(part) is nn.Linear:  # subclasses may compute something else
            part.__class__ = Float32Linear


class Float32Linear(nn.Linear):
    """Has the parameters, their names and the result type of a plain layer."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.bfloat16 or self.weight.dtype != torch.bfloat16 or input.is_cuda:
            return super().forward(input)
        return _Product.apply(input, self.weight, self.bias)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """Shapes: N rows, I inputs, O outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        product = F.linear(x.float(), weight_OI.float(), None if bias_O is None else bias_O.float())
        return product.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        gradient_NO = gradients[0].reshape(-1, weight_OI.shape[0]).float()
        return (
            (gradient_NO @ weight_OI.float()).to(x.dtype).view(x.shape) if needs_input else None,
            (gradient_NO.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight_OI.dtype) if needs_weight else None,
            gradient_NO.sum(0).to(x.dtype) if needs_bias else None,
        )
