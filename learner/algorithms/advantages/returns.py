"""Returns and advantages over time. Shapes: N trajectories, T tokens.

Holes in the loss mask (tool output inside a completion) are skipped: a token's successor is the next unmasked token.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from learner.algorithms.conditions import InertWith
from learner.algorithms.masks import masked

Discount = Annotated[float, Field(ge=0, le=1)]
Holes = Literal["skip", "discount"]


def gae(
    token_rewards_NT: Tensor,
    *,
    values_NT: Tensor,
    loss_mask_NT: Tensor,
    gamma: Discount = 1.0,
    lambda_: Discount = 0.95,
    holes: Holes = "skip",
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation. Returns advantages, and the returns that a critic learns.

    Formula: δ_t = r_t + γV_{t+1} − V_t; A_t = δ_t + γλA_{t+1}; R = A + V; V is 0 after the last token
    Source: arXiv:1506.02438
    Degenerate: masked entries are 0 in both results; with `holes="discount"` a hole's tokens are steps with reward 0 and value 0; a
        trajectory with nothing unmasked is 0
    Peers: verl (skip; it then whitens), LightRFT and OpenRLHF (discount), torchtune (no mask: give it all true)
    """
    advantages_NT = gae_scan(
        token_rewards_NT, values_NT=values_NT, loss_mask_NT=loss_mask_NT, gamma=gamma, lambda_=lambda_, holes=holes
    )
    returns_NT = masked(advantages_NT + values_NT, mask_BT=loss_mask_NT)
    return masked(advantages_NT, mask_BT=loss_mask_NT), returns_NT


def gae_scan(
    rewards_NT: Tensor, *, values_NT: Tensor, loss_mask_NT: Tensor, gamma: float, lambda_: float, holes: Holes
) -> Tensor:
    """Advantages. Masked entries hold the scan's state, as in the peers."""
    dtype = torch.promote_types(rewards_NT.dtype, values_NT.dtype)
    rewards_NT, values_NT = (masked(x_NT, mask_BT=loss_mask_NT).to(dtype) for x_NT in (rewards_NT, values_NT))
    advantage_N = next_value_N = values_NT.new_zeros(len(values_NT))
    columns: list[Tensor] = []
    for t in reversed(range(values_NT.shape[1])):
        delta_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        candidate_N = delta_N + gamma * lambda_ * advantage_N
        is_step_N = loss_mask_NT[:, t] | (holes == "discount")
        advantage_N = torch.where(is_step_N, candidate_N, advantage_N)
        next_value_N = torch.where(is_step_N, values_NT[:, t], next_value_N)
        columns.append(advantage_N)
    return torch.stack(columns[::-1], 1) if columns else torch.zeros_like(values_NT)


def token_rewards(token_rewards_NT: Tensor, *, loss_mask_NT: Tensor) -> Tensor:
    """Each token's own reward, given per token by the environment or by imported trajectories.

    Formula: A_t = r_t
    Source: none
    Degenerate: without rewards per token `reward_placement` places the trajectory's reward; for rewards to go use `cumulative_returns`
    Peers: verl and TapeAgents, whose batches may contain advantages
    """
    return masked(token_rewards_NT, mask_BT=loss_mask_NT)


def cumulative_returns(
    token_rewards_NT: Tensor,
    *,
    loss_mask_NT: Tensor,
    gamma: Discount = 1.0,
    holes: Annotated[Holes, InertWith("gamma", 1.0)] = "skip",
) -> Tensor:
    """Discounted sum of the rewards to come.

    Formula: R_t = r_t + γR_{t+1}
    Source: REINFORCE, Williams (1992)
    Degenerate: masked entries are 0; `holes="discount"` discounts through holes
    Peers: LightRFT and OpenRLHF `reinforce` (discount; they keep returns inside holes), verl `reinforce_plus_plus`
    """
    returns_NT = return_scan(token_rewards_NT, loss_mask_NT=loss_mask_NT, gamma=gamma, holes=holes)
    return masked(returns_NT, mask_BT=loss_mask_NT)


def return_scan(rewards_NT: Tensor, *, loss_mask_NT: Tensor, gamma: float, holes: Holes) -> Tensor:
    """Returns: the advantages of values 0 and λ 1. Masked entries hold the scan's state."""
    zeros_NT = torch.zeros_like(rewards_NT)
    return gae_scan(rewards_NT, values_NT=zeros_NT, loss_mask_NT=loss_mask_NT, gamma=gamma, lambda_=1.0, holes=holes)
