"""The clipped surrogate that the PPO family shares, and the form in which losses report clipped tokens. Shapes: B rows, T tokens."""

import math
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

DualClip = Annotated[float, Field(gt=1)]
Delta = Annotated[float, Field(ge=1)]
"""A step begins at ρ = 1, which neither bound may exclude."""


class TokenLosses(NamedTuple):
    """Losses per token, and which tokens lost their gradient to which bound (None: the loss has no such bound).

    A token is clipped if the bound changed its loss, not if its ratio is out of range and PPO's minimum ignores that. Runs never count a
    token with advantage 0, whatever the loss marks: no bound changes its loss.
    """

    losses_BT: Tensor
    clipped_low_BT: Tensor | None = None
    """Clipped by the lower bound (for PPO: ρ < 1 − ε_low and A < 0)."""
    clipped_high_BT: Tensor | None = None
    """Clipped by the upper bound (for PPO: ρ > 1 + ε_high and A > 0)."""
    clipped_dual_BT: Tensor | None = None
    """Clipped by the upper bound on ρ for A < 0 (`dual_clip`, `delta`), or by a cap on a weight."""
    clipped_covariance_BT: Tensor | None = None
    """Chosen by its covariance (`clip_cov`), and not clipped by a bound."""

    @property
    def clipped_BT(self) -> Tensor:
        """Clipped by the lower or the upper bound, or chosen by its covariance."""
        clipped_BT = torch.zeros_like(self.losses_BT, dtype=torch.bool)
        for by_BT in (self.clipped_low_BT, self.clipped_high_BT, self.clipped_covariance_BT):
            clipped_BT = clipped_BT if by_BT is None else clipped_BT | by_BT
        return clipped_BT


def clipped_surrogate(
    log_ratio_BT: Tensor,
    *,
    advantages_BT: Tensor,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
    log_ratio_max: float | None = None,
) -> TokenLosses:
    """−min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A) from log ρ, which is at most `log_ratio_max`.

    The minimum bounds ρ above where A ≥ 0 and below where A < 0. Bounding log ρ is equivalent and computes no overflowing ρ, which the
    minimum would drop but whose gradient would be 0·inf = NaN.
    """
    log_ratio_BT = log_ratio_BT if log_ratio_max is None else log_ratio_BT.clamp(max=log_ratio_max)
    low = math.log1p(-epsilon_low) if epsilon_low < 1 else -math.inf
    high = math.log1p(epsilon_high)
    delta_bound = math.inf if delta is None else math.log(delta)
    # δ bounds only the unclipped term: where A < 0 the minimum still takes the clipped one, if its ρ is larger.
    dual_bound = min(math.inf if dual_clip is None else math.log(dual_clip), max(delta_bound, high))
    high = min(high, delta_bound)
    is_negative_BT = advantages_BT < 0
    bounded_BT = torch.where(
        is_negative_BT, log_ratio_BT.clamp(low, max(dual_bound, low)), log_ratio_BT.clamp(max=high)
    )
    ratio_BT = bounded_BT.exp()
    with torch.no_grad():
        is_bound_BT = bounded_BT != log_ratio_BT
        is_low_BT = is_negative_BT & is_bound_BT & (log_ratio_BT < low)
        is_high_BT = (advantages_BT > 0) & is_bound_BT
        is_dual_BT = None if math.isinf(dual_bound) else is_negative_BT & is_bound_BT & ~is_low_BT
    return TokenLosses(-advantages_BT * ratio_BT, is_low_BT, is_high_BT, is_dual_BT)


def unclipped_surrogate(log_ratio_BT: Tensor, *, advantages_BT: Tensor) -> Tensor:
    """−ρA from log ρ; exactly 0 where A = 0, where exp(inf)·0 would be NaN."""
    log_ratio_BT = torch.where(advantages_BT == 0, torch.zeros_like(log_ratio_BT), log_ratio_BT)
    return -advantages_BT * log_ratio_BT.exp()
