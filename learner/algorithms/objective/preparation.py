"""Prepares a batch, in this order: rewards and advantages (`crediting`), filters, advantage shaping, weights.

Filters do not see advantages. Advantage shaping sees the tokens of the trajectories that filters kept, those without policy gradient
included. Weights belong to one update: `mini_batch` computes them anew for the trajectories that it takes out of a step.
Shapes: N trajectories, T tokens, M all loss tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cluster.contracts.errors import DataError
from learner.algorithms.advantages.returns import cumulative_returns
from learner.algorithms.batch_rules.filters import Selection
from learner.algorithms.losses.covariance import covariances
from learner.algorithms.masks import masked
from learner.algorithms.moments import RunningMoments
from learner.algorithms.objective import group_rules
from learner.algorithms.objective.batch import BatchTensors, Prepared
from learner.algorithms.objective.checks import refuse_unknown_sampler
from learner.algorithms.objective.crediting import acting_logprobs, credited, refuse_not_finite, shaped
from learner.algorithms.objective.parts import Parts, choice
from learner.algorithms.objective.streaming import EarlierReturns
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
    batch = _in_reward_units(batch.cleaned(), moments)
    shaped_N, moments = shaped(batch, parts, moments)
    credit = credited(batch, parts, shaped_N=shaped_N, kl_coefficients=kl_coefficients, earlier=earlier)
    batch = replace(batch, token_rewards_NT=credit.token_rewards_NT)
    # Filters see rewards before the KL is subtracted: with it the rewards of a group always differ.
    offered = batch.offered(rewards_N=shaped_N)
    denominator_NT, gradient_NT, is_kept_N = _filtered(batch, parts, offered)
    mask_NT = batch.loss_mask_NT & is_kept_N[:, None]
    advantages_NT = credit.advantages_NT
    for step in parts.advantage_shaping:
        shaped_NT = step.with_given(offered | {"advantages_NT": advantages_NT, "loss_mask_NT": mask_NT})
        advantages_NT = step.tensor(shaped_NT, mask_NT.shape)
    advantages_NT = masked(advantages_NT.double(), mask_BT=batch.loss_mask_NT)
    refuse_not_finite(batch, parts, advantages_NT)
    returns_NT = credit.returns_NT
    if parts.config.value is not None and returns_NT is None:
        returns_NT = cumulative_returns(credit.token_rewards_NT, loss_mask_NT=batch.loss_mask_NT)
    if returns_NT is not None and "returns" in moments:
        moments["returns"] = moments["returns"].update(returns_NT[mask_NT])
    return Prepared(
        batch=batch,
        shaped_rewards_N=shaped_N,
        loss_mask_NT=mask_NT,
        gradient_mask_NT=gradient_NT,
        denominator_mask_NT=denominator_NT,
        advantages_NT=advantages_NT,
        returns_NT=None if returns_NT is None else returns_NT.double(),
        first_logprobs_NT=_first_logprobs(batch, needs),
        correction_weights_NT=parts.corrected(
            torch.ones_like(advantages_NT),
            offered | {"advantages_NT": advantages_NT, "loss_mask_NT": mask_NT},
            of_the_batch=True,
        ),
        is_kept_N=is_kept_N,
        returns_by_prompt=credit.returns_by_prompt,
        moments=moments,
        wants_entropies=wants_entropies,
        kl_coefficients=kl_coefficients,
        **_of_an_update(parts, batch, offered, advantages_NT, mask_NT=mask_NT, denominator_NT=denominator_NT),
    )


def mini_batch(prepared: Prepared, rows: list[int], *, parts: Parts, begins_step: bool) -> Prepared:
    """See `Objective.mini_batch`."""
    if rows == list(range(len(prepared.shaped_rewards_N))):
        return replace(prepared, begins_step=begins_step)
    taken = prepared.rows(rows)
    offered = taken.batch.offered(rewards_N=taken.shaped_rewards_N)
    masks = {"mask_NT": taken.loss_mask_NT, "denominator_NT": taken.denominator_mask_NT}
    fixed = _of_an_update(parts, taken.batch, offered, taken.advantages_NT, **masks)
    return replace(taken, begins_step=begins_step, **fixed)


def _first_logprobs(batch: BatchTensors, needs: frozenset[str]) -> Tensor | None:
    if batch.starting_logprobs_NT is None and "proximal_logprobs" in needs and "averaged_logprobs" not in needs:
        return batch.proximal_logprobs_NT
    return batch.starting_logprobs_NT


def _of_an_update(
    parts: Parts,
    batch: BatchTensors,
    offered: dict[str, Any],
    advantages_NT: Tensor,
    *,
    mask_NT: Tensor,
    denominator_NT: Tensor,
) -> dict[str, Any]:
    """The fields of `Prepared` that depend on all trajectories of an update, and on no others."""

    def weights(aggregation: Variant, counted_NT: Tensor) -> Tensor:
        weights_NT = aggregation.with_given(offered | {"loss_mask_NT": counted_NT})
        return aggregation.tensor(weights_NT, counted_NT.shape).to(advantages_NT.dtype)

    covariances_NT, lags_M = None, batch.lags_NT[mask_NT]
    if parts.asks("covariances_BT", "batch_covariances_M"):
        # `approximate` has no π_old before an update's pass: the policy at the start of the step ranks tokens.
        has_none = parts.config.proximal == "approximate"
        ranking_NT = batch.proximal_logprobs_NT if has_none else acting_logprobs(batch, parts)
        assert ranking_NT is not None, "prepare() refuses a batch without them"
        covariances_NT = covariances(ranking_NT, advantages_NT=advantages_NT, loss_mask_NT=mask_NT)
    return {
        "weights_NT": weights(parts.aggregation, mask_NT),
        "policy_weights_NT": weights(parts.aggregation, denominator_NT),
        "value_weights_NT": parts.value_aggregation and weights(parts.value_aggregation, mask_NT),
        "covariances_NT": covariances_NT,
        "batch_covariances_M": None if covariances_NT is None else covariances_NT[mask_NT],
        "newest_lag": int(lags_M.min()) if lags_M.numel() else 0,
    }


def _refuse_missing(batch: BatchTensors, *, needs: frozenset[str], parts: Parts) -> None:
    if not batch.is_sampler_known:
        refuse_unknown_sampler(parts)
    of_the_batch = {"proximal_logprobs", "values", "reference_partition"} & needs
    # A resumed run may have begun to monitor the reference: steps that it learns again were recorded without it.
    of_the_batch |= {"reference_logprobs"} if parts.learn_from_reference else set()
    of_the_batch |= {"entropies"} if parts.asks("entropies_NT") else set()
    of_the_batch |= {"proximal_logprobs"} if "averaged_logprobs" in needs else set()
    for name in sorted(of_the_batch):
        if getattr(batch, f"{name}_NTP" if name == "reference_partition" else f"{name}_NT") is None:
            raise DataError(
                f"the batch of policy version {batch.current_version} has no {name}, which this algorithm needs"
            )


def _in_reward_units(batch: BatchTensors, moments: Mapping[str, RunningMoments]) -> BatchTensors:
    if "returns" not in moments or batch.values_NT is None:
        return batch
    values_NT = masked(moments["returns"].restore(batch.values_NT), mask_BT=batch.loss_mask_NT)
    return replace(batch, values_NT=values_NT)


def _filtered(batch: BatchTensors, parts: Parts, offered: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the tokens in the policy loss's denominator, of the tokens with policy gradient, and of the kept trajectories."""
    denominator_NT, gradient_NT = batch.loss_mask_NT, batch.loss_mask_NT
    is_kept_N = torch.ones_like(batch.truncated_N, dtype=torch.bool)
    of_rows, of_all_tokens = is_kept_N.shape, gradient_NT.shape
    for rows, group in group_rules.of_batch(batch):
        dropped_by = group_rules.dropped_by(group, parts=parts)
        if dropped_by is not None and dropped_by.is_own:
            raise DataError(
                f"group {batch.group_ids[int(rows[0])]}: algorithm.{dropped_by.field}={dropped_by.plugin.name!r} kept it in the cluster, "
                "and drops it in the learner; it must answer the same to the same tensors, without random numbers or memory of other calls"
            )
        is_kept_N[rows] = dropped_by is None
    of_tokens: list[tuple[Variant, Tensor | Selection]] = []
    for chosen in parts.filters:
        if chosen.is_of_a_group:
            continue
        result = choice(chosen, chosen.with_given(offered), of_rows, of_all_tokens)
        if isinstance(result, Selection) or result.dim() == 2:
            of_tokens.append((chosen, result))
        else:
            is_kept_N = is_kept_N & result
    # Filters of tokens choose among the tokens of the kept trajectories.
    remaining = offered | {"loss_mask_NT": batch.loss_mask_NT & is_kept_N[:, None]}
    all_stay = bool(is_kept_N.all())
    for chosen, of_all in of_tokens:
        result = of_all if all_stay else choice(chosen, chosen.with_given(remaining), of_all_tokens)
        if isinstance(result, Selection):
            gradient_NT, denominator_NT = gradient_NT & result.gradient_NT, denominator_NT & result.denominator_NT
        else:
            gradient_NT = gradient_NT & result
    return denominator_NT & is_kept_N[:, None], gradient_NT & is_kept_N[:, None], is_kept_N
