"""Advantages that see the whole batch. Shapes: G trajectories of a group, N of the batch, T tokens, K reward components."""

from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from learner.algorithms.advantages.group import grpo, mean_centered
from learner.algorithms.conditions import Ddof
from learner.algorithms.groups import all_equal, group_rows, over_groups
from learner.algorithms.masks import at_least_float32


def opo(rewards_N: Tensor, *, loss_mask_NT: Tensor, group_index_N: Tensor) -> Tensor:
    """Reward minus the length-weighted mean of its group: the baseline of least variance when gradients grow with length.

    Formula: r − Σ_G len·r / Σ_G len, len the number of unmasked tokens; a tool's tokens do not count
    Source: OPO, arXiv:2505.23585
    Degenerate: equal rewards give exactly 0; a group of one has no baseline and gives its reward
    Peers: verl `opo`
    """
    rewards_N = at_least_float32(rewards_N)
    result_N = torch.empty_like(rewards_N)
    lengths_N = loss_mask_NT.sum(1).to(rewards_N.dtype)
    for rows in group_rows(group_index_N):
        rewards_G, lengths_G = rewards_N[rows], lengths_N[rows]
        if len(rows) == 1:
            result_N[rows] = rewards_G
        elif all_equal(rewards_G):
            result_N[rows] = 0
        else:
            result_N[rows] = rewards_G - (rewards_G * lengths_G).sum() / lengths_G.sum().clamp(min=1)
    return result_N


def gpg(rewards_N: Tensor, *, group_index_N: Tensor) -> Tensor:
    """Reward minus its group's mean, divided by the share of the batch's trajectories whose reward is not 0.

    Formula: (r − mean_G) · N / max(1, number of r ≠ 0), both counted over the batch
    Source: GPG, arXiv:2504.02546
    Degenerate: equal rewards give exactly 0; a group of one has no baseline and gives its reward, scaled
    Peers: verl `gpg`
    """
    rewards_N = at_least_float32(rewards_N)
    scale = len(rewards_N) / torch.count_nonzero(rewards_N).clamp(min=1)
    return scale * over_groups(mean_centered, rewards_N, group_index_N=group_index_N, singleton="raw")


def raw_reward(rewards_N: Tensor) -> Tensor:
    """The reward itself, without a baseline.

    Formula: r
    Source: REINFORCE; TapeAgents `use_advantages=False`
    Degenerate: none
    Peers: TapeAgents, LightRFT `reinforce` before whitening
    """
    return at_least_float32(rewards_N)


def reinforce_pp(rewards_N: Tensor, *, epsilon: NonNegativeFloat = 1e-8, ddof: Ddof = 1) -> Tensor:
    """Rewards whitened over the trajectories of the batch.

    Formula: (r − mean_batch) / √(var_batch + ε)
    Source: REINFORCE++, arXiv:2501.03262
    Degenerate: a batch of equal rewards gives exactly 0
    Peers: OpenRLHF and LightRFT whiten over tokens, so long trajectories weigh more: advantage `cumulative_returns` with shaping `whiten`
    """
    return _whiten_vector(at_least_float32(rewards_N), epsilon=epsilon, ddof=ddof)


def reinforce_pp_baseline(
    rewards_N: Tensor, *, group_index_N: Tensor, epsilon: NonNegativeFloat = 1e-8, ddof: Ddof = 1
) -> Tensor:
    """Rewards minus their group's mean, then whitened over the batch.

    Formula: d = r − mean_G; (d − mean_batch d) / √(var_batch d + ε)
    Source: REINFORCE++, arXiv:2501.03262
    Degenerate: groups of equal rewards give exactly 0
    Peers: verl `reinforce_plus_plus_baseline` (over tokens: shaping `whiten`), OpenRLHF `reinforce_baseline`
    """
    centred_N = over_groups(mean_centered, at_least_float32(rewards_N), group_index_N=group_index_N)
    # All group means are 0, so the batch's is too. Subtracting its rounding error would move a group of exact zeros.
    return _whiten_vector(centred_N, epsilon=epsilon, ddof=ddof, center=False)


def group_mean_batch_std(
    rewards_N: Tensor, *, group_index_N: Tensor, epsilon: NonNegativeFloat = 1e-8, ddof: Ddof = 1
) -> Tensor:
    """Reward minus its group's mean, divided by the batch's spread.

    Formula: (r − mean_G) / (std_batch(r) + ε)
    Source: Lite-PPO, arXiv:2508.08221
    Degenerate: groups of equal rewards give exactly 0
    Peers: TRL `scale_rewards="batch"` (ε 1e-4)
    """
    rewards_N = at_least_float32(rewards_N)
    centred_N = over_groups(mean_centered, rewards_N, group_index_N=group_index_N)
    if len(rewards_N) <= ddof or all_equal(rewards_N):
        return torch.zeros_like(rewards_N)
    return centred_N / (rewards_N.std(correction=ddof) + epsilon)


def gdpo(
    reward_components_NK: Tensor,
    *,
    reward_component_names: tuple[str, ...],
    group_index_N: Tensor,
    component_weights: dict[str, float] | None = None,
    epsilon: NonNegativeFloat = 1e-4,
    ddof: Ddof = 1,
    zero_variance: Literal["zero", "rounding"] = "zero",
) -> Tensor:
    """Each component of the reward normalised in its group, then summed with weights, then whitened over the batch.

    Formula: a = Σ_k w_k (r_k − mean_G r_k)/(std_G r_k + ε); (a − mean_batch) / (std_batch + ε)
    Source: GDPO, arXiv:2601.05242
    Degenerate: a component without variance in a group adds exactly 0 there. A trajectory that lacks a component (NaN) is left out of that
        component's mean and std and gets 0 for it; one that lacks all is left out of the batch's mean and std and gets 0. Without
        `component_weights` the weights are those of `reward.parts` and `reward.environment_weight`, and 1 for the component `earned`; in
        a run without parts and environments all are 1
    Peers: TRL `multi_objective_aggregation="normalize_then_sum"` (missing components too), verl `gdpo`
    """
    components_NK = at_least_float32(reward_components_NK)
    weights = _component_weights(reward_component_names, component_weights)
    settings = {"epsilon": epsilon, "ddof": ddof, "zero_variance": zero_variance}
    total_N = torch.zeros_like(components_NK[:, 0])
    for component_N, weight in zip(components_NK.unbind(1), weights, strict=True):
        present = (~component_N.isnan()).nonzero()[:, 0]
        normalised = over_groups(grpo, component_N[present], group_index_N=group_index_N[present], **settings)
        total_N[present] += weight * normalised
    judged = (~components_NK.isnan()).any(1).nonzero()[:, 0]
    total_J = total_N[judged]
    result_N = torch.zeros_like(total_N)
    if len(total_J) > ddof and not all_equal(total_J):
        result_N[judged] = (total_J - total_J.mean()) / (total_J.std(correction=ddof) + epsilon)
    return result_N


def _component_weights(names: tuple[str, ...], weights: dict[str, float] | None) -> list[float]:
    """Weights in the order of the names. Raises ValueError for a name without one. Other components may have weights: a batch may lack
    them."""
    if weights is None:
        return [1.0] * len(names)
    if not set(weights).issuperset(names):
        raise ValueError(
            f"component_weights are of {', '.join(weights)}, and the judge's components are {', '.join(names)}; give each component a "
            "weight (0 leaves it out), and let the judge return None for a component that a trajectory lacks"
        )
    return [weights[name] for name in names]


def _whiten_vector(x_N: Tensor, *, epsilon: float, ddof: int, center: bool = True) -> Tensor:
    if len(x_N) <= ddof or all_equal(x_N):
        return torch.zeros_like(x_N)
    centred_N = x_N - x_N.mean() if center else x_N
    return centred_N * torch.rsqrt(x_N.var(correction=ddof) + epsilon)
