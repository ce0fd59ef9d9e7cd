"""Advantages of one group at a time. Shapes: G trajectories of the group."""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from learner.algorithms.conditions import Ddof, InertWith
from learner.algorithms.groups import all_equal
from learner.algorithms.masks import at_least_float32


def grpo(
    rewards_G: Tensor,
    *,
    epsilon: NonNegativeFloat = 1e-6,
    epsilon_mode: Literal["add", "clamp"] = "add",
    ddof: Ddof = 1,
    singleton: Literal["zero", "raw", "error"] = "zero",
    zero_variance: Literal["zero", "rounding"] = "zero",
) -> Tensor:
    """Reward normalised in its group.

    Formula: (r − mean_G) / (std_G + ε); `epsilon_mode="clamp"` divides by max(std_G, ε) instead
    Gradient: (G − 1)/G of the policy gradient, as the mean includes the trajectory itself, divided by each prompt's spread
    Source: DeepSeekMath, arXiv:2402.03300
    Degenerate: equal rewards give exactly 0 (`zero_variance="rounding"` keeps the peers' amplified rounding); a group of one gives 0,
        its reward normalised with mean 0 and std 1 (`singleton="raw"`), or an error (`"error"`)
    Peers: torchrl MCAdvantage (clamp 1e-6), verl (add 1e-6, singleton raw), TRL and TapeAgents (add 1e-4), LightRFT `group_norm`
        (add 1e-8; its calculator 1e-9), OpenRLHF (add 1e-9); all ddof 1
    """
    rewards_G = at_least_float32(rewards_G)
    if rewards_G.numel() < 2:
        centred_G, std = _singleton(rewards_G, singleton=singleton), torch.ones_like(rewards_G)
    elif zero_variance == "zero" and all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    else:
        centred_G, std = rewards_G - rewards_G.mean(), rewards_G.std(correction=ddof)
    return centred_G / (std.clamp(min=epsilon) if epsilon_mode == "clamp" else std + epsilon)


def mean_centered(rewards_G: Tensor, *, singleton: Literal["zero", "raw", "error"] = "zero") -> Tensor:
    """Reward minus the group's mean, not divided by its spread.

    Formula: r − mean_G
    Gradient: (G − 1)/G of the policy gradient: the mean includes the trajectory itself
    Source: Dr. GRPO, arXiv:2503.20783
    Degenerate: equal rewards give exactly 0; a group of one gives 0, its reward (`singleton="raw"`), or an error
    Peers: LightRFT and OpenRLHF `reinforce_baseline` and `dr_grpo`, TRL `scale_rewards="none"`, verl `norm_adv_by_std_in_grpo=False` (raw)
    """
    rewards_G = at_least_float32(rewards_G)
    if rewards_G.numel() < 2:
        return _singleton(rewards_G, singleton=singleton)
    if all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


dr_grpo = mean_centered


def rloo(rewards_G: Tensor, *, singleton: Literal["zero", "raw", "error"] = "error") -> Tensor:
    """Reward minus the mean of the other trajectories.

    Formula: (r − mean_G)·G/(G − 1)
    Gradient: the policy gradient, unbiased
    Source: Ahmadian et al., arXiv:2402.14740
    Degenerate: equal rewards give exactly 0; a group of one has no baseline and is an error, or gives 0 or its reward by `singleton`
    Peers: LightRFT and OpenRLHF `rloo`, verl `rloo` (singleton raw), verl `rloo_vectorized` (zero), TRL RLOO
    """
    num_trajectories = rewards_G.numel()
    if num_trajectories < 2:
        return _singleton(at_least_float32(rewards_G), singleton=singleton, name="rloo")
    return mean_centered(rewards_G) * num_trajectories / (num_trajectories - 1)


def pass_at_k(
    rewards_G: Tensor,
    *,
    normalise: bool = False,
    epsilon: Annotated[NonNegativeFloat, InertWith("normalise", False)] = 1e-6,
) -> Tensor:
    """Only the best trajectory of a group has an advantage: its margin over the second best.

    Formula: r_best − r_second for the best, 0 for the others; `normalise` divides by std_G + ε
    Source: arXiv:2503.19595
    Degenerate: a tie at the top and equal rewards give exactly 0; a group of one has no second and is an error
    Peers: verl `grpo_passk`
    """
    rewards_G = at_least_float32(rewards_G)
    if rewards_G.numel() < 2:
        raise ValueError(
            f"pass_at_k needs at least 2 trajectories in a group, got {rewards_G.numel()}; sample more of each prompt, or use "
            "an advantage that takes a group of one, such as 'raw_reward'"
        )
    advantages_G = torch.zeros_like(rewards_G)
    if all_equal(rewards_G):
        return advantages_G
    best = rewards_G.topk(2)
    gain = best.values[0] - best.values[1]
    advantages_G[best.indices[0]] = gain / (rewards_G.std() + epsilon) if normalise else gain
    return advantages_G


def max_rl(rewards_G: Tensor, *, epsilon: NonNegativeFloat = 1e-6) -> Tensor:
    """Reward minus the group's mean, divided by that mean: rare successes weigh more.

    Formula: (r − mean_G) / (mean_G + ε)
    Source: MaxRL, arXiv:2602.02710
    Degenerate: equal rewards, also all 0, and a group of one give exactly 0; a negative reward is an error, as a negative mean flips signs
    Peers: SkyRL `maxrl`, TRL MaxRL, the authors' fork of verl (all without the check)
    """
    rewards_G = at_least_float32(rewards_G)
    if bool((rewards_G < 0).any()):
        raise ValueError(
            f"max_rl is defined for rewards of at least 0, got {float(rewards_G.min()):g}; add an offset "
            "(reward_shaping: [{name: reward_scale, factor: 1, offset: ...}]), or keep the KL out of the reward"
        )
    if all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) / (rewards_G.mean() + epsilon)


def cpgd(
    rewards_G: Tensor,
    *,
    center: Literal["raw", "mean", "normalised"] = "mean",
    epsilon: Annotated[NonNegativeFloat, InertWith("center", "raw"), InertWith("center", "mean")] = 1e-8,
) -> Tensor:
    """The weight of CPGD's loss: the raw, centred or normalised reward.

    Formula: r (`raw`), r − mean_G (`mean`), or (r − mean_G)/(std_G + ε) with ddof 0 (`normalised`)
    Source: CPGD, arXiv:2505.12504
    Degenerate: equal rewards and a group of one give exactly 0, except with `raw`
    Peers: LightRFT as documented; as coded, its advantages are always 0, since it sums 1-D rewards over the batch
    """
    rewards_G = at_least_float32(rewards_G)
    if center == "raw":
        return rewards_G
    if center == "mean":
        return mean_centered(rewards_G)
    return grpo(rewards_G, epsilon=epsilon, ddof=0)


def _singleton(rewards_G: Tensor, *, singleton: str, name: str = "this advantage") -> Tensor:
    if singleton == "raw":
        return rewards_G
    if singleton == "zero":
        return torch.zeros_like(rewards_G)
    raise ValueError(
        f"{name} needs at least 2 trajectories in a group, got {rewards_G.numel()}; or set singleton: zero or raw"
    )


def none(rewards_G: Tensor) -> Tensor:
    """The run does not learn from the reward.

    Formula: 0
    Source: on-policy distillation, where the per-token KL to a teacher is the whole advantage (GKD, arXiv:2306.13649, with λ = 1 and the
        reverse KL; Thinking Machines, "On-Policy Distillation", 2025)
    Degenerate: refused unless something else trains: `kl.loss`, `kl.reward` with credit `token` or `to_go`, `distillation`, or `sft`
    Peers: tinker-cookbook `on_policy_distillation` (advantage −β·(log π − log π_teacher) per token)
    """
    return torch.zeros_like(at_least_float32(rewards_G))
