"""Weights of 0 and 1 that drop data too far from the rollout policy. Shapes: B rows (whole trajectories), T tokens."""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from learner.algorithms.conditions import LessThan
from learner.algorithms.corrections.importance import Level, importance_ratio
from learner.algorithms.kl import binary_kl
from learner.algorithms.masks import expm1_minus, log_ratio, masked, masked_mean, masked_sum


def sequence_mask(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    low: Annotated[NonNegativeFloat, LessThan("high")] = 0.99,
    high: PositiveFloat = 1.01,
    level: Level = "geometric",
) -> Tensor:
    """Drops trajectories whose ratio leaves a range.

    Formula: 1 if low ≤ exp(mean_t log π_old/μ) ≤ high, else 0; another `level` is that of `tis`
    Source: verl's rollout correction; OpenRLHF
    Degenerate: 1 where μ = π_old
    Peers: verl `rollout_rs` with geometric statistics, OpenRLHF `mask` at `geo` level
    """
    ratio_BT = importance_ratio(proximal_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT, level=level)
    return ((ratio_BT >= low) & (ratio_BT <= high) & loss_mask_BT).to(ratio_BT.dtype)


@torch.no_grad()
def rejection(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    high: float,
    low: Annotated[float, LessThan("high")] = -torch.inf,
    estimator: Literal["k1", "k2", "k3", "binary_kl", "tv"] = "k3",
    level: Literal["token", "sum", "mean", "max"] = "token",
    log_ratio_clamp: PositiveFloat | None = None,
) -> Tensor:
    """Drops tokens or trajectories by how far the learner is from the rollout policy.

    Formula: 1 if low ≤ D ≤ high, else 0; D of a token is KL(μ ‖ π_old) by k1, k2 or k3, the KL of drawing the token
        or not (`binary_kl`), or |π_old − μ| (`tv`); `level` takes D, or its sum, mean or maximum over the trajectory
    Source: verl's rollout correction
    Degenerate: 1 where μ = π_old and low ≤ 0; bounds are on D itself; verl bounds ratios for k1: give the logarithms of its bounds
    Peers: verl `rollout_rs` (log_ratio_clamp 20), OpenRLHF gating
    """
    ratio_BT = log_ratio(proximal_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    rollout_BT = masked(rollout_logprobs_BT, mask_BT=loss_mask_BT)
    distance_BT = _distance(ratio_BT, rollout_BT, estimator=estimator)
    if level == "sum":
        distance_BT = masked_sum(distance_BT, mask_BT=loss_mask_BT, dim=1)[:, None]
    elif level == "mean":
        distance_BT = masked_mean(distance_BT, mask_BT=loss_mask_BT, dim=1)[:, None]
    elif level == "max":
        distance_BT = masked(distance_BT, mask_BT=loss_mask_BT, fill=-torch.inf).amax(1, keepdim=True)
    return ((distance_BT >= low) & (distance_BT <= high) & loss_mask_BT).to(ratio_BT.dtype)


@torch.no_grad()
def opsm(
    policy_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    delta: NonNegativeFloat = 0.1,
) -> Tensor:
    """Off-policy sequence masking: drops trajectories with negative advantage that the policy has already moved away from.

    Formula: 0 if A < 0 and mean_t(log μ − log π) > δ, else 1
    Source: DeepSeek-V3.2, arXiv:2512.02556
    Degenerate: none at ratio 1
    Peers: TRL `off_policy_mask_threshold`
    """
    gap_BT = log_ratio(rollout_logprobs_BT, over_BT=policy_logprobs_BT, mask_BT=loss_mask_BT)
    is_far_B1 = (masked_mean(gap_BT, mask_BT=loss_mask_BT, dim=1) > delta)[:, None]
    return (loss_mask_BT & ~(is_far_B1 & (advantages_BT < 0))).to(gap_BT.dtype)


def _distance(ratio_BT: Tensor, rollout_BT: Tensor, *, estimator: str) -> Tensor:
    if estimator == "k1":
        return -ratio_BT
    if estimator == "k2":
        return 0.5 * ratio_BT.square()
    if estimator == "k3":
        return expm1_minus(ratio_BT)
    # Rounding can lift the log-prob of a certain token above 0.
    rollout_BT, learner_BT = rollout_BT.clamp(max=0.0), (rollout_BT + ratio_BT).clamp(max=0.0)
    if estimator == "tv":
        return (learner_BT.exp() - rollout_BT.exp()).abs()
    return binary_kl(rollout_BT, to_logprobs_BT=learner_BT)
