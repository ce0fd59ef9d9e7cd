"""Value losses per token. Shapes: B rows, T tokens."""

import torch
from torch import Tensor

from learner.algorithms.masks import masked
from learner.algorithms.surrogates import TokenLosses


def value_clip(
    values_BT: Tensor,
    *,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    loss_mask_BT: Tensor,
    clip_range: float | None = 0.2,
) -> TokenLosses:
    """Squared error of the value, not below that of a value held near its old one.

    Formula: ½·max((V − R)², (clip(V, V_old ± c) − R)²); c None is the plain squared error
    Source: PPO's reference implementation, arXiv:1707.06347
    Degenerate: masked entries give 0
    Peers: torchtune, verl, OpenRLHF, LightRFT (mean per sequence, so aggregation `sequence_mean`), TRL
    """
    values_BT, returns_BT = masked(values_BT, loss_mask_BT=loss_mask_BT), masked(returns_BT, loss_mask_BT=loss_mask_BT)
    error_BT = (values_BT - returns_BT).square()
    if clip_range is None:
        return TokenLosses(0.5 * error_BT)
    old_values_BT = masked(old_values_BT, loss_mask_BT=loss_mask_BT)
    held_BT = torch.clamp(values_BT, old_values_BT - clip_range, old_values_BT + clip_range)
    held_error_BT = (held_BT - returns_BT).square()
    is_held_BT = held_error_BT > error_BT
    low_BT, high_BT = is_held_BT & (values_BT < old_values_BT), is_held_BT & (values_BT > old_values_BT)
    return TokenLosses(0.5 * torch.maximum(error_BT, held_error_BT), clipped_low_BT=low_BT, clipped_high_BT=high_BT)
