"""KL estimators from samples of the policy, per token, and the KL over a partition. Shapes: B rows, T tokens, P parts.

Estimators take the log-probs of the policy and of another model (reference, rollout policy); masked entries give 0. They estimate
KL(π ‖ other) if π sampled the tokens. `log_ratio_clamp` bounds the log-ratio; the default is no bound.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.masks import expm1_minus, log_ratio, masked


def k1(
    policy_logprobs_BT: Tensor, *, other_logprobs_BT: Tensor, loss_mask_BT: Tensor, log_ratio_clamp: float | None = None
) -> Tensor:
    """Plain log-ratio: unbiased, high variance, may be negative.

    Formula: log π − log π_ref
    Source: Schulman, "Approximating KL divergence" (2020)
    Degenerate: as a loss its expected gradient is 0; use it in the reward
    Peers: torchrl KLRewardTransform, LightRFT and OpenRLHF `k1`, verl `kl`
    """
    return log_ratio(policy_logprobs_BT, over_BT=other_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)


def k2(
    policy_logprobs_BT: Tensor, *, other_logprobs_BT: Tensor, loss_mask_BT: Tensor, log_ratio_clamp: float | None = None
) -> Tensor:
    """Half the squared log-ratio: biased in value; in the loss its gradient on-policy is that of KL(π ‖ π_ref).

    Formula: ½(log π − log π_ref)²
    Source: Schulman (2020)
    Degenerate: none
    Peers: verl `mse`, OpenRLHF `k2`
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=other_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    return 0.5 * ratio_BT.square()


def k3(
    policy_logprobs_BT: Tensor, *, other_logprobs_BT: Tensor, loss_mask_BT: Tensor, log_ratio_clamp: float | None = None
) -> Tensor:
    """Never negative, low variance; on-policy right in value, and in the loss its gradient is that of KL(π_ref ‖ π).

    Formula: exp(−k1) + k1 − 1, as expm1(−k1) + k1
    Source: Schulman (2020); GRPO, arXiv:2402.03300
    Degenerate: overflows where π_ref/π does, unless clamped
    Peers: torchrl `kl_to_ref`, TapeAgents, TRL, verl `low_var_kl` (log-ratio clamped at 20, result at 10), LightRFT, OpenRLHF (clamp 10)
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=other_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    return expm1_minus(-ratio_BT)


def unbiased(
    policy_logprobs_BT: Tensor,
    *,
    other_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """k3 weighted by the ratio to the policy that sampled: right value and right gradient under any sampler.

    Formula: ρ·k3 with ρ = π/μ, whose gradient is ρ·(log π − log π_ref)·∇log π; a clamp holds the log-ratio in both
    Source: DeepSeek-V3.2, arXiv:2512.02556
    Degenerate: at ρ = 1 its value is k3's, its gradient is not; overflows where π_ref/μ or π/μ does
    Peers: TRL `use_bias_correction_kl`, which weighs by π/π_old
    """
    gap_BT = log_ratio(other_logprobs_BT, over_BT=policy_logprobs_BT, mask_BT=loss_mask_BT).detach()
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT).exp()
    sampled_BT = log_ratio(other_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT)
    held_BT = gap_BT if log_ratio_clamp is None else gap_BT.clamp(-log_ratio_clamp, log_ratio_clamp)
    # Where k3 overflows, ρ underflows. Their product contains ρ·exp(d) = π_ref/μ, which does neither.
    is_far_BT = (gap_BT.abs() > 1) & (gap_BT == held_BT)
    far_BT = sampled_BT.exp() - ratio_BT * (1 + gap_BT)
    near_BT = ratio_BT * expm1_minus(torch.where(is_far_BT, 0.0, held_BT))
    # In a clamped k3 only ρ would have gradient, which leads away from a reference that is far likelier.
    return torch.where(is_far_BT, far_BT, near_BT).detach() - held_BT * (ratio_BT - ratio_BT.detach())


def drift(
    policy_logprobs_BT: Tensor, *, other_logprobs_BT: Tensor, loss_mask_BT: Tensor, log_ratio_clamp: float | None = None
) -> Tensor:
    """Policy drift of CPGD: k3 with the roles exchanged, KL(μ ‖ π), unbiased for tokens that μ sampled.

    Formula: exp(log π − log μ) − (log π − log μ) − 1; its gradient is (π/μ − 1)∇log π
    Source: CPGD, arXiv:2505.12504
    Degenerate: overflows where π/μ does, unless clamped
    Peers: none; LightRFT's CPGD leaves the drift out
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=other_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    return expm1_minus(ratio_BT)


ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "unbiased": unbiased, "drift": drift}
"""By the name that config uses; `unbiased` also takes the rollout log-probs."""


def partition_kl(
    policy_partition_BTP: Tensor,
    *,
    other_partition_BTP: Tensor,
    loss_mask_BT: Tensor,
    direction: Literal["reverse", "forward"] = "reverse",
) -> Tensor:
    """Exact KL over a partition: each of the reference's likeliest tokens, and all other tokens as one. Shape [B, T].

    Formula: `reverse` Σ_k (p_k(log p_k − log q_k) − p_k + q_k), `forward` Σ_k (q_k(log q_k − log p_k) − q_k + p_k), with p_k = π and
    q_k = π_ref of each of the `top_k` tokens and of the rest; Σ(q_k − p_k) is 0 and keeps the sum from becoming negative by rounding
    Gradient: that of KL(π ‖ π_ref), or KL(π_ref ‖ π), on the partition, under any sampler, with the contexts held fixed
    Source: GKD, arXiv:2306.13649, which has the whole vocabulary
    Degenerate: at most the KL over the whole vocabulary, and equal to it if `top_k` covers all tokens; with `top_k` 1 the KL of drawing
    that token or not
    Peers: verl's tail bucket, and its `forward_kl_topk`, which drops the rest; TRL's experimental distillation (`loss_top_k`,
    `loss_add_tail`; its reverse KL takes the student's tokens); torchrl's `kl_direction` estimates both from the sampled token
    """
    mask_BT1 = loss_mask_BT[..., None]
    log_p, log_q = (masked(x.double(), mask_BT=mask_BT1) for x in (policy_partition_BTP, other_partition_BTP))
    if direction == "forward":
        log_p, log_q = log_q, log_p
    return (log_p.exp() * (log_p - log_q) - log_p.exp() + log_q.exp()).sum(-1)


def binary_kl(from_logprobs_BT: Tensor, *, to_logprobs_BT: Tensor, epsilon: float = 1e-8) -> Tensor:
    """KL(from ‖ to) of drawing a token or not; ε keeps it finite for certain tokens."""
    p_BT, q_BT = from_logprobs_BT.exp(), to_logprobs_BT.exp()
    kept_BT = p_BT * (from_logprobs_BT - to_logprobs_BT)
    return kept_BT + (1 - p_BT) * ((1 - p_BT + epsilon) / (1 - q_BT + epsilon)).log()


def adapted_coefficient(
    coefficient: float, *, kl_per_trajectory: float, num_trajectories: int, target: float, horizon: int
) -> float:
    """The next step's β, which steers the KL of a trajectory to a target.

    Formula: β·(1 + clip(KL/target − 1, −0.2, 0.2)·min(n/horizon, 1)), n trajectories observed
    Source: Ziegler et al., arXiv:1909.08593
    Degenerate: without the limit of n β would become negative above five horizons, and the run would reward KL
    Peers: LightRFT, OpenRLHF and verl `AdaptiveKLController`
    """
    error = min(max(kl_per_trajectory / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * min(num_trajectories, horizon) / horizon)
