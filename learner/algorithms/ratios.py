"""Off-policy corrections: weights from the gap between the rollout policy μ and the learner, multiplied onto the policy loss.

μ differs from π_old by staleness and by the engine's numerics. Weights carry no gradient; 0 drops a token. Dropped tokens stay in the
aggregation's denominator. Shapes: B rows (whole trajectories), T tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.masks import expm1_minus, log_ratio, masked, masked_mean, masked_sum

Level = Literal["token", "sequence", "geometric"]
"""One ratio per token; per trajectory, the product of its tokens'; or per trajectory, their geometric mean."""


@torch.no_grad()
def importance_ratio(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    level: Level = "token",
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """π_old/μ at a level, [B, T]; 0 where masked. The clamp acts on the log-ratio after it was summed (verl 20)."""
    ratio_BT = log_ratio(proximal_logprobs_BT, denominator_BT=rollout_logprobs_BT, loss_mask_BT=loss_mask_BT)
    if level == "sequence":
        ratio_BT = masked_sum(ratio_BT, loss_mask_BT=loss_mask_BT, dim=1)[:, None].expand_as(ratio_BT)
    elif level == "geometric":
        ratio_BT = masked_mean(ratio_BT, loss_mask_BT=loss_mask_BT, dim=1)[:, None].expand_as(ratio_BT)
    ratio_BT = ratio_BT if log_ratio_clamp is None else ratio_BT.clamp(-log_ratio_clamp, log_ratio_clamp)
    return masked(ratio_BT.exp(), loss_mask_BT=loss_mask_BT)


def tis(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    cap: float = 2.0,
    floor: float = 0.0,
    level: Level = "token",
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """Truncated importance sampling.

    Formula: clip(π_old/μ, floor, C); C 2.0 per token, 5.0 is usual per sequence
    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025)
    Degenerate: 1 where μ = π_old; 0 where masked
    Peers: verl `rollout_is` (log_ratio_clamp 20), TRL `token_truncate`, `sequence_truncate` (sum), OpenRLHF `clip`
    """
    ratio_BT = importance_ratio(
        proximal_logprobs_BT,
        rollout_logprobs_BT=rollout_logprobs_BT,
        loss_mask_BT=loss_mask_BT,
        level=level,
        log_ratio_clamp=log_ratio_clamp,
    )
    return masked(ratio_BT.clamp(floor, cap), loss_mask_BT=loss_mask_BT)


def decoupled(
    proximal_logprobs_BT: Tensor, *, rollout_logprobs_BT: Tensor, loss_mask_BT: Tensor, cap: float | None = None
) -> Tensor:
    """Behaviour correction of the decoupled objective: the policy loss is clipped around π_prox, and weighted back to μ.

    Formula: π_prox/μ, cut at `cap` where given
    Source: AReaL, arXiv:2505.24298; approximated proximal policy arXiv:2512.06547
    Degenerate: 1 where π_prox = μ
    Peers: none of the golden ones
    """
    ratio_BT = importance_ratio(
        proximal_logprobs_BT, rollout_logprobs_BT=rollout_logprobs_BT, loss_mask_BT=loss_mask_BT
    )
    return ratio_BT if cap is None else ratio_BT.clamp(max=cap)


def icepop(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    low: float = 0.5,
    high: float = 5.0,
    level: Level = "token",
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """The ratio where it is inside a range, nothing where it is not.

    Formula: π_old/μ if low ≤ π_old/μ ≤ high, else 0
    Source: IcePop, arXiv:2510.18855
    Degenerate: 1 where μ = π_old
    Peers: TRL `token_mask` and `sequence_mask`, OpenRLHF `mask` with `ratio` gating
    """
    ratio_BT = importance_ratio(
        proximal_logprobs_BT,
        rollout_logprobs_BT=rollout_logprobs_BT,
        loss_mask_BT=loss_mask_BT,
        level=level,
        log_ratio_clamp=log_ratio_clamp,
    )
    return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, torch.zeros_like(ratio_BT))


def sequence_mask(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    low: float = 0.99,
    high: float = 1.01,
    level: Level = "geometric",
) -> Tensor:
    """Drops trajectories whose ratio leaves a range.

    Formula: 1 if low ≤ exp(mean_t log π_old/μ) ≤ high, else 0
    Source: verl's rollout correction; OpenRLHF
    Degenerate: 1 where μ = π_old
    Peers: verl `rollout_rs` with geometric statistics, OpenRLHF `mask` at `geo` level
    """
    ratio_BT = importance_ratio(
        proximal_logprobs_BT, rollout_logprobs_BT=rollout_logprobs_BT, loss_mask_BT=loss_mask_BT, level=level
    )
    return ((ratio_BT >= low) & (ratio_BT <= high) & loss_mask_BT).to(ratio_BT.dtype)


@torch.no_grad()
def rejection(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    high: float,
    low: float = -torch.inf,
    estimator: Literal["k1", "k2", "k3", "binary_kl", "tv"] = "k3",
    level: Literal["token", "sum", "mean", "max"] = "token",
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """Drops tokens or trajectories by how far the learner is from the rollout policy.

    Formula: 1 if low ≤ D ≤ high, else 0; D per token is KL(μ ‖ π_old) by k1, k2 or k3, the KL of drawing the token
        or not (`binary_kl`), or |π_old − μ| (`tv`); or its sum, mean or maximum over the trajectory
    Source: verl's rollout correction
    Degenerate: 1 where μ = π_old and low ≤ 0; bounds are on D itself: verl's bounds of k1 are on ratios, so take their logarithms
    Peers: verl `rollout_rs` (log_ratio_clamp 20), OpenRLHF gating
    """
    ratio_BT = log_ratio(
        proximal_logprobs_BT, denominator_BT=rollout_logprobs_BT, loss_mask_BT=loss_mask_BT, clamp=log_ratio_clamp
    )
    rollout_BT = masked(rollout_logprobs_BT, loss_mask_BT=loss_mask_BT)
    distance_BT = _distance(ratio_BT, rollout_BT, estimator=estimator)
    if level == "sum":
        distance_BT = masked_sum(distance_BT, loss_mask_BT=loss_mask_BT, dim=1)[:, None]
    elif level == "mean":
        distance_BT = masked_mean(distance_BT, loss_mask_BT=loss_mask_BT, dim=1)[:, None]
    elif level == "max":
        distance_BT = masked(distance_BT, loss_mask_BT=loss_mask_BT, fill=-torch.inf).amax(1, keepdim=True)
    return ((distance_BT >= low) & (distance_BT <= high) & loss_mask_BT).to(ratio_BT.dtype)


def normalise_weights(
    weights_BT: Tensor, *, loss_mask_BT: Tensor, level: Level = "token", epsilon: float = 0.0
) -> Tensor:
    """Weights divided by their mean over the batch's tokens, or (one weight per trajectory) over its trajectories.

    Needs the whole batch, so it is not for micro-batches. `epsilon` is added to token counts.
    Peers: verl `rollout_is_batch_normalize` (1e-8).
    """
    if level == "token":
        mean = masked_mean(weights_BT, loss_mask_BT=loss_mask_BT, epsilon=epsilon)
    else:
        has_tokens_B = loss_mask_BT.any(1)
        mean = masked_mean(
            masked_mean(weights_BT, loss_mask_BT=loss_mask_BT, dim=1, epsilon=epsilon), loss_mask_BT=has_tokens_B
        )
    return masked(weights_BT / mean, loss_mask_BT=loss_mask_BT)


@torch.no_grad()
def opsm(
    policy_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    delta: float = 0.1,
) -> Tensor:
    """Off-policy sequence masking: drops bad trajectories that the policy has already moved away from.

    Formula: 0 if A < 0 and mean_t(log μ − log π) > δ, else 1
    Source: DeepSeek-V3.2, arXiv:2512.02556
    Degenerate: none at ratio 1
    Peers: TRL `off_policy_mask_threshold`
    """
    gap_BT = log_ratio(rollout_logprobs_BT, denominator_BT=policy_logprobs_BT, loss_mask_BT=loss_mask_BT)
    is_far_B1 = (masked_mean(gap_BT, loss_mask_BT=loss_mask_BT, dim=1) > delta)[:, None]
    return (loss_mask_BT & ~(is_far_B1 & (advantages_BT < 0))).to(gap_BT.dtype)


@torch.no_grad()
def approximate_proximal(policy_logprobs_BT: Tensor, *, rollout_logprobs_BT: Tensor, lags_BT: Tensor) -> Tensor:
    """log π_prox without a forward pass: between the policy that sampled and the present one, by version lag.

    Formula: log μ + (1 − 1/lag)·(log π − log μ); a lag of 0 or 1 gives log μ, which is π_old itself then
    Source: arXiv:2512.06547
    Degenerate: tokens of the same trajectory may have different lags
    Peers: AReaL
    """
    alpha_BT = 1 - 1 / lags_BT.clamp(min=1).to(rollout_logprobs_BT.dtype)
    return rollout_logprobs_BT + alpha_BT * (policy_logprobs_BT.detach() - rollout_logprobs_BT)


def _distance(ratio_BT: Tensor, rollout_BT: Tensor, *, estimator: str) -> Tensor:
    if estimator == "k1":
        return -ratio_BT
    if estimator == "k2":
        return 0.5 * ratio_BT.square()
    if estimator == "k3":
        return expm1_minus(ratio_BT)
    # A log-prob rounded to above 0 is a certain token.
    rollout_BT, learner_BT = rollout_BT.clamp(max=0.0), (rollout_BT + ratio_BT).clamp(max=0.0)
    return (
        (learner_BT.exp() - rollout_BT.exp()).abs()
        if estimator == "tv"
        else binary_kl(rollout_BT, to_logprobs_BT=learner_BT)
    )


def binary_kl(from_logprobs_BT: Tensor, *, to_logprobs_BT: Tensor, epsilon: float = 1e-8) -> Tensor:
    """KL between drawing a token or not, under two policies; ε keeps certain tokens finite."""
    p_BT, q_BT = from_logprobs_BT.exp(), to_logprobs_BT.exp()
    kept_BT = p_BT * (from_logprobs_BT - to_logprobs_BT)
    return kept_BT + (1 - p_BT) * ((1 - p_BT + epsilon) / (1 - q_BT + epsilon)).log()
