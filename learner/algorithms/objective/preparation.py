"""From a batch to a prepared one, in this order: reward shaping, KL in the reward, advantages, filters, advantage shaping, weights.

Advantages see all trajectories, filtered ones too (a truncated answer still moves its group's mean); advantage shaping and aggregation
see the rest. Weights are of one update: `mini_batch` fixes them again for the trajectories that it takes out of a step.
Shapes: N trajectories, T tokens, G of a group, M all loss tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from cluster.contracts.algorithm_config import KlRewardConfig
from cluster.contracts.errors import DataError
from learner.algorithms import kl
from learner.algorithms.advantages.returns import cumulative_returns
from learner.algorithms.batch_rules.filters import Selection
from learner.algorithms.groups import all_equal, group_rows, sorted_group_rows
from learner.algorithms.losses.covariance import covariances
from learner.algorithms.masks import at_least_float32, masked
from learner.algorithms.moments import RunningMoments
from learner.algorithms.objective import group_rules
from learner.algorithms.objective.batch import BatchTensors, Prepared
from learner.algorithms.objective.checks import refuse_unknown_sampler
from learner.algorithms.objective.parts import Parts
from learner.algorithms.objective.streaming import EarlierReturns
from learner.algorithms.objective.token_rewards import move_to_earner, place_rewards, to_go
from learner.algorithms.registry.variants import Variant


def prepare(
    batch: BatchTensors,
    *,
    parts: Parts,
    needs: frozenset[str],
    wants_entropies: bool,
    kl_coefficients: Mapping[str, float],
    moments: Mapping[str, RunningMoments],
    earlier: EarlierReturns | None,
) -> Prepared:
    """See `Objective.prepare`."""
    batch.validate(needs_reference=parts.learn_from_reference)
    _refuse_missing(batch, needs=needs, parts=parts)
    mask_NT = batch.loss_mask_NT
    supply = _supply(batch)
    if "returns" in moments:
        supply["values_NT"] = masked(moments["returns"].restore(supply["values_NT"]), loss_mask_BT=mask_NT)
    shaped_N, moments = _shaped(batch, parts, supply, moments)
    supply["rewards_N"] = shaped_N
    supply["token_rewards_NT"] = _token_rewards(batch, shaped_N, placement=parts.config.reward_placement)
    penalty = parts.config.kl.reward
    penalty_NT = None if penalty is None else kl_coefficients["reward"] * _kl(parts, supply, penalty)
    if penalty is not None and penalty_NT is not None and penalty.credit == "trajectory":
        supply["token_rewards_NT"] = supply["token_rewards_NT"] - penalty_NT
        supply["rewards_N"] = shaped_N - penalty_NT.sum(1)

    advantages_NT, returns_NT = _advantages(batch, parts.advantage, supply, earlier)
    if penalty is not None and penalty_NT is not None and penalty.credit != "trajectory":
        advantages_NT = advantages_NT - (to_go(penalty_NT) if penalty.credit == "to_go" else penalty_NT)
    returns_by_prompt = {} if earlier is None else _by_prompt(batch, supply["rewards_N"])
    # Whether a group's rewards differ is asked of its rewards alone: with a KL taken off they always would.
    supply["rewards_N"] = shaped_N
    counted_NT, gradient_NT, is_kept_N = _filtered(batch, parts, supply)
    for step in parts.advantage_shaping:
        advantages_NT = step.with_given(
            supply | {"advantages_NT": advantages_NT, "loss_mask_NT": mask_NT & is_kept_N[:, None]}
        )
    advantages_NT = masked(advantages_NT.double(), loss_mask_BT=mask_NT)
    if not bool(torch.isfinite(advantages_NT).all()):
        raise DataError(_why_not_finite(batch, parts.advantage, advantages_NT))

    if parts.config.value is not None:
        if returns_NT is None:
            returns_NT = cumulative_returns(supply["token_rewards_NT"], loss_mask_NT=mask_NT)
        if "returns" in moments and bool(is_kept_N.any()):
            moments["returns"] = moments["returns"].update(returns_NT[mask_NT & is_kept_N[:, None]])
    zero_variance_N, leads_group_N = _groups(shaped_N, batch.group_index_N)
    return Prepared(
        loss_mask_NT=mask_NT & is_kept_N[:, None],
        gradient_mask_NT=gradient_NT,
        denominator_mask_NT=counted_NT,
        advantages_NT=advantages_NT,
        rollout_logprobs_NT=supply["rollout_logprobs_NT"],
        lags_NT=supply["lags_NT"],
        correction_weights_NT=_corrections(parts, supply | {"advantages_NT": advantages_NT}, advantages_NT.dtype),
        proximal_logprobs_NT=supply["proximal_logprobs_NT"],
        starting_logprobs_NT=supply["starting_logprobs_NT"],
        reference_logprobs_NT=supply["reference_logprobs_NT"],
        values_NT=supply["values_NT"],
        returns_NT=None if returns_NT is None else returns_NT.double(),
        returns_by_prompt=returns_by_prompt,
        moments=moments,
        sampled_mask_NT=mask_NT,
        rewards_N=batch.rewards_N,
        shaped_rewards_N=shaped_N,
        is_kept_N=is_kept_N,
        zero_variance_N=zero_variance_N,
        leads_group_N=leads_group_N,
        completion_lengths_N=batch.completion_lengths_N,
        truncated_N=batch.truncated_N,
        wants_entropies=wants_entropies,
        kl_coefficients=kl_coefficients,
        supply=supply,
        **_of_an_update(parts, supply, advantages_NT, mask_NT=mask_NT & is_kept_N[:, None], denominator_NT=counted_NT),
    )


def mini_batch(prepared: Prepared, rows: list[int], *, parts: Parts, begins_step: bool) -> Prepared:
    """See `Objective.mini_batch`."""
    if rows == list(range(prepared.num_trajectories)):
        return replace(prepared, begins_step=begins_step)
    taken = prepared.rows(rows)
    index = torch.as_tensor(rows, dtype=torch.long, device=taken.loss_mask_NT.device)
    supply = {name: each[index] if isinstance(each, Tensor) else each for name, each in prepared.supply.items()}
    supply["columns"] = {name: column[index] for name, column in prepared.supply["columns"].items()}
    fixed = _of_an_update(
        parts, supply, taken.advantages_NT, mask_NT=taken.loss_mask_NT, denominator_NT=taken.denominator_mask_NT
    )
    return replace(taken, supply=supply, begins_step=begins_step, **fixed)


def _of_an_update(
    parts: Parts, supply: dict[str, Any], advantages_NT: Tensor, *, mask_NT: Tensor, denominator_NT: Tensor
) -> dict[str, Any]:
    """The fields of `Prepared` that depend on all trajectories of an update, and on no others."""
    covariances_NT = _covariances(parts, supply, advantages_NT, mask_NT)
    value_weights_NT = parts.value_aggregation and _weights(parts.value_aggregation, supply, mask_NT)
    return {
        "weights_NT": _weights(parts.aggregation, supply, mask_NT).to(advantages_NT.dtype),
        "policy_weights_NT": _weights(parts.aggregation, supply, denominator_NT).to(advantages_NT.dtype),
        "value_weights_NT": None if value_weights_NT is None else value_weights_NT.to(advantages_NT.dtype),
        "covariances_NT": covariances_NT,
        "batch_covariances_M": None if covariances_NT is None else covariances_NT[mask_NT],
        "newest_lag": _least(supply["lags_NT"][mask_NT]),
    }


def _least(lags_M: Tensor) -> int:
    return int(lags_M.min()) if lags_M.numel() else 0


def _refuse_missing(batch: BatchTensors, *, needs: frozenset[str], parts: Parts) -> None:
    if not batch.is_sampler_known:
        refuse_unknown_sampler(parts)
    of_the_batch = {"proximal_logprobs", "values"} & needs
    # A resumed run may have begun to monitor the reference: the steps that it learns again were recorded without it.
    of_the_batch |= {"reference_logprobs"} if parts.learn_from_reference else set()
    of_the_batch |= {"entropies"} if parts.asks("entropies_NT") else set()
    of_the_batch |= {"proximal_logprobs"} if "averaged_logprobs" in needs else set()
    for name in sorted(of_the_batch):
        if getattr(batch, f"{name}_NT") is None:
            raise DataError(
                f"the batch of policy version {batch.current_version} has no {name}, which this algorithm needs"
            )


def _supply(batch: BatchTensors) -> dict[str, Any]:
    """Per-token tensors, 0 outside the mask: cleaned once, here."""
    names = ("rollout_logprobs", "proximal_logprobs", "starting_logprobs", "reference_logprobs", "values", "entropies")
    per_token = {f"{name}_NT": getattr(batch, f"{name}_NT") for name in names}
    cleaned = {
        name: None if x is None else masked(x.double(), loss_mask_BT=batch.loss_mask_NT)
        for name, x in per_token.items()
    }
    lags_NT = torch.where(batch.loss_mask_NT, batch.current_version - batch.policy_versions_NT, 0)
    return cleaned | {
        "loss_mask_NT": batch.loss_mask_NT,
        "group_index_N": batch.group_index_N,
        "prompt_lengths_N": batch.prompt_lengths_N,
        "completion_lengths_N": batch.completion_lengths_N,
        "truncated_N": batch.truncated_N,
        "reward_components_NK": batch.reward_components_NK,
        "reward_component_names": batch.reward_component_names,
        "columns": {name: column.to(batch.rewards_N.device) for name, column in batch.columns.items()},
        "policy_versions_NT": batch.policy_versions_NT,
        "lags_NT": lags_NT,
    }


def _shaped(
    batch: BatchTensors, parts: Parts, supply: dict[str, Any], moments: Mapping[str, RunningMoments]
) -> tuple[Tensor, dict[str, RunningMoments]]:
    """Rewards after shaping, and the running moments with those in them that a step of it asks for."""
    shaped_N, after = at_least_float32(batch.rewards_N), dict(moments)
    for step in parts.reward_shaping:
        if step.field in after:
            after[step.field] = after[step.field].update(shaped_N)
        if not step.is_of_a_group:
            given = {"rewards_N": shaped_N, "reward_moments": after.get(step.field)}
            shaped_N = step.with_given(supply | given)
            continue
        by_group_N = torch.empty_like(shaped_N)
        for rows, group in group_rules.of_batch(replace(batch, rewards_N=shaped_N)):
            by_group_N[rows] = step.with_given(group).to(by_group_N)
        shaped_N = by_group_N
    return shaped_N, after


def _token_rewards(batch: BatchTensors, shaped_N: Tensor, *, placement: Literal["last_token", "every_token"]) -> Tensor:
    """Rewards per token. Where turns carry their own, the difference that shaping made is placed as a whole trajectory's reward is."""
    if batch.token_rewards_NT is None:
        return place_rewards(shaped_N, loss_mask_NT=batch.loss_mask_NT, placement=placement)
    own_NT = move_to_earner(batch.token_rewards_NT, loss_mask_NT=batch.loss_mask_NT)
    return own_NT + place_rewards(shaped_N - batch.rewards_N, loss_mask_NT=batch.loss_mask_NT, placement=placement)


def _acting(parts: Parts, supply: dict[str, Any]) -> Tensor:
    """Log-probs of π_old where they are known; else, and where π_old is an average, which never acts, of the rollout policy."""
    proximal_NT, is_average = supply["proximal_logprobs_NT"], parts.config.proximal == "ewma"
    return supply["rollout_logprobs_NT"] if proximal_NT is None or is_average else proximal_NT


def _kl(parts: Parts, supply: dict[str, Any], penalty: KlRewardConfig) -> Tensor:
    """To the reference, per token."""
    return kl.ESTIMATORS[penalty.estimator](
        _acting(parts, supply),
        other_logprobs_BT=supply["reference_logprobs_NT"],
        loss_mask_BT=supply["loss_mask_NT"],
        log_ratio_clamp=penalty.log_ratio_clamp,
    )


def _advantages(
    batch: BatchTensors, advantage: Variant, supply: dict[str, Any], earlier: EarlierReturns | None
) -> tuple[Tensor, Tensor | None]:
    """Advantages per token, and the returns that came with them."""
    if "rewards_G" in advantage.asks:
        result = _per_group(batch, advantage, supply, earlier)
    else:
        try:
            result = advantage.with_given(supply)
        except ValueError as error:
            raise DataError(
                f"advantage {advantage.plugin.name!r} of {len(batch.trajectory_ids)} trajectories: {error}"
            ) from error
    advantages, returns_NT = result if isinstance(result, tuple) else (result, None)
    per_token_NT = advantages if advantages.dim() == 2 else advantages[:, None].expand(batch.loss_mask_NT.shape)
    return masked(per_token_NT, loss_mask_BT=batch.loss_mask_NT), returns_NT


def _why_not_finite(batch: BatchTensors, advantage: Variant, advantages_NT: Tensor) -> str:
    """Names a trajectory that lacks a component the advantage asks for (its NaN reaches the whole group), else the first that is wrong."""
    components_NK = batch.reward_components_NK
    if components_NK is not None and "reward_components_NK" in advantage.asks and bool(components_NK.isnan().any()):
        row, component = components_NK.isnan().nonzero()[0].tolist()
        lacking = f"lacks the reward component {batch.reward_component_names[component]!r}"
        return f"{batch.name(row)} {lacking}, and advantage {advantage.plugin.name!r} is not made for missing ones"
    row = int((~torch.isfinite(advantages_NT)).any(1).nonzero()[0])
    return f"{batch.name(row)}: advantages are not finite; {advantage.plugin.name!r} cannot take these rewards"


def _per_group(
    batch: BatchTensors, advantage: Variant, supply: dict[str, Any], earlier: EarlierReturns | None
) -> Tensor:
    rewards_N = supply["rewards_N"]
    result_N = torch.empty_like(rewards_N)
    index_N = batch.group_index_N if earlier is None else _prompt_index(batch)
    for rows in sorted_group_rows(rewards_N, group_index_N=index_N):
        own_G = rewards_N[rows]
        group_G = own_G if earlier is None else earlier.joined(own_G, prompt_id=batch.prompt_ids[int(rows[0])])
        try:
            advantages_G = advantage.with_given(supply | {"rewards_G": group_G})
            result_N[rows] = advantages_G[: len(rows)].to(result_N.dtype)
        except ValueError as error:
            members = ", ".join(batch.trajectory_ids[row] for row in rows.tolist())
            group = batch.group_ids[int(rows[0])]
            raise DataError(f"group {group} (trajectory {members}): rewards: {error}") from error
    return result_N


def _prompt_index(batch: BatchTensors) -> Tensor:
    places = {prompt_id: place for place, prompt_id in enumerate(dict.fromkeys(batch.prompt_ids))}
    return torch.tensor([places[prompt_id] for prompt_id in batch.prompt_ids], device=batch.group_index_N.device)


def _by_prompt(batch: BatchTensors, rewards_N: Tensor) -> dict[str, list[float]]:
    returns: dict[str, list[float]] = {}
    for prompt_id, value in zip(batch.prompt_ids, rewards_N.tolist(), strict=True):
        returns.setdefault(prompt_id, []).append(value)
    return returns


def _filtered(batch: BatchTensors, parts: Parts, supply: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of the policy loss's denominator, tokens with policy gradient, trajectories kept."""
    denominator_NT, gradient_NT = batch.loss_mask_NT, batch.loss_mask_NT
    is_kept_N = torch.ones_like(batch.truncated_N, dtype=torch.bool)
    for rows, group in group_rules.of_batch(batch):
        is_kept_N[rows] = group_rules.dropped_by(group, parts=parts) is None
    for chosen in parts.filters:
        if chosen.is_of_a_group:
            continue
        result = chosen.with_given(supply)
        if isinstance(result, Selection):
            gradient_NT, denominator_NT = gradient_NT & result.gradient_NT, denominator_NT & result.denominator_NT
        elif result.dim() == 2:
            gradient_NT = gradient_NT & result
        else:
            is_kept_N = is_kept_N & result
    return denominator_NT & is_kept_N[:, None], gradient_NT & is_kept_N[:, None], is_kept_N


def _weights(aggregation: Variant, supply: dict[str, Any], denominator_NT: Tensor) -> Tensor:
    return aggregation.with_given(supply | {"loss_mask_NT": denominator_NT})


def _groups(rewards_N: Tensor, group_index_N: Tensor) -> tuple[Tensor, Tensor]:
    zero_variance_N = torch.zeros_like(group_index_N, dtype=torch.bool)
    leads_N = torch.zeros_like(group_index_N, dtype=torch.bool)
    for rows in group_rows(group_index_N):
        zero_variance_N[rows] = all_equal(rewards_N[rows])
        leads_N[rows[0]] = True
    return zero_variance_N, leads_N


def _corrections(parts: Parts, supply: dict[str, Any], dtype: torch.dtype) -> Tensor:
    weights_NT = torch.ones_like(supply["loss_mask_NT"], dtype=dtype)
    for correction in parts.corrections:
        if correction.is_of_the_batch:
            weights_NT = weights_NT * correction.with_given(supply).to(dtype)
    return weights_NT


def _covariances(parts: Parts, supply: dict[str, Any], advantages_NT: Tensor, mask_NT: Tensor) -> Tensor | None:
    if not parts.asks("covariances_BT"):
        return None
    return covariances(_acting(parts, supply), advantages_NT=advantages_NT, loss_mask_NT=mask_NT)
