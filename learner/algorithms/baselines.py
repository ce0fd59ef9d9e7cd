"""Further advantages, whose baseline is not the plain group mean. Config names them as it does those of `advantages`.

Shapes: G trajectories of a group, N of the batch, T tokens.
"""

import torch
from torch import Tensor

from learner.algorithms.groups import group_rows, over_groups
from learner.algorithms.masks import at_least_float32, masked


def opo(rewards_N: Tensor, *, loss_mask_NT: Tensor, group_index_N: Tensor) -> Tensor:
    """Reward minus the length-weighted mean of its group: the baseline of least variance when gradients grow with length.

    Formula: r − Σ_G len·r / Σ_G len, len the number of unmasked tokens: a tool's are not the policy's
    Source: OPO, arXiv:2505.23585
    Degenerate: equal rewards give exactly 0; a group of one has no baseline and gives its reward
    Peers: verl `opo`
    """
    rewards_N = at_least_float32(rewards_N)
    result_N = torch.empty_like(rewards_N)
    lengths_N = loss_mask_NT.sum(1).to(rewards_N.dtype)
    for rows in group_rows(group_index_N):
        rewards_G, lengths_G = rewards_N[rows], lengths_N[rows]
        num_tokens = lengths_G.sum().clamp(min=1)
        baseline = (rewards_G * lengths_G).sum() / num_tokens if len(rows) > 1 else rewards_G.new_zeros(())
        is_constant = len(rows) > 1 and bool(rewards_G.max() == rewards_G.min())
        result_N[rows] = torch.zeros_like(rewards_G) if is_constant else rewards_G - baseline
    return result_N


def gpg(rewards_N: Tensor, *, group_index_N: Tensor) -> Tensor:
    """Centred rewards, scaled up by the share of trajectories that earned nothing.

    Formula: (r − mean_G) · N / max(1, number of r ≠ 0)
    Source: GPG, arXiv:2504.02546
    Degenerate: equal rewards give exactly 0; a group of one has no baseline
    Peers: verl `gpg`
    """
    rewards_N = at_least_float32(rewards_N)
    scale = len(rewards_N) / torch.count_nonzero(rewards_N).clamp(min=1)
    return scale * over_groups(_centred, rewards_N, group_index_N=group_index_N)


def remax(returns_NT: Tensor, *, greedy_rewards_N: Tensor, loss_mask_NT: Tensor) -> Tensor:
    """Returns minus the reward of the greedy completion of the same prompt.

    Source: ReMax, arXiv:2310.10505. Peers: verl `remax`. Not chosen by name in config: nothing samples greedy baselines.
    """
    return masked(returns_NT - greedy_rewards_N[:, None], loss_mask_BT=loss_mask_NT)


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
    Not chosen by name in config: it needs Σ_v π², which nothing computes. Where one trajectory is left it gives its return.
    """
    weights_NT = masked(1 - 2 * logprobs_NT.exp() + sum_squared_probs_NT, loss_mask_BT=loss_mask_NT).cumsum(1)
    weights_NT, returns_NT = (
        masked(weights_NT, loss_mask_BT=loss_mask_NT),
        masked(returns_NT, loss_mask_BT=loss_mask_NT),
    )
    result_NT = torch.zeros_like(returns_NT)
    for rows in group_rows(group_index_N):
        baseline_T = (weights_NT[rows] * returns_NT[rows]).sum(0) / (weights_NT[rows].sum(0) + 1e-8)
        # One trajectory left has no other to be compared with: its return stands.
        has_company_T = loss_mask_NT[rows].sum(0) > 1
        result_NT[rows] = returns_NT[rows] - torch.where(has_company_T, baseline_T, 0)
    return masked(result_NT, loss_mask_BT=loss_mask_NT)


def _centred(rewards_G: Tensor) -> Tensor:
    """Minus the mean; exactly 0 where all are equal, and left as it is where there is one."""
    if len(rewards_G) < 2:
        return rewards_G
    return torch.zeros_like(rewards_G) if bool(rewards_G.max() == rewards_G.min()) else rewards_G - rewards_G.mean()
