"""Products of matrices, by the library that is fastest at them on this processor.

Torch gives float32 products on CPUs to MKL, which leaves AVX512 unused on AMD's processors. oneDNN uses it: on a Zen 5 it multiplies 2.2
times as fast, and a linear layer's forward and backward together take half the time. Both sum in float32; they differ in the order of the
sum.
"""

import torch
from torch import Tensor

from learner.model.compute_type import is_onednn_faster


def product(left_NI: Tensor, right_IO: Tensor) -> Tensor:
    """The matrix product [N, O], in the factors' type. It may be a transposed view."""
    return (product_by_onednn if uses_onednn(left_NI, right_IO) else torch.mm)(left_NI, right_IO)


def product_by_onednn(left_NI: Tensor, right_IO: Tensor) -> Tensor:
    """As `product`, for float32 factors on a CPU. It has no gradient."""
    if not left_NI.shape[1]:
        return torch.mm(left_NI, right_IO)  # oneDNN refuses a sum of nothing
    # Torch copies a first factor that is not contiguous, by one thread. Of two transposed factors the smaller one comes first.
    if left_NI.is_contiguous() or not left_NI.t().is_contiguous() or left_NI.numel() <= right_IO.numel():
        return linear_by_onednn(left_NI, right_IO.t())
    return linear_by_onednn(right_IO.t(), left_NI).t()


def uses_onednn(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype == torch.float32 and not left.is_cuda and is_onednn_faster()


def linear_by_onednn(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """A linear layer's output [..., O] for float32 factors on a CPU. It has no gradient."""
    if torch.compiler.is_compiling():
        return _opaque(x, weight_OI, bias_O)
    # Torch's public functions give float32 factors to oneDNN only with leave to round them.
    return torch.ops.mkldnn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")


@torch.library.custom_op("treadwheel::linear_by_onednn", mutates_args=())
def _opaque(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Torch's compiler knows the operator, but not with weights that change."""
    return linear_by_onednn(x, weight_OI, bias_O)


@_opaque.register_fake
def _(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_OI.shape[0])
