"""Formulas that peers have and no run of ours reaches: the adapters compose them with our parts.

Shapes: B rows (N of the batch), T tokens.
"""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.batch_rules import shaping
from learner.algorithms.groups import group_rows
from learner.algorithms.masks import log_ratio, masked, masked_mean, masked_sum


def remax(returns_NT: Tensor, *, greedy_rewards_N: Tensor, loss_mask_NT: Tensor) -> Tensor:
    """Returns minus the reward of the greedy completion of the same prompt.

    Source: ReMax, arXiv:2310.10505. Peers: verl `remax`.
    """
    return masked(returns_NT - greedy_rewards_N[:, None], mask_BT=loss_mask_NT)


def optimal_token_baseline(
    returns_NT: Tensor,
    *,
    logprobs_NT: Tensor,
    sum_squared_probs_NT: Tensor,
    loss_mask_NT: Tensor,
    group_index_N: Tensor,
) -> Tensor:
    """Per token, the baseline of least variance: returns weighted by the squared norm of the gradient so far.

    b_t = Σ_G W_t R_t / Σ_G W_t with W_t = Σ_{s≤t} (1 − 2π_s + Σ_v π_s(v)²); A_t = R_t − b_t. Peers: verl `optimal_token_baseline`.
    Where one trajectory is left it gives its return.
    """
    weights_NT = masked(1 - 2 * logprobs_NT.exp() + sum_squared_probs_NT, mask_BT=loss_mask_NT).cumsum(1)
    weights_NT, returns_NT = (
        masked(weights_NT, mask_BT=loss_mask_NT),
        masked(returns_NT, mask_BT=loss_mask_NT),
    )
    result_NT = torch.zeros_like(returns_NT)
    for rows in group_rows(group_index_N):
        baseline_T = (weights_NT[rows] * returns_NT[rows]).sum(0) / (weights_NT[rows].sum(0) + 1e-8)
        # One trajectory left has no other to be compared with: its return stands.
        has_company_T = loss_mask_NT[rows].sum(0) > 1
        result_NT[rows] = returns_NT[rows] - torch.where(has_company_T, baseline_T, 0)
    return masked(result_NT, mask_BT=loss_mask_NT)


def absolute(
    policy_logprobs_BT: Tensor, *, other_logprobs_BT: Tensor, loss_mask_BT: Tensor, log_ratio_clamp: float | None = None
) -> Tensor:
    """|log π − log π_ref| (verl `abs`)."""
    ratio_BT = log_ratio(policy_logprobs_BT, over_BT=other_logprobs_BT, mask_BT=loss_mask_BT, clamp=log_ratio_clamp)
    return ratio_BT.abs()


def straight_through(value_BT: Tensor, *, gradient_BT: Tensor) -> Tensor:
    """The value of one estimator with the gradient of another (verl `k3+`, OpenRLHF `unbiased_gradient`: k2's gradient)."""
    return value_BT.detach() + (gradient_BT - gradient_BT.detach())


def none(losses_NT: Tensor, *, loss_mask_NT: Tensor) -> Tensor:
    """The losses per token, 0 where masked (torchrl `reduction="none"`)."""
    return torch.where(loss_mask_NT, losses_NT, torch.zeros_like(losses_NT))


def whiten_padding_too(
    x_NT: Tensor,
    *,
    loss_mask_NT: Tensor,
    center: bool = True,
    scale: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-8,
    epsilon_mode: Literal["add", "clamp", "after"] = "add",
) -> Tensor:
    """Shaping `whiten`, with the tokens' shift and scale for what is masked as well, and no test for equal values."""
    settings = {"scale": scale, "ddof": ddof, "epsilon": epsilon, "epsilon_mode": epsilon_mode}
    tokens_NT = shaping.whiten(x_NT, loss_mask_NT=loss_mask_NT, center=center, zero_variance="rounding", **settings)
    mean, variance = masked_mean(x_NT, mask_BT=loss_mask_NT), masked_var(x_NT, loss_mask_BT=loss_mask_NT, ddof=ddof)
    std = {
        "add": (variance + epsilon).sqrt(),
        "clamp": variance.clamp(min=epsilon).sqrt(),
        "after": variance.sqrt() + epsilon,
    }[epsilon_mode]
    others_NT = (x_NT - mean) / (std if scale else 1.0) + (0.0 if center else mean)
    return torch.where(loss_mask_NT, tokens_NT, others_NT)


def masked_var(x_BT: Tensor, *, loss_mask_BT: Tensor, ddof: int = 1) -> Tensor:
    """Σ m·(x − mean)² / (Σ m − ddof) over everything; 0 where that leaves no degree of freedom (verl raises)."""
    centred_BT = masked(x_BT, mask_BT=loss_mask_BT) - masked_mean(x_BT, mask_BT=loss_mask_BT)
    count = loss_mask_BT.sum()
    squares = masked_sum(centred_BT.square(), mask_BT=loss_mask_BT)
    return torch.where(count > ddof, squares / (count - ddof).clamp(min=1), torch.zeros_like(squares))
