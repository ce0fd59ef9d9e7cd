"""From rewards to advantages: shaping, subtraction of a KL to the reference, then the advantage, per group or over the batch.

Advantages see all trajectories, filtered ones too: a truncated answer still counts in its group's mean.
Shapes: N trajectories, T tokens, G of a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.contracts.algorithm_config import KlRewardConfig
from cluster.contracts.errors import DataError
from learner.algorithms import kl
from learner.algorithms.groups import sorted_group_rows
from learner.algorithms.masks import at_least_float32, masked
from learner.algorithms.moments import RunningMoments
from learner.algorithms.objective import group_rules
from learner.algorithms.objective.batch import BatchTensors
from learner.algorithms.objective.parts import Parts
from learner.algorithms.objective.streaming import EarlierReturns
from learner.algorithms.objective.token_rewards import move_to_earner, place_rewards, to_go


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Rewards and advantages of a step's tokens."""

    token_rewards_NT: Tensor
    advantages_NT: Tensor
    """Before advantage shaping."""
    returns_NT: Tensor | None
    """None: the advantage computes none."""
    returns_by_prompt: Mapping[str, list[float]]


def shaped(
    batch: BatchTensors, parts: Parts, moments: Mapping[str, RunningMoments]
) -> tuple[Tensor, dict[str, RunningMoments]]:
    """Rewards after `reward_shaping`, and the running moments with this batch included."""
    shaped_N, after = at_least_float32(batch.rewards_N), dict(moments)
    for step in parts.reward_shaping:
        part_N = None if step.part is None else batch.component(step.part)
        if step.field in after:
            after[step.field] = after[step.field].update(shaped_N if part_N is None else part_N[~part_N.isnan()])
        if not step.is_of_a_group:
            # Rewards per token do not exist yet: they are made from the shaped rewards.
            given = batch.offered(rewards_N=shaped_N, token_rewards_NT=None, reward_moments=after.get(step.field))
            shaped_N = step.tensor(step.with_given(given | {"part_rewards_N": part_N}), shaped_N.shape)
            continue
        by_group_N = torch.empty_like(shaped_N)
        for rows, group in group_rules.of_batch(replace(batch, rewards_N=shaped_N)):
            by_group_N[rows] = step.tensor(step.with_given(group), rows.shape).to(by_group_N)
        shaped_N = by_group_N
    return shaped_N, after


def credited(
    batch: BatchTensors,
    parts: Parts,
    *,
    shaped_N: Tensor,
    kl_coefficients: Mapping[str, float],
    earlier: EarlierReturns | None,
) -> Credit:
    """`shaped_N` are the rewards after shaping."""
    token_rewards_NT, rewards_N = _token_rewards(batch, parts, shaped_N), shaped_N
    off_advantages_NT = None
    if (term := parts.config.kl.reward) is not None:
        penalty_NT = kl_coefficients["reward"] * _kl(batch, parts, term)
        if term.credit == "trajectory":
            token_rewards_NT, rewards_N = token_rewards_NT - penalty_NT, shaped_N - penalty_NT.sum(1)
        else:
            off_advantages_NT = to_go(penalty_NT) if term.credit == "to_go" else penalty_NT
    advantages_NT, returns_NT = _advantages(
        replace(batch, token_rewards_NT=token_rewards_NT), parts, rewards_N=rewards_N, earlier=earlier
    )
    if off_advantages_NT is not None:
        advantages_NT = advantages_NT - off_advantages_NT
    return Credit(
        token_rewards_NT=token_rewards_NT,
        advantages_NT=advantages_NT,
        returns_NT=returns_NT,
        returns_by_prompt={} if earlier is None else _by_prompt(batch, rewards_N),
    )


def refuse_not_finite(batch: BatchTensors, parts: Parts, advantages_NT: Tensor) -> None:
    """Raises DataError that names a trajectory without a component that the advantage asks for (its NaN spreads over its group), else the
    first trajectory with an advantage that is not finite."""
    is_bad_NT = ~torch.isfinite(advantages_NT)
    if not bool(is_bad_NT.any()):
        return
    name, components_NK = parts.advantage.plugin.name, batch.reward_components_NK
    asks = "reward_components_NK" in parts.advantage.asks
    if components_NK is not None and asks and bool(components_NK.isnan().any()):
        row, component = components_NK.isnan().nonzero()[0].tolist()
        lacking = f"lacks the reward component {batch.reward_component_names[component]!r}"
        raise DataError(f"{batch.name(row)} {lacking}, and advantage {name!r} cannot handle a missing component")
    row = int(is_bad_NT.any(1).nonzero()[0])
    raise DataError(f"{batch.name(row)}: advantages are not finite; {name!r} cannot take these rewards")


def acting_logprobs(batch: BatchTensors, parts: Parts) -> Tensor:
    """Log-probs of the policy that acted: π_old under `proximal: recompute`, else the rollout's, even if the batch has π_old for other
    parts."""
    if parts.config.proximal != "recompute":
        return batch.rollout_logprobs_NT
    assert batch.proximal_logprobs_NT is not None, "prepare() refuses a batch without them"
    return batch.proximal_logprobs_NT


def _token_rewards(batch: BatchTensors, parts: Parts, shaped_N: Tensor) -> Tensor:
    """If turns have their own rewards, the change made by shaping is placed like a whole trajectory's reward."""
    mask_NT, placement = batch.loss_mask_NT, parts.config.reward_placement
    whole_NT = place_rewards(shaped_N, loss_mask_NT=mask_NT, placement=placement)
    if batch.token_rewards_NT is None:
        return whole_NT
    own_NT = move_to_earner(batch.token_rewards_NT, loss_mask_NT=mask_NT)
    own_NT = own_NT + place_rewards(shaped_N - batch.rewards_N, loss_mask_NT=mask_NT, placement=placement)
    return torch.where(batch.token_rewards_NT.isnan().all(1, keepdim=True), whole_NT, own_NT)


def _kl(batch: BatchTensors, parts: Parts, penalty: KlRewardConfig) -> Tensor:
    """KL to the reference per token."""
    assert batch.reference_logprobs_NT is not None, "prepare() refuses a batch without them"
    return kl.ESTIMATORS[penalty.estimator](
        acting_logprobs(batch, parts),
        other_logprobs_BT=batch.reference_logprobs_NT,
        loss_mask_BT=batch.loss_mask_NT,
        log_ratio_clamp=penalty.log_ratio_clamp,
    )


def _advantages(
    batch: BatchTensors, parts: Parts, *, rewards_N: Tensor, earlier: EarlierReturns | None
) -> tuple[Tensor, Tensor | None]:
    """Advantages per token, and returns if the advantage computes them."""
    advantage, mask_NT = parts.advantage, batch.loss_mask_NT
    if "rewards_G" in advantage.asks:
        result = _per_group(batch, parts, rewards_N=rewards_N, earlier=earlier)
    else:
        try:
            result = advantage.with_given(batch.offered(rewards_N=rewards_N))
        except ValueError as error:
            raise DataError(
                f"advantage {advantage.plugin.name!r} of {len(batch.trajectory_ids)} trajectories: {error}"
            ) from error
    advantages, returns_NT = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    advantages = advantage.tensor(advantages, rewards_N.shape, mask_NT.shape)
    returns_NT = None if returns_NT is None else advantage.tensor(returns_NT, mask_NT.shape)
    per_token_NT = advantages if advantages.dim() == 2 else advantages[:, None].expand(mask_NT.shape)
    return masked(per_token_NT, mask_BT=mask_NT), returns_NT


def _per_group(batch: BatchTensors, parts: Parts, *, rewards_N: Tensor, earlier: EarlierReturns | None) -> Tensor:
    result_N, given = torch.empty_like(rewards_N), batch.offered(rewards_N=rewards_N)
    of_all = group_rules.columns_of(batch, rewards_N=rewards_N)
    index_N = batch.group_index_N if earlier is None else _prompt_index(batch)
    for rows in sorted_group_rows(rewards_N, group_index_N=index_N):
        own_G, first = rewards_N[rows], int(rows[0])
        group_G = own_G if earlier is None else earlier.joined(own_G, prompt_id=batch.prompt_ids[first])
        try:
            of_group = {name: column[rows] for name, column in of_all.items() if name in parts.advantage.asks}
            advantages_G = parts.advantage.with_given(given | of_group | {"rewards_G": group_G})
            advantages_G = parts.advantage.tensor(advantages_G, group_G.shape)
            result_N[rows] = advantages_G[: len(rows)].to(result_N.dtype)
        except (ValueError, DataError) as error:
            members = ", ".join(batch.trajectory_ids[row] for row in rows.tolist())
            raise DataError(f"group {batch.group_ids[first]} (trajectory {members}): rewards: {error}") from error
    return result_N


def _prompt_index(batch: BatchTensors) -> Tensor:
    places = {prompt_id: place for place, prompt_id in enumerate(dict.fromkeys(batch.prompt_ids))}
    return torch.tensor([places[prompt_id] for prompt_id in batch.prompt_ids], device=batch.group_index_N.device)


def _by_prompt(batch: BatchTensors, rewards_N: Tensor) -> dict[str, list[float]]:
    returns: dict[str, list[float]] = {}
    for prompt_id, value in zip(batch.prompt_ids, rewards_N.tolist(), strict=True):
        returns.setdefault(prompt_id, []).append(value)
    return returns
