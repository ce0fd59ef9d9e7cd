"""Losses that treat the tokens of highest covariance between advantage and log-prob separately.

Covariances are over all tokens of the update, so the objective computes them before micro-batching: with the log-probs of the policy at the
start of the step under `proximal: recompute` and `approximate`, else of the policy that sampled.
Shapes: B rows, T tokens, M all loss tokens of the update.
"""

import math
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from learner.algorithms.conditions import LessThan
from learner.algorithms.groups import all_equal
from learner.algorithms.losses.surrogates import TokenLosses, clipped_surrogate, unclipped_surrogate
from learner.algorithms.masks import at_least_float32, log_ratio, masked, masked_mean

Share = Annotated[float, Field(ge=0, le=1)]


def clip_cov(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    covariances_BT: Tensor,
    batch_covariances_M: Tensor,
    cov_share: Share = 0.0002,
    cov_low: Annotated[float, LessThan("cov_high")] = 1.0,
    cov_high: float = 5.0,
    epsilon_low: NonNegativeFloat = 0.2,
    epsilon_high: NonNegativeFloat = 0.2,
    log_ratio_clamp: PositiveFloat | None = None,
) -> TokenLosses:
    """PPO without gradient on the tokens of highest covariance between advantage and log-prob, which lower the entropy most.

    Formula: ppo_clip, 0 for ⌊share·tokens⌋ (at least 1) of the batch's tokens with cov_low < cov < cov_high, the largest first
    Source: arXiv:2505.22617
    Degenerate: without a token in the range it is ppo_clip; tokens of equal covariance are chosen together
    Peers: verl `clip_cov`, which draws among the candidates at random: not repeatable, and different on each rank
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    advantages_BT = masked(advantages_BT, mask_BT=loss_mask_BT)
    surrogate = clipped_surrogate(
        ratio_BT, advantages_BT=advantages_BT, epsilon_low=epsilon_low, epsilon_high=epsilon_high
    )
    candidates_M = batch_covariances_M[(batch_covariances_M > cov_low) & (batch_covariances_M < cov_high)]
    if not candidates_M.numel():
        return surrogate._replace(clipped_covariance_BT=torch.zeros_like(loss_mask_BT))
    num_clipped = max(int(cov_share * batch_covariances_M.numel()), 1)
    threshold = candidates_M.sort(descending=True).values[min(num_clipped, candidates_M.numel()) - 1]
    is_highest_BT = (covariances_BT >= threshold) & (covariances_BT < cov_high) & loss_mask_BT
    chosen_BT = is_highest_BT & ~surrogate.clipped_BT
    losses_BT = torch.where(chosen_BT, torch.zeros_like(surrogate.losses_BT), surrogate.losses_BT)
    return surrogate._replace(losses_BT=losses_BT, clipped_covariance_BT=chosen_BT)


def kl_cov(
    policy_logprobs_BT: Tensor,
    *,
    proximal_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    loss_mask_BT: Tensor,
    covariances_BT: Tensor,
    batch_covariances_M: Tensor,
    cov_share: Share = 0.0002,
    kl_coefficient: NonNegativeFloat = 1.0,
) -> Tensor:
    """Unclipped surrogate with a KL penalty on the tokens of highest covariance between advantage and log-prob.

    Formula: −ρA, plus β·|log ρ| for the ⌊share·tokens⌋ (at least 1) tokens of the batch with the largest covariance
    Source: arXiv:2505.22617
    Degenerate: tokens of equal covariance are chosen together; those of covariance 0, as where all advantages of an update are equal, never
    Peers: verl `kl_cov`, which draws among equal covariances
    """
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=proximal_logprobs_BT, mask_BT=loss_mask_BT)
    losses_BT = unclipped_surrogate(ratio_BT, advantages_BT=masked(advantages_BT, mask_BT=loss_mask_BT))
    if not batch_covariances_M.numel():
        return losses_BT
    num_chosen = max(int(cov_share * batch_covariances_M.numel()), 1)
    threshold = batch_covariances_M.sort(descending=True).values[min(num_chosen, batch_covariances_M.numel()) - 1]
    chosen_BT = (covariances_BT >= threshold) & (covariances_BT != 0) & loss_mask_BT
    return losses_BT + kl_coefficient * torch.where(chosen_BT, ratio_BT.abs(), torch.zeros_like(ratio_BT))


def covariances(logprobs_NT: Tensor, *, advantages_NT: Tensor, loss_mask_NT: Tensor) -> Tensor:
    """(A − mean A)(log π − mean log π) per token over the whole batch, −inf where masked: the ranking of `clip_cov` and `kl_cov`. Equal
    advantages give exactly 0, as do equal log-probs: their mean is rounded."""
    centred_logprobs_NT, centred_advantages_NT = (_centred(x, loss_mask_NT) for x in (logprobs_NT, advantages_NT))
    return masked(centred_logprobs_NT * centred_advantages_NT, mask_BT=loss_mask_NT, fill=-math.inf)


def _centred(x_NT: Tensor, mask_NT: Tensor) -> Tensor:
    kept_M = x_NT[mask_NT]
    if not kept_M.numel() or all_equal(kept_M):
        return torch.zeros_like(at_least_float32(x_NT))
    return at_least_float32(x_NT) - masked_mean(x_NT, mask_BT=mask_NT)
