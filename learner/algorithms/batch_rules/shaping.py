"""Small steps on rewards (before advantages) and on advantages (after them), composable in any order.

A step on `rewards_G` needs one group only: the cluster takes it too, before filters of groups. A step on `rewards_N` needs the whole
batch, which only the learner has.
Shapes: G trajectories of a group, N of the batch, T tokens.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from cluster.contracts.errors import DataError
from learner.algorithms.conditions import AtMost, Ddof, InertWith, LessThan, NonZeroFloat
from learner.algorithms.groups import all_equal, group_rows
from learner.algorithms.masks import at_least_float32, masked
from learner.algorithms.moments import RunningMoments


def reward_clip(rewards_G: Tensor, *, low: Annotated[float, LessThan("high")], high: float) -> Tensor:
    """Clips rewards to a range.

    Formula: clip(r, low, high)
    Source: none
    Degenerate: none
    Peers: LightRFT and OpenRLHF `reward_clip_range`
    """
    return at_least_float32(rewards_G).clamp(low, high)


def reward_scale(rewards_G: Tensor, *, factor: NonZeroFloat, offset: float = 0.0) -> Tensor:
    """Affine change of rewards.

    Formula: factor·(r + offset)
    Source: none
    Degenerate: none
    Peers: none
    """
    return factor * (at_least_float32(rewards_G) + offset)


def reward_over_length(rewards_G: Tensor, *, completion_lengths_G: Tensor, power: float = 1.0) -> Tensor:
    """Reward per token, before the baseline: of two equal answers the shorter one is better.

    Formula: r / length^power
    Source: none
    Degenerate: a power of 0 changes nothing
    Peers: none
    """
    return at_least_float32(rewards_G) / completion_lengths_G.clamp(min=1) ** power


def running_norm(
    rewards_N: Tensor,
    *,
    reward_moments: RunningMoments,
    center: bool = False,
    part: str | None = None,
    part_weight: Annotated[float | None, InertWith("part", None)] = None,
    part_rewards_N: Tensor | None = None,
) -> Tensor:
    """Rewards divided by the spread of all rewards of the run so far. It changes slowly, so steps stay comparable, unlike with the spread
    of a group or batch. With `part`, normalises only that part of the reward, such as a reward model's.

    Formula: n(r) = r / std, or (r − mean) / std (`center`), over all rewards of the run that reached this shaping step, the present batch
        included; with `part` r + w·(n(c) − c), where c is the part's reward, mean and std are over all c so far, and w is the part's
        weight (`part_weight`: a run takes that of `reward.parts`)
    Source: PPO implementations, arXiv:2005.12729
    Degenerate: std is 1 while all rewards are equal; a trajectory without the part keeps its reward; w is 1 if no weight is given
    Peers: LightRFT `reward_running_norm` (`_minus_mean`: center), TRL PPO `use_score_scaling` (`use_score_norm`: center)
    """
    rewards_N = at_least_float32(rewards_N)
    measured_N = rewards_N if part_rewards_N is None else part_rewards_N
    normalised_N = reward_moments.normalise(measured_N) if center else measured_N / reward_moments.std
    if part_rewards_N is None:
        return normalised_N
    weight = 1.0 if part_weight is None else part_weight
    return torch.where(part_rewards_N.isnan(), rewards_N, rewards_N + weight * (normalised_N - part_rewards_N))


def overlong_penalty(
    rewards_G: Tensor,
    *,
    completion_lengths_G: Tensor,
    max_length: PositiveInt,
    cache: Annotated[NonNegativeInt, AtMost("max_length")],
    penalty: NonNegativeFloat = 1.0,
) -> Tensor:
    """Soft penalty for completions near the length limit.

    Formula: r + clip((max_length − cache − length)/cache, −1, 0)·penalty
    Source: DAPO, arXiv:2503.14476 eq. 13
    Degenerate: a cache of 0 penalises only completions beyond max_length, in full
    Peers: verl `overlong_buffer` (len, penalty_factor), OpenRLHF `overlong_buffer_len`
    """
    over_G = (completion_lengths_G - (max_length - cache)).clamp(min=0)
    fraction_G = (over_G > 0).to(rewards_G.dtype) if cache == 0 else (over_G / cache).clamp(max=1)
    return at_least_float32(rewards_G) - penalty * fraction_G


def truncation_penalty(rewards_G: Tensor, *, truncated_G: Tensor, coefficient: Annotated[float, Field(le=1)]) -> Tensor:
    """Less reward for truncated completions.

    Formula: where truncated, coefficient·r for a coefficient in [0, 1], the coefficient itself for a negative one
    Source: OpenRLHF
    Degenerate: a coefficient of 1 changes nothing
    Peers: OpenRLHF `stop_properly_penalty_coef`
    """
    rewards_G = at_least_float32(rewards_G)
    punished_G = rewards_G * coefficient if coefficient >= 0 else torch.full_like(rewards_G, coefficient)
    return torch.where(truncated_G, punished_G, rewards_G)


def advantage_clip(advantages_NT: Tensor, *, low: Annotated[float, LessThan("high")], high: float) -> Tensor:
    """Clips advantages to a range.

    Formula: clip(A, low, high)
    Source: none
    Degenerate: none
    Peers: LightRFT `advantage_clip` (symmetric)
    """
    return at_least_float32(advantages_NT).clamp(low, high)


def whiten(
    advantages_NT: Tensor,
    *,
    loss_mask_NT: Tensor,
    center: bool = True,
    scale: bool = True,
    ddof: Annotated[Ddof, InertWith("scale", False)] = 1,
    epsilon: Annotated[NonNegativeFloat, InertWith("scale", False)] = 1e-8,
    epsilon_mode: Annotated[Literal["add", "clamp", "after"], InertWith("scale", False)] = "add",
    zero_variance: Literal["zero", "rounding"] = "zero",
) -> Tensor:
    """Whitens advantages over all tokens of the batch (long trajectories weigh more).

    Formula: (A − mean) / √(var + ε), by `epsilon_mode` √max(var, ε) or √var + ε; `center=False` adds the mean back; `scale=False` only
        centres
    Source: PPO implementations, arXiv:2005.12729
    Degenerate: equal advantages give exactly 0, or stay as they are with `center=False` (`zero_variance="rounding"` keeps the peers'
        amplified rounding); a batch without tokens gives 0 (verl raises)
    Peers: verl `masked_whiten` (ddof 1), LightRFT and OpenRLHF cross-batch normalisation (ddof 0, variance clamped at 1e-8),
        torchtune `whiten` (center=False: its shift_mean=True re-adds the mean)
    """
    kept_M = at_least_float32(advantages_NT)[loss_mask_NT]
    if not kept_M.numel():
        return masked(advantages_NT, mask_BT=loss_mask_NT)
    mean = kept_M.mean()
    whitened_NT = masked(advantages_NT, mask_BT=loss_mask_NT) - mean
    if zero_variance == "zero" and all_equal(kept_M):
        whitened_NT = torch.zeros_like(whitened_NT)
    elif scale:
        variance = kept_M.var(correction=ddof) if kept_M.numel() > ddof else kept_M.new_zeros(())
        if epsilon_mode == "after":
            whitened_NT = whitened_NT / (variance.sqrt() + epsilon)
        else:
            held = variance.clamp(min=epsilon) if epsilon_mode == "clamp" else variance + epsilon
            whitened_NT = whitened_NT * torch.rsqrt(held)
    return masked(whitened_NT if center else whitened_NT + mean, mask_BT=loss_mask_NT)


def over_length(advantages_NT: Tensor, *, loss_mask_NT: Tensor, power: float = 1.0) -> Tensor:
    """Advantages divided by the number of tokens that the policy wrote; a negative power favours long trajectories instead.

    Formula: A / len^power
    Source: GRPO's mean per trajectory, arXiv:2402.03300, for use with another aggregation
    Degenerate: a power of 0 changes nothing
    Peers: power 1 with aggregation `sequence_sum_mean` is verl's `seq-mean-token-mean`
    """
    return at_least_float32(advantages_NT) / loss_mask_NT.sum(1, keepdim=True).clamp(min=1) ** power


def column_weights(advantages_NT: Tensor, *, columns: Mapping[str, Tensor], column: str) -> Tensor:
    """Weights each trajectory's policy loss by a number of its prompt, such as a difficulty. KL and entropy terms keep their weight.

    Formula: A·c, c the prompt's `column`
    Source: none
    Degenerate: a weight of 0 takes a prompt out of the gradient and leaves it in the denominators; a negative one is refused
    Peers: none
    """
    weights_N = columns[column]
    if bool((weights_N < 0).any()):
        raise DataError(f"column {column!r} weighs a prompt by {float(weights_N.min()):g}; give weights of 0 or more")
    return advantages_NT * weights_N[:, None]


def group_weights(
    advantages_NT: Tensor,
    *,
    rewards_N: Tensor,
    group_index_N: Tensor,
    cap: PositiveFloat = 3.0,
    constant_weight: NonNegativeFloat = 1.0,
) -> Tensor:
    """Scales up groups with variance, to make up for groups without variance, which do not train. A cap limits the factor.

    Formula: A·min(groups / groups with variance, cap) in groups whose rewards differ, A·constant_weight in the others
    Source: LightRFT
    Degenerate: nothing changes if no group's rewards differ
    Peers: LightRFT `clip_filter_like_weight`
    """
    groups = group_rows(group_index_N)
    varying = [rows for rows in groups if not all_equal(rewards_N[rows])]
    weights_N = torch.full_like(at_least_float32(rewards_N), constant_weight if varying else 1.0)
    for rows in varying:
        weights_N[rows] = min(len(groups) / len(varying), cap)
    return advantages_NT * weights_N[:, None]
