"""Policy losses with one ratio per trajectory (GSPO, GMPO), per token before aggregation.

A row must hold the whole trajectory. Aggregate them with `sequence_mean`, as their papers do. Shapes: B rows, T tokens.
"""

import torch
from pydantic import NonNegativeFloat, NonPositiveFloat, PositiveFloat
from torch import Tensor

from learner.algorithms.losses.surrogates import Delta, DualClip, TokenLosses, clipped_surrogate
from learner.algorithms.masks import log_ratio, masked, masked_mean, masked_sum


def gspo(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    epsilon_low: NonNegativeFloat = 3e-4,
    epsilon_high: NonNegativeFloat = 4e-4,
    dual_clip: DualClip | None = None,
    delta: Delta | None = None,
    log_ratio_max: PositiveFloat | None = None,
) -> TokenLosses:
    """PPO's surrogate with the length-normalised ratio of the whole trajectory.

    Formula: s = exp(mean_t log ρ_t); −min(sA, clip(s, 1−ε_low, 1+ε_high)·A)
    Gradient: −s·A times the mean of ∇log π over the trajectory, 0 for a trajectory that a bound holds
    Source: GSPO, arXiv:2507.18071
    Degenerate: a row with nothing unmasked has s = 1 and no loss. The bounds are for a π_old that the learner computes (paper, verl, TRL),
        since the engine's rounding exceeds them: set `proximal: recompute` (preset `gspo`), and `corrections` for staleness and mismatch
    Peers: TRL `importance_sampling_level="sequence"` (`luspo` aggregates it as `sequence_sum_mean`), OpenRLHF, AReaL, NeMo-RL
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT)
    ratio_BT = masked_mean(ratio_BT, mask_BT=loss_mask_BT, dim=1)[:, None].expand_as(ratio_BT)
    return clipped_surrogate(
        ratio_BT,
        advantages_BT=masked(advantages_BT, mask_BT=loss_mask_BT),
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        dual_clip=dual_clip,
        delta=delta,
        log_ratio_max=log_ratio_max,
    )


def gspo_token(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    epsilon_low: NonNegativeFloat = 3e-4,
    epsilon_high: NonNegativeFloat = 4e-4,
    dual_clip: DualClip | None = None,
    delta: Delta | None = None,
    log_ratio_max: PositiveFloat | None = None,
) -> TokenLosses:
    """GSPO whose gradient goes through each token's own log-prob, for advantages that differ within a trajectory.

    Formula: s_t = sg(s)·π_t/sg(π_t), s = exp(mean_t log ρ_t); −min(s_t A_t, clip(s_t, 1−ε_low, 1+ε_high)·A_t)
    Gradient: −s·A_t∇log π_t for each token that no bound holds
    Source: GSPO, arXiv:2507.18071 section 4.3
    Degenerate: equals `gspo`, value and gradient, under `sequence_mean` when A is constant in the trajectory
    Peers: verl `gspo` (log_ratio_max 10)
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT)
    policy_BT = masked(policy_logprobs_BT, mask_BT=loss_mask_BT)
    sequence_B1 = masked_mean(ratio_BT, mask_BT=loss_mask_BT, dim=1)[:, None].detach()
    return clipped_surrogate(
        sequence_B1 + policy_BT - policy_BT.detach(),
        advantages_BT=masked(advantages_BT, mask_BT=loss_mask_BT),
        epsilon_low=epsilon_low,
        epsilon_high=epsilon_high,
        dual_clip=dual_clip,
        delta=delta,
        log_ratio_max=log_ratio_max,
    )


def gmpo(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    log_clip_low: NonNegativeFloat = 0.4,
    log_clip_high: NonNegativeFloat = 0.4,
    length_epsilon: NonNegativeFloat = 0.0,
) -> TokenLosses:
    """Geometric mean over the trajectory of ratios clipped in log space, each on the side that PPO clips.

    Formula: −mean_t(A)·exp(mean_t c_t), c_t = sgn(A)·min(sgn(A)·log ρ_t, sgn(A)·clip(log ρ_t, −low, high)); every token carries its
        trajectory's loss
    Gradient: −mean_t(A)·exp(mean_t c_t) times the mean of ∇log π over the trajectory, to which clipped tokens add 0
    Source: GMPO, arXiv:2507.20673
    Degenerate: A = 0 gives 0
    Peers: TRL `gmpo`, verl `geo_mean` (its clip_ratio_low/high are the log-space bounds, length_epsilon 1e-8)
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT)
    advantages_BT = masked(advantages_BT, mask_BT=loss_mask_BT)
    is_positive_BT, is_negative_BT = advantages_BT > 0, advantages_BT < 0
    bounded_BT = torch.where(is_positive_BT, ratio_BT.clamp(max=log_clip_high), ratio_BT.clamp(min=-log_clip_low))
    bounded_BT = bounded_BT.masked_fill(advantages_BT == 0, 0.0)
    ratio_B = masked_mean(bounded_BT, mask_BT=loss_mask_BT, dim=1, epsilon=length_epsilon).exp()
    losses_B = -masked_mean(advantages_BT, mask_BT=loss_mask_BT, dim=1, epsilon=length_epsilon) * ratio_B
    return TokenLosses(
        masked(losses_B[:, None].expand_as(ratio_BT), mask_BT=loss_mask_BT),
        clipped_low_BT=is_negative_BT & (ratio_BT < -log_clip_low),
        clipped_high_BT=is_positive_BT & (ratio_BT > log_clip_high),
    )


def vespo(
    policy_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    k_positive: NonNegativeFloat = 2.0,
    lambda_positive: NonNegativeFloat = 3.0,
    k_negative: NonNegativeFloat = 3.0,
    lambda_negative: NonNegativeFloat = 2.0,
    log_ratio_clamp: PositiveFloat | None = None,
    log_weight_min: NonPositiveFloat | None = None,
) -> Tensor:
    """REINFORCE with a smooth, detached weight of the whole trajectory's ratio, not normalised by length.

    Formula: −sg(φ(W))·A·log π, W = Π_t π/μ, φ(W) = W^k·exp(λ(1 − W)), k and λ by the sign of A
    Gradient: −φ(W)·A∇log π
    Source: VESPO, arXiv:2602.10693
    Degenerate: φ(1) = 1; φ vanishes at both extremes, so an extreme ratio has no gradient, unless `log_weight_min` bounds log W. W already
        weighs back to μ: a correction by π_old/μ (`tis`, `decoupled`, `icepop`) multiplies by that ratio once more
    Peers: TRL `vespo` (log_ratio_clamp 20, log_weight_min log 1e-8)
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    weights_BT = vespo_weights(
        ratio_BT,
        advantages_BT=advantages_BT,
        loss_mask_BT=loss_mask_BT,
        k_positive=k_positive,
        lambda_positive=lambda_positive,
        k_negative=k_negative,
        lambda_negative=lambda_negative,
        log_weight_min=log_weight_min,
    )
    advantages_BT = masked(advantages_BT, mask_BT=loss_mask_BT)
    return -weights_BT * advantages_BT * masked(policy_logprobs_BT, mask_BT=loss_mask_BT)


@torch.no_grad()
def vespo_weights(
    log_ratio_BT: Tensor,
    *,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
    log_weight_min: float | None = None,
) -> Tensor:
    """φ(W) of `vespo` from log π/μ per token, [B, T]."""
    # Beyond exp(80) the weight is 0 to the last bit; inf − inf would make it NaN.
    total_B1 = masked_sum(log_ratio_BT, mask_BT=loss_mask_BT, dim=1)[:, None].clamp(min=log_weight_min, max=80.0)
    is_positive_BT = masked(advantages_BT, mask_BT=loss_mask_BT) >= 0
    power_BT = torch.where(is_positive_BT, k_positive, k_negative).to(log_ratio_BT.dtype)
    decay_BT = torch.where(is_positive_BT, lambda_positive, lambda_negative).to(log_ratio_BT.dtype)
    return (power_BT * total_B1 + decay_BT * (1 - total_B1.exp())).exp()
