"""Linear layers that multiply in the way that is fastest on this CPU (`learner.model.compute_type`).

* `WideLinear`, for CPUs that are slow at bfloat16: a bfloat16 product is summed in float32 and rounded once. Converting the factors to
  float32, which is exact, and rounding the product gives the same result up to the order of the sum. Tensors saved for backward stay
  bfloat16; only one layer at a time has float32 factors.
* `OneDnnLinear`, for CPUs on which oneDNN multiplies float32 faster than torch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.model.compute_type import is_onednn_faster, multiplies_in_float32
from learner.model.products import linear_by_onednn, product_by_onednn


class CpuLinear(nn.Linear):
    """Has the parameters, their names and the result type of a plain layer. Only one type of factors, on a CPU, is computed differently."""

    factors: torch.dtype
    linear: Callable[..., Tensor]
    """Multiplies them in float32, with a bias."""
    product: Callable[[Tensor, Tensor], Tensor]
    """As `linear`, of plain matrices."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != self.factors or self.weight.dtype != self.factors or input.is_cuda:
            return super().forward(input)
        return _Product.apply(input, self.weight, self.bias, self.linear, self.product)  # pyright: ignore[reportReturnType]


class WideLinear(CpuLinear):
    factors = torch.bfloat16
    linear = staticmethod(F.linear)
    product = staticmethod(torch.mm)


class OneDnnLinear(CpuLinear):
    factors = torch.float32
    linear = staticmethod(linear_by_onednn)
    product = staticmethod(product_by_onednn)


def multiply_fast(module: nn.Module) -> None:
    """Makes the plain linear layers of `module` those that are fastest on this processor, in place."""
    if multiplies_in_float32():
        replace_layers(module, WideLinear)
    elif is_onednn_faster():
        replace_layers(module, OneDnnLinear)


def replace_layers(module: nn.Module, kind: type[CpuLinear]) -> None:
    """Makes all plain linear layers of `module` of this kind, in place."""
    for part in module.modules():
        if type(part) is nn.Linear:  # subclasses may compute something else
            part.__class__ = kind


class _Product(torch.autograd.Function):
    """In float32 by `linear` and `product`, rounded to the inputs' type. Shapes: N rows, I inputs, O outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        linear: Callable[..., Tensor],
        product: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.product = product
        return linear(x.float(), weight_OI.float(), None if bias_O is None else bias_O.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradient_NO = gradients[0].reshape(-1, weight_OI.shape[0]).float()
        x_NI = x.reshape(-1, x.shape[-1])
        return (
            ctx.product(gradient_NO, weight_OI.float()).to(x.dtype).view(x.shape) if needs_input else None,
            ctx.product(gradient_NO.t(), x_NI.float()).to(weight_OI.dtype) if needs_weight else None,
            gradient_NO.sum(0).to(x.dtype) if needs_bias else None,
            *[None] * 2,
        )
