"""Masked arithmetic. Masked entries give no value and no gradient, even if inf or NaN: they are replaced before any arithmetic.

Multiplying by a mask instead would turn an inf or NaN at padding into NaN, forward and backward.
Shapes: B rows, T tokens. `dim=None` is over everything.
"""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 and float16 become float32; float32 and float64 stay as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) or not x.is_floating_point() else x


def masked(x_BT: Tensor, *, mask_BT: Tensor, fill: float = 0.0) -> Tensor:
    """x where the mask is true, `fill` elsewhere, in float32 or better."""
    x_BT = at_least_float32(x_BT)
    return torch.where(mask_BT, x_BT, torch.full((), fill, dtype=x_BT.dtype, device=x_BT.device))


def log_ratio(numerator_BT: Tensor, *, over_BT: Tensor, mask_BT: Tensor, clamp: float | None = None) -> Tensor:
    """Difference of two log-probs, 0 where masked. Values beyond ±clamp are clamped and have no gradient; None does not clamp."""
    # Masking the difference is enough: where() gives masked entries a gradient of 0, and a subtraction passes it on unchanged.
    difference_BT = at_least_float32(numerator_BT) - at_least_float32(over_BT)
    difference_BT = masked(difference_BT, mask_BT=mask_BT)
    return difference_BT if clamp is None else difference_BT.clamp(-clamp, clamp)


def masked_sum(x_BT: Tensor, *, mask_BT: Tensor, dim: int | None = None) -> Tensor:
    """Σ m·x."""
    kept_BT = masked(x_BT, mask_BT=mask_BT)
    return kept_BT.sum() if dim is None else kept_BT.sum(dim)


def masked_mean(x_BT: Tensor, *, mask_BT: Tensor, dim: int | None = None, epsilon: float = 0.0) -> Tensor:
    """Σ m·x / (Σ m + ε); exactly 0 where nothing is unmasked (LightRFT gives NaN). verl's ε is 1e-8, which vanishes in float32."""
    count = mask_BT.sum() if dim is None else mask_BT.sum(dim)
    total = masked_sum(x_BT, mask_BT=mask_BT, dim=dim)
    return total / (count.clamp(min=1).to(total.dtype) + epsilon)


def expm1_minus(x: Tensor) -> Tensor:
    """exp(x) − 1 − x without cancellation at small x."""
    return torch.expm1(x) - x
