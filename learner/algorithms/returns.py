"""Returns and advantages over time. Shapes: N trajectories, T tokens.

Holes in the loss mask (tool output inside a completion) are skipped: a token's successor is the next unmasked token.
"""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.masks import masked


def gae(
    token_rewards_NT: Tensor,
    *,
    values_NT: Tensor,
    loss_mask_NT: Tensor,
    gamma: float = 1.0,
    lambda_: float = 0.95,
    holes: Literal["skip", "discount"] = "skip",
    outside: Literal["zero", "carry"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation; returns advantages and the returns a critic learns.

    Formula: δ_t = r_t + γV_{t+1} − V_t; A_t = δ_t + γλA_{t+1}; R = A + V; V is 0 after the last token
    Source: arXiv:1506.02438
    Degenerate: masked entries are 0 in both results (`outside="carry"` leaves the scan's state there); `holes="discount"` lets γ and λ
        run through holes as steps with no reward and no value; a trajectory with nothing unmasked is 0
    Peers: verl (skip; it then whitens), LightRFT and OpenRLHF (discount), torchtune (no mask: give it all true)
    """
    unmasked_values_NT = values_NT
    rewards_NT = masked(token_rewards_NT, loss_mask_BT=loss_mask_NT)
    values_NT = masked(values_NT, loss_mask_BT=loss_mask_NT)
    rewards_NT, values_NT = _same_dtype(rewards_NT, values_NT)
    advantage_N = next_value_N = values_NT.new_zeros(len(values_NT))
    columns: list[Tensor] = []
    for t in reversed(range(values_NT.shape[1])):
        delta_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        candidate_N = delta_N + gamma * lambda_ * advantage_N
        is_step_N = loss_mask_NT[:, t] | (holes == "discount")
        advantage_N = torch.where(is_step_N, candidate_N, advantage_N)
        next_value_N = torch.where(is_step_N, values_NT[:, t], next_value_N)
        columns.append(advantage_N)
    advantages_NT = torch.stack(columns[::-1], 1) if columns else torch.zeros_like(values_NT)
    if outside == "carry":
        return advantages_NT, advantages_NT + unmasked_values_NT
    returns_NT = masked(advantages_NT + values_NT, loss_mask_BT=loss_mask_NT)
    return masked(advantages_NT, loss_mask_BT=loss_mask_NT), returns_NT


def cumulative_returns(
    token_rewards_NT: Tensor,
    *,
    loss_mask_NT: Tensor,
    gamma: float = 1.0,
    holes: Literal["skip", "discount"] = "skip",
    outside: Literal["zero", "carry"] = "zero",
) -> Tensor:
    """Discounted sum of the rewards to come.

    Formula: R_t = r_t + γR_{t+1}
    Source: REINFORCE, Williams (1992)
    Degenerate: masked entries are 0 (`outside="carry"` leaves the scan's state there); `holes="discount"` discounts through holes
    Peers: LightRFT and OpenRLHF `reinforce` (discount; they leave returns standing inside holes), verl `reinforce_plus_plus`
    """
    rewards_NT = masked(token_rewards_NT, loss_mask_BT=loss_mask_NT)
    return_N = rewards_NT.new_zeros(len(rewards_NT))
    columns: list[Tensor] = []
    for t in reversed(range(rewards_NT.shape[1])):
        is_step_N = loss_mask_NT[:, t] | (holes == "discount")
        return_N = torch.where(is_step_N, rewards_NT[:, t] + gamma * return_N, return_N)
        columns.append(return_N)
    returns_NT = torch.stack(columns[::-1], 1) if columns else rewards_NT
    return returns_NT if outside == "carry" else masked(returns_NT, loss_mask_BT=loss_mask_NT)


def place_rewards(
    rewards_N: Tensor, *, loss_mask_NT: Tensor, placement: Literal["last_token", "every_token"] = "last_token"
) -> Tensor:
    """Rewards per token from one per trajectory: on the last unmasked token, or (`every_token`) on each.

    A trajectory with nothing unmasked gets none; LightRFT and OpenRLHF put it in the last column, outside the mask. On every token
    (torchrl KLRewardTransform, TapeAgents) a row sums to length · r.
    """
    rewards_N = rewards_N if rewards_N.is_floating_point() else rewards_N.float()
    if placement == "every_token":
        return masked(rewards_N[:, None].expand(loss_mask_NT.shape), loss_mask_BT=loss_mask_NT)
    position_T = torch.arange(loss_mask_NT.shape[1], device=loss_mask_NT.device)
    last_N = (
        torch.where(loss_mask_NT, position_T, -1).amax(1)
        if loss_mask_NT.shape[1]
        else position_T.new_full((len(rewards_N),), -1)
    )
    return torch.where(position_T == last_N[:, None], rewards_N[:, None], torch.zeros_like(rewards_N[:, None]))


def move_to_earner(token_rewards_NT: Tensor, *, loss_mask_NT: Tensor) -> Tensor:
    """Rewards on masked tokens (an environment's answer) go to the last unmasked token before them: the action that earned them.

    Several that meet on a token add up, so a row keeps its sum. What lies before the first unmasked token has no earner and is lost:
    `BatchTensors.validate` refuses it.
    """
    position_T = torch.arange(loss_mask_NT.shape[1], device=loss_mask_NT.device)
    earner_NT = torch.where(loss_mask_NT, position_T, -1)
    earner_NT = earner_NT.cummax(1).values if earner_NT.numel() else earner_NT
    earned_NT = masked(token_rewards_NT, loss_mask_BT=earner_NT >= 0)
    return torch.zeros_like(earned_NT).scatter_add(1, earner_NT.clamp(min=0), earned_NT)


def subtract_kl(token_rewards_NT: Tensor, *, kl_NT: Tensor, coefficient: float, loss_mask_NT: Tensor) -> Tensor:
    """r_t − β·kl_t where unmasked, 0 elsewhere (torchrl KLRewardTransform, LightRFT and OpenRLHF `compute_reward`, torchtune)."""
    return masked(token_rewards_NT - coefficient * kl_NT, loss_mask_BT=loss_mask_NT)


def _same_dtype(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)
