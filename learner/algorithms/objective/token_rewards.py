"""Rewards per token: placed, moved to the token that earned them, added up. Shapes: N trajectories, T tokens."""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.masks import at_least_float32, masked
from learner.algorithms.running_sums import running_sum


def place_rewards(
    rewards_N: Tensor, *, loss_mask_NT: Tensor, placement: Literal["last_token", "every_token"] = "last_token"
) -> Tensor:
    """Rewards per token from one per trajectory: on the last unmasked token, or (`every_token`) on each.

    A trajectory with nothing unmasked gets none; LightRFT and OpenRLHF put it in the last column, outside the mask. On every token
    (torchrl KLRewardTransform, TapeAgents) a row sums to length · r.
    """
    rewards_N = at_least_float32(rewards_N)
    if placement == "every_token":
        return masked(rewards_N[:, None].expand(loss_mask_NT.shape), mask_BT=loss_mask_NT)
    position_T = torch.arange(loss_mask_NT.shape[1], device=loss_mask_NT.device)
    last_N = torch.where(loss_mask_NT, position_T, -1).amax(1)
    return torch.where(position_T == last_N[:, None], rewards_N[:, None], torch.zeros_like(rewards_N[:, None]))


def move_to_earner(token_rewards_NT: Tensor, *, loss_mask_NT: Tensor) -> Tensor:
    """Rewards on masked tokens (an environment's answer) go to the last unmasked token before them: the action that earned them.

    Several that meet on a token add up, so a row keeps its sum. A reward before the first unmasked token has no earner:
    `BatchTensors.validate` refuses it.
    """
    position_T = torch.arange(loss_mask_NT.shape[1], device=loss_mask_NT.device)
    earner_NT = torch.where(loss_mask_NT, position_T, -1).cummax(1).values
    earned_NT = masked(token_rewards_NT, mask_BT=earner_NT >= 0)
    return torch.zeros_like(earned_NT).scatter_add(1, earner_NT.clamp(min=0), earned_NT)


def to_go(x_NT: Tensor) -> Tensor:
    """Σ_{s≥t} x_s."""
    return running_sum(x_NT.flip(1)).flip(1)
