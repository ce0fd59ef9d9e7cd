"""Masked arithmetic. Masked entries give no value and no gradient, be they inf or NaN: they are replaced before the maths.

Multiplying by a mask instead would turn an inf or NaN at padding into NaN, forward and backward.
Shapes: B rows, T tokens. `dim=None` is over everything.
"""

from typing import Literal

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
    """Difference of two log-probs, 0 where masked. A clamp holds the value inside ±clamp, without gradient outside; None does not clamp."""
    # Masking the difference is enough: where() hands masked entries a gradient of 0, and a subtraction passes 0 on as it is.
    difference_BT = at_least_float32(numerator_BT) - at_least_float32(over_BT)
    difference_BT = masked(difference_BT, mask_BT=mask_BT)
    return difference_BT if clamp is None else difference_BT.clamp(-clamp, clamp)


def masked_sum(x_BT: Tensor, *, mask_BT: Tensor, dim: int | None = None) -> Tensor:
    """Σ m·x."""
    kept_BT = masked(x_BT, mask_BT=mask_BT)
    return kept_BT.sum() if dim is None else kept_BT.sum(dim)


def masked_mean(x_BT: Tensor, *, mask_BT: Tensor, dim: int | None = None, epsilon: float = 0.0) -> Tensor:
    """Σ m·x / (Σ m + ε); exactly 0 where nothing is unmasked (LightRFT gives NaN). verl's ε is 1e-8, seen in float64 only."""
    count = mask_BT.sum() if dim is None else mask_BT.sum(dim)
    total = masked_sum(x_BT, mask_BT=mask_BT, dim=dim)
    return total / (count.clamp(min=1).to(total.dtype) + epsilon)


def expm1_minus(x: Tensor) -> Tensor:
    """exp(x) − 1 − x without cancellation at small x."""
    return torch.expm1(x) - x


def is_constant(x_BT: Tensor, *, mask_BT: Tensor) -> Tensor:
    """True when the unmasked entries are all equal (or there are none): max == min, since rounding of the mean hides it from a variance."""
    x_BT = at_least_float32(x_BT)
    largest = torch.where(mask_BT, x_BT, -torch.inf).max() if x_BT.numel() else x_BT.new_zeros(())
    smallest = torch.where(mask_BT, x_BT, torch.inf).min() if x_BT.numel() else x_BT.new_zeros(())
    return largest <= smallest


def whiten(
    x_BT: Tensor,
    *,
    mask_BT: Tensor,
    center: bool = True,
    scale: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-8,
    epsilon_mode: Literal["add", "clamp", "after"] = "add",
    zero_variance: Literal["zero", "rounding"] = "zero",
    outside: Literal["zero", "whiten"] = "zero",
) -> Tensor:
    """(x − mean) / √(var + ε), by `epsilon_mode` √max(var, ε) (clamp) or √var + ε (after), over all unmasked entries; 0 where masked.

    `center=False` adds the mean back after scaling, as torchtune's `whiten(shift_mean=True)` does; `scale=False` only centres.
    Entries that are all equal become exactly 0 (`center`) or stay (`center=False`); `zero_variance="rounding"` skips that test and
    leaves the rounding noise of the mean, divided by √ε, as the peers do. `outside="whiten"` shifts and scales masked entries too, as
    the peers do; mask again before use.
    """
    x_BT = at_least_float32(x_BT) if outside == "whiten" else masked(x_BT, mask_BT=mask_BT)
    unmasked_M = x_BT[mask_BT]
    mean = unmasked_M.mean() if unmasked_M.numel() else x_BT.new_zeros(())
    result_BT = x_BT - mean
    if scale:
        variance = unmasked_M.var(correction=ddof) if unmasked_M.numel() > ddof else x_BT.new_zeros(())
        if epsilon_mode == "after":
            result_BT = result_BT / (variance.sqrt() + epsilon)
        else:
            result_BT = result_BT * torch.rsqrt(
                variance.clamp(min=epsilon) if epsilon_mode == "clamp" else variance + epsilon
            )
    if zero_variance == "zero":
        result_BT = torch.where(is_constant(x_BT, mask_BT=mask_BT), torch.zeros_like(result_BT), result_BT)
    result_BT = result_BT if center else result_BT + mean
    return result_BT if outside == "whiten" else masked(result_BT, mask_BT=mask_BT)
