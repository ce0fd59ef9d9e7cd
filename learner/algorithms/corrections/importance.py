"""Importance weights: the ratio of π_old to μ, bounded. Shapes: B rows (whole trajectories), T tokens."""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from learner.algorithms.conditions import LessThan
from learner.algorithms.masks import log_ratio, masked, masked_mean, masked_sum

Level = Literal["token", "sequence", "geometric"]
"""One ratio per token (`token`), or per trajectory: the product of its tokens' ratios (`sequence`) or their geometric mean."""


@torch.no_grad()
def importance_ratio(
    numerator_BT: Tensor, *, over_BT: Tensor, mask_BT: Tensor, level: Level = "token", clamp: float | None = None
) -> Tensor:
    """The ratio of two policies at a level, from their log-probs, [B, T]; 0 where masked.

    The clamp bounds the log-ratio of the level, after the sum or mean (verl 20).
    """
    ratio_BT = log_ratio(numerator_BT, over_BT=over_BT, mask_BT=mask_BT)
    if level == "sequence":
        ratio_BT = masked_sum(ratio_BT, mask_BT=mask_BT, dim=1)[:, None].expand_as(ratio_BT)
    elif level == "geometric":
        ratio_BT = masked_mean(ratio_BT, mask_BT=mask_BT, dim=1)[:, None].expand_as(ratio_BT)
    ratio_BT = ratio_BT if clamp is None else ratio_BT.clamp(-clamp, clamp)
    return masked(ratio_BT.exp(), mask_BT=mask_BT)


def tis(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    cap: PositiveFloat = 2.0,
    floor: Annotated[NonNegativeFloat, LessThan("cap")] = 0.0,
    level: Level = "token",
    log_ratio_clamp: PositiveFloat | None = None,
) -> Tensor:
    """Truncated importance sampling.

    Formula: clip(w, floor, C), w = π_old/μ of the token, or by `level` of its trajectory: the product over its tokens (`sequence`), or
        their geometric mean (`geometric`); C 2.0 per token, 5.0 is usual per sequence
    Source: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025)
    Degenerate: 1 where μ = π_old; 0 where masked
    Peers: verl `rollout_is` (log_ratio_clamp 20), TRL `token_truncate`, `sequence_truncate` (sum), OpenRLHF `clip`
    """
    ratio_BT = importance_ratio(
        proximal_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT, level=level, clamp=log_ratio_clamp
    )
    return masked(ratio_BT.clamp(floor, cap), mask_BT=loss_mask_BT)


def self_normalised_tis(
    proximal_logprobs_NT: Tensor,
    *,
    rollout_logprobs_NT: Tensor,
    loss_mask_NT: Tensor,
    cap: PositiveFloat = 2.0,
    floor: Annotated[NonNegativeFloat, LessThan("cap")] = 0.0,
    level: Level = "token",
    log_ratio_clamp: PositiveFloat | None = None,
) -> Tensor:
    """Truncated importance sampling whose weights have a mean of 1 over the step: truncation does not scale the learning rate.

    Formula: w / mean(w), w the weight of `tis`; the mean is over tokens at `level="token"`, else over trajectories
    Source: self-normalised importance sampling, Owen, "Monte Carlo theory, methods and examples" (2013), 9.2
    Degenerate: 1 if all weights of the step are equal, as where μ = π_old or all are truncated; 0 where masked
    Peers: verl `rollout_is_batch_normalize`, slime `tis_batch_normalize` (over one rank's tokens)
    """
    weights_NT = tis(
        proximal_logprobs_NT,
        rollout_logprobs_BT=rollout_logprobs_NT,
        loss_mask_BT=loss_mask_NT,
        cap=cap,
        floor=floor,
        level=level,
        log_ratio_clamp=log_ratio_clamp,
    )
    return with_mean_1(weights_NT, loss_mask_NT=loss_mask_NT, level=level)


def with_mean_1(weights_NT: Tensor, *, loss_mask_NT: Tensor, level: Level, epsilon: float = 0.0) -> Tensor:
    """Weights divided by their mean over tokens, or over trajectories; all 0 stay 0. `epsilon` is added to token counts (verl 1e-8)."""
    if level == "token":
        mean = masked_mean(weights_NT, mask_BT=loss_mask_NT, epsilon=epsilon)
    else:
        mean_N = masked_mean(weights_NT, mask_BT=loss_mask_NT, dim=1, epsilon=epsilon)
        mean = masked_mean(mean_N, mask_BT=loss_mask_NT.any(1))
    return masked(weights_NT / torch.where(mean == 0, 1.0, mean), mask_BT=loss_mask_NT)


def decoupled(
    proximal_logprobs_BT: Tensor, *, rollout_logprobs_BT: Tensor, loss_mask_BT: Tensor, cap: PositiveFloat | None = None
) -> Tensor:
    """Behaviour correction of the decoupled objective: the policy loss is clipped around π_prox, and weighted back to μ.

    Formula: min(π_prox/μ, cap), or π_prox/μ without a cap
    Source: AReaL, arXiv:2505.24298; approximated proximal policy arXiv:2512.06547
    Degenerate: 1 where π_prox = μ
    Peers: AReaL `use_decoupled_loss`; after `sequence_mask`, OpenRLHF and NeMo-RL `seq-mask-tis`
    """
    ratio_BT = importance_ratio(proximal_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT)
    return ratio_BT if cap is None else ratio_BT.clamp(max=cap)


def icepop(
    proximal_logprobs_BT: Tensor,
    *,
    rollout_logprobs_BT: Tensor,
    loss_mask_BT: Tensor,
    low: Annotated[NonNegativeFloat, LessThan("high")] = 0.5,
    high: PositiveFloat = 5.0,
    level: Level = "token",
    log_ratio_clamp: PositiveFloat | None = None,
) -> Tensor:
    """The ratio inside a range, 0 outside.

    Formula: w if low ≤ w ≤ high, else 0; w = π_old/μ at the `level` of `tis`
    Source: IcePop, arXiv:2510.18855
    Degenerate: 1 where μ = π_old
    Peers: TRL `token_mask` and `sequence_mask`, OpenRLHF and NeMo-RL `icepop`; on the loss `reinforce` with `proximal: recompute` and one
        update a step, SkyRL `rollout_is`
    """
    ratio_BT = importance_ratio(
        proximal_logprobs_BT, over_BT=rollout_logprobs_BT, mask_BT=loss_mask_BT, level=level, clamp=log_ratio_clamp
    )
    return torch.where((ratio_BT >= low) & (ratio_BT <= high), ratio_BT, torch.zeros_like(ratio_BT))
