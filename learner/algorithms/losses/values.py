"""Value losses per token. Shapes: B rows, T tokens."""

import torch
from pydantic import PositiveFloat
from torch import Tensor

from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.masks import at_least_float32, masked


def value_clip(
    values_BT: Tensor,
    *,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    loss_mask_BT: Tensor,
    clip_range: PositiveFloat | None = 0.2,
) -> TokenLosses:
    """Squared error of the value, or of the value clipped to a range around its old one, whichever is larger.

    Formula: ½·max((V − R)², (clip(V, V_old ± c) − R)²), c = `clip_range`; null is the plain squared error
    Source: PPO's reference implementation, arXiv:1707.06347
    Degenerate: masked entries give 0
    Peers: torchtune, verl, OpenRLHF, LightRFT (mean per sequence, so aggregation `sequence_mean`), TRL
    """
    values_BT, returns_BT = at_least_float32(values_BT), at_least_float32(returns_BT)
    error_BT = masked(values_BT - returns_BT, mask_BT=loss_mask_BT).square()
    if clip_range is None:
        return TokenLosses(0.5 * error_BT)
    old_values_BT = at_least_float32(old_values_BT)
    held_BT = torch.clamp(values_BT, old_values_BT - clip_range, old_values_BT + clip_range)
    held_error_BT = masked(held_BT - returns_BT, mask_BT=loss_mask_BT).square()
    is_held_BT = held_error_BT > error_BT
    is_lower_BT = values_BT < old_values_BT
    losses_BT = 0.5 * torch.maximum(error_BT, held_error_BT)
    return TokenLosses(losses_BT, clipped_low_BT=is_held_BT & is_lower_BT, clipped_high_BT=is_held_BT & ~is_lower_BT)
