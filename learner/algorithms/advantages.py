"""Advantages. What a function asks for by name says how it is called:

`rewards_G`: once per group, returns one number per trajectory; `rewards_N`: once, whole batch; `token_rewards_NT`: once, returns
advantages per token, or those and the returns a critic learns. A group whose rewards are all equal gives exactly 0, detected as
max == min: dividing the rounding of its mean by a small epsilon gives advantages of 0.8 in other systems.
Shapes: G trajectories of a group, N of the batch, T tokens, K reward components.
"""

from typing import Literal

import torch
from torch import Tensor

from learner.algorithms.baselines import gpg as gpg
from learner.algorithms.baselines import opo as opo
from learner.algorithms.groups import over_groups as over_groups
from learner.algorithms.masks import at_least_float32
from learner.algorithms.returns import cumulative_returns as cumulative_returns
from learner.algorithms.returns import gae as gae


def grpo(
    rewards_G: Tensor,
    *,
    epsilon: float = 1e-6,
    epsilon_mode: Literal["add", "clamp"] = "add",
    ddof: int = 1,
    singleton: Literal["zero", "raw", "error"] = "zero",
    zero_variance: Literal["zero", "rounding"] = "zero",
) -> Tensor:
    """Reward normalised in its group.

    Formula: (r − mean_G) / (std_G + ε); `epsilon_mode="clamp"` divides by max(std_G, ε) instead
    Source: DeepSeekMath, arXiv:2402.03300
    Degenerate: equal rewards give exactly 0 (`zero_variance="rounding"` leaves the peers' amplified rounding); a group of one gives 0,
        its reward (`singleton="raw"`), or an error (`"error"`)
    Peers: torchrl MCAdvantage (clamp 1e-6), verl (add 1e-6, singleton raw), TRL and TapeAgents (add 1e-4), LightRFT `group_norm`
        (add 1e-8; its calculator 1e-9), OpenRLHF (add 1e-9); all ddof 1
    """
    rewards_G = at_least_float32(rewards_G)
    if rewards_G.numel() < 2:
        return _singleton(rewards_G, singleton=singleton)
    if zero_variance == "zero" and _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    std = rewards_G.std(correction=ddof)
    return centred_G / (std.clamp(min=epsilon) if epsilon_mode == "clamp" else std + epsilon)


def mean_centered(rewards_G: Tensor, *, singleton: Literal["zero", "raw", "error"] = "zero") -> Tensor:
    """Reward minus the group's mean, not divided by its spread.

    Formula: r − mean_G
    Source: Dr. GRPO, arXiv:2503.20783
    Degenerate: equal rewards give exactly 0; a group of one gives 0, its reward (`singleton="raw"`), or an error
    Peers: LightRFT and OpenRLHF `reinforce_baseline` and `dr_grpo`, TRL `scale_rewards="none"`, verl `norm_adv_by_std_in_grpo=False` (raw)
    """
    rewards_G = at_least_float32(rewards_G)
    if rewards_G.numel() < 2:
        return _singleton(rewards_G, singleton=singleton)
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


dr_grpo = mean_centered


def rloo(rewards_G: Tensor, *, singleton: Literal["zero", "raw", "error"] = "error") -> Tensor:
    """Reward minus the mean of the other trajectories.

    Formula: (r − mean_G)·G/(G − 1)
    Source: Ahmadian et al., arXiv:2402.14740
    Degenerate: equal rewards give exactly 0; a group of one has no baseline and is an error, or gives 0 or its reward by `singleton`
    Peers: LightRFT and OpenRLHF `rloo`, verl `rloo` (singleton raw), verl `rloo_vectorized` (zero), TRL RLOO
    """
    rewards_G = at_least_float32(rewards_G)
    num_trajectories = rewards_G.numel()
    if num_trajectories < 2:
        return _singleton(rewards_G, singleton=singleton, name="rloo")
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) * num_trajectories / (num_trajectories - 1)


def pass_at_k(rewards_G: Tensor, *, normalise: bool = False, epsilon: float = 1e-6) -> Tensor:
    """Only the best trajectory of a group gains, by how much it beats the second.

    Formula: r_best − r_second for the best, 0 for the others; `normalise` divides by std_G + ε
    Source: arXiv:2503.19595
    Degenerate: a tie at the top and equal rewards give exactly 0; a group of one has no second and is an error
    Peers: verl `grpo_passk`
    """
    rewards_G = at_least_float32(rewards_G)
    if rewards_G.numel() < 2:
        return _singleton(rewards_G, singleton="error", name="pass_at_k")
    best = rewards_G.topk(2)
    advantages_G = torch.zeros_like(rewards_G)
    gain = best.values[0] - best.values[1]
    advantages_G[best.indices[0]] = gain / (rewards_G.std() + epsilon) if normalise else gain
    return advantages_G


def max_rl(rewards_G: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Reward against the group's mean, relative to that mean: rare successes weigh more.

    Formula: (r − mean_G) / (mean_G + ε)
    Source: MaxRL, arXiv:2602.02710
    Degenerate: equal rewards, all 0 among them, give exactly 0; meant for rewards that are not negative
    Peers: none of the golden ones
    """
    rewards_G = at_least_float32(rewards_G)
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.mean() + epsilon)


def raw_reward(rewards_N: Tensor) -> Tensor:
    """The reward itself, without a baseline.

    Formula: r
    Source: REINFORCE; TapeAgents `use_advantages=False`
    Degenerate: none
    Peers: TapeAgents, LightRFT `reinforce` before whitening
    """
    return at_least_float32(rewards_N)


def cpgd(rewards_G: Tensor, *, center: Literal["raw", "mean", "normalised"] = "mean", epsilon: float = 1e-8) -> Tensor:
    """What CPGD's loss takes: raw, centred or normalised reward.

    Formula: r (`raw`), r − mean_G (`mean`), or (r − mean_G)/(std_G + ε) with ddof 0 (`normalised`)
    Source: CPGD, arXiv:2505.12504
    Degenerate: equal rewards give exactly 0, save for `raw`; a group of one gives 0, save for `raw`
    Peers: what LightRFT means: its own are always 0, as 1-D rewards are summed over the batch
    """
    rewards_G = at_least_float32(rewards_G)
    if center == "raw":
        return rewards_G
    if center == "mean":
        return mean_centered(rewards_G)
    return grpo(rewards_G, epsilon=epsilon, ddof=0)


def reinforce_pp(rewards_N: Tensor, *, epsilon: float = 1e-8, ddof: int = 1) -> Tensor:
    """Rewards whitened over the trajectories of the batch.

    Formula: (r − mean_batch) / √(var_batch + ε)
    Source: REINFORCE++, arXiv:2501.03262
    Degenerate: a batch of equal rewards gives exactly 0
    Peers: OpenRLHF and LightRFT whiten over tokens, where long trajectories weigh more: advantage `cumulative_returns` and shaping `whiten`
    """
    rewards_N = at_least_float32(rewards_N)
    return _whiten_vector(rewards_N, epsilon=epsilon, ddof=ddof)


def reinforce_pp_baseline(rewards_N: Tensor, *, group_index_N: Tensor, epsilon: float = 1e-8, ddof: int = 1) -> Tensor:
    """Rewards minus their group's mean, then whitened over the batch.

    Formula: d = r − mean_G; (d − mean_batch d) / √(var_batch d + ε)
    Source: REINFORCE++, arXiv:2501.03262
    Degenerate: groups of equal rewards give exactly 0
    Peers: verl `reinforce_plus_plus_baseline` (over tokens: shaping `whiten`), OpenRLHF `reinforce_baseline`
    """
    centred_N = over_groups(mean_centered, at_least_float32(rewards_N), group_index_N=group_index_N)
    # Group means are 0, so is the batch's: whitening need not subtract rounding from a group of exact zeros.
    return _whiten_vector(centred_N, epsilon=epsilon, ddof=ddof, center=False)


def group_mean_batch_std(rewards_N: Tensor, *, group_index_N: Tensor, epsilon: float = 1e-8, ddof: int = 1) -> Tensor:
    """Group's mean, batch's spread.

    Formula: (r − mean_G) / (std_batch(r) + ε)
    Source: Lite-PPO, arXiv:2508.08221
    Degenerate: groups of equal rewards give exactly 0
    Peers: TRL `scale_rewards="batch"` (ε 1e-4)
    """
    rewards_N = at_least_float32(rewards_N)
    centred_N = over_groups(mean_centered, rewards_N, group_index_N=group_index_N)
    if len(rewards_N) <= ddof:
        return torch.zeros_like(rewards_N)
    return centred_N / (rewards_N.std(correction=ddof) + epsilon)


def gdpo(
    reward_components_NK: Tensor,
    *,
    group_index_N: Tensor,
    component_weights: tuple[float, ...] | None = None,
    epsilon: float = 1e-4,
    ddof: int = 1,
    zero_variance: Literal["zero", "rounding"] = "zero",
) -> Tensor:
    """Each component of the reward normalised in its group, then summed with weights, then whitened over the batch.

    Formula: a = Σ_k w_k (r_k − mean_G r_k)/(std_G r_k + ε); (a − mean_batch) / (std_batch + ε)
    Source: GDPO, arXiv:2601.05242
    Degenerate: a component without variance in a group adds exactly 0 there; no weights are weights of 1
    Peers: TRL `multi_objective_aggregation="normalize_then_sum"`, verl `gdpo`
    """
    components_NK = at_least_float32(reward_components_NK)
    weights_K = (
        components_NK.new_ones(components_NK.shape[1])
        if component_weights is None
        else components_NK.new_tensor(component_weights)
    )
    if len(weights_K) != components_NK.shape[1]:
        raise ValueError(
            f"gdpo has {len(weights_K)} component_weights for {components_NK.shape[1]} reward components; give one each"
        )
    normalised = [
        over_groups(
            grpo, component_N, group_index_N=group_index_N, epsilon=epsilon, ddof=ddof, zero_variance=zero_variance
        )
        for component_N in components_NK.unbind(1)
    ]
    total_N = (torch.stack(normalised, 1) * weights_K).sum(1)
    if len(total_N) <= ddof or _all_equal(total_N):
        return torch.zeros_like(total_N)
    return (total_N - total_N.mean()) / (total_N.std(correction=ddof) + epsilon)


def _all_equal(rewards: Tensor) -> bool:
    return bool(rewards.max() == rewards.min())


def _singleton(rewards_G: Tensor, *, singleton: str, name: str = "this advantage") -> Tensor:
    if singleton == "raw":
        return rewards_G
    if singleton == "zero":
        return torch.zeros_like(rewards_G)
    raise ValueError(
        f"{name} needs at least 2 trajectories in a group, got {rewards_G.numel()}; or set singleton: zero or raw"
    )


def _whiten_vector(x_N: Tensor, *, epsilon: float, ddof: int, center: bool = True) -> Tensor:
    if len(x_N) <= ddof or _all_equal(x_N):
        return torch.zeros_like(x_N)
    centred_N = x_N - x_N.mean() if center else x_N
    return centred_N * torch.rsqrt(x_N.var(correction=ddof) + epsilon)
