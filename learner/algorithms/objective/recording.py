"""Records the statistics of a micro-batch, and those of the batch that no update changes. Names and meanings: `statistics.QUANTITIES`.

Shapes: N trajectories of the step, B rows of a micro-batch, T tokens.
"""

import torch
from torch import Tensor

from learner.algorithms.groups import all_equal, group_rows
from learner.algorithms.losses.surrogates import TokenLosses, unclipped_surrogate
from learner.algorithms.masks import expm1_minus, masked
from learner.algorithms.objective.batch import Prepared
from learner.algorithms.objective.seen import counted_as_clipped
from learner.algorithms.objective.statistics import Recorder, Statistics


@torch.no_grad()
def record(
    recorder: Recorder,
    rows: Prepared,
    *,
    policy_BT: Tensor,
    proximal_BT: Tensor,
    entropies_BT: Tensor | None,
    values_BT: Tensor | None,
    policy_losses: TokenLosses,
    value_losses: TokenLosses | None,
    corrections_BT: Tensor,
    losses: dict[str, Tensor],
) -> None:
    mask_BT = rows.loss_mask_NT
    for name, loss in losses.items():
        recorder.total(name, loss)
    _record_ratios(recorder, rows, policy_BT=policy_BT, proximal_BT=proximal_BT)
    has_loss_BT = rows.advantages_NT != 0
    for suffix in ("low", "high", "dual", "covariance"):
        clipped_BT = getattr(policy_losses, f"clipped_{suffix}_BT")
        if clipped_BT is not None:
            recorder.record(f"clip_fraction_{suffix}", clipped_BT & has_loss_BT, mask_BT)
    if (clipped_BT := counted_as_clipped(policy_losses, advantages_BT=rows.advantages_NT)) is not None:
        recorder.record("clip_fraction", clipped_BT, mask_BT)
    recorder.record("correction_weight", corrections_BT, rows.gradient_mask_NT)
    recorder.record("correction_dropped", corrections_BT == 0, rows.gradient_mask_NT)
    recorder.record("bounded_surrogate", -policy_losses.losses_BT, mask_BT)
    recorder.record("policy_logprob", policy_BT, mask_BT)
    recorder.record("policy_logprob_positive", policy_BT, mask_BT & (rows.advantages_NT > 0))
    recorder.record("policy_logprob_negative", policy_BT, mask_BT & (rows.advantages_NT < 0))
    if entropies_BT is not None:
        recorder.record("entropy", entropies_BT, mask_BT)
    if values_BT is not None:
        recorder.record("value", values_BT, mask_BT)
    if value_losses is not None and value_losses.clipped_low_BT is not None:
        recorder.record("value_clip_fraction", value_losses.clipped_BT, mask_BT)


def _record_ratios(recorder: Recorder, rows: Prepared, *, policy_BT: Tensor, proximal_BT: Tensor) -> None:
    mask_BT = rows.loss_mask_NT
    kept_BT = masked(policy_BT, mask_BT=mask_BT).double()
    old_BT = kept_BT - masked(proximal_BT, mask_BT=mask_BT)
    recorder.record("ratio", old_BT.exp(), mask_BT)
    recorder.record("surrogate", -unclipped_surrogate(old_BT, advantages_BT=rows.advantages_NT), mask_BT)
    recorder.record("ratio_outside", (old_BT.exp() - 1).abs() > 0.2, mask_BT)
    recorder.record("kl_old_k1", -old_BT, mask_BT)
    recorder.record("kl_old_k3", expm1_minus(old_BT), mask_BT)
    if rows.batch.starting_logprobs_NT is not None:
        moved_BT = kept_BT - masked(rows.batch.starting_logprobs_NT, mask_BT=mask_BT)
        recorder.record("kl_step_k3", expm1_minus(moved_BT), mask_BT)
    rollout_BT = kept_BT - masked(rows.batch.rollout_logprobs_NT, mask_BT=mask_BT)
    recorder.record("kl_rollout_k1", -rollout_BT, mask_BT)
    recorder.record("kl_rollout_k3", expm1_minus(rollout_BT), mask_BT)
    recorder.record("importance_weight", rollout_BT.exp(), mask_BT)
    recorder.record("trajectory_weight", rollout_BT.sum(1).clamp(-100, 100).exp(), rows.is_kept_N)
    if rows.begins_step:
        newest_BT = mask_BT & (rows.batch.lags_NT == rows.newest_lag)
        recorder.record("mismatch", rollout_BT.abs(), newest_BT)
        recorder.record("mismatch_off_policy_steps", rows.batch.lags_NT, newest_BT)
    if rows.batch.reference_logprobs_NT is not None:
        mask_BT = mask_BT & ~rows.batch.reference_logprobs_NT.isnan()
        reference_BT = kept_BT - masked(rows.batch.reference_logprobs_NT, mask_BT=mask_BT)
        recorder.record("ratio_reference", (-reference_BT).exp(), mask_BT)
        recorder.record("ratio_reference_old", (old_BT - reference_BT).exp(), mask_BT)
        recorder.record("kl_reference_k1", reference_BT, mask_BT)
        recorder.record("kl_reference_k3", expm1_minus(-reference_BT), mask_BT)
        recorder.record("kl_reference_per_trajectory", reference_BT.sum(1), mask_BT.any(1))


def of_the_batch(prepared: Prepared) -> Statistics:
    batch, mask_NT, recorder = prepared.batch, prepared.loss_mask_NT, Recorder(prepared.loss_mask_NT.device)
    recorder.record("filtered_tokens", ~prepared.gradient_mask_NT, batch.loss_mask_NT)
    recorder.record("advantage", prepared.advantages_NT, mask_NT)
    recorder.record("rollout_logprob", batch.rollout_logprobs_NT, mask_NT)
    if batch.reference_logprobs_NT is not None:
        is_scored_NT = ~batch.reference_logprobs_NT.isnan()
        recorder.record("reference_logprob", batch.reference_logprobs_NT, mask_NT & is_scored_NT)
    if prepared.returns_NT is not None and batch.values_NT is not None:
        recorder.record("return", prepared.returns_NT, mask_NT)
        recorder.record("value_error", prepared.returns_NT - batch.values_NT, mask_NT)
    recorder.record("reward", batch.rewards_N)
    recorder.record("shaped_reward", prepared.shaped_rewards_N)
    if batch.token_rewards_NT is not None:
        recorder.record("trajectory_return", batch.token_rewards_NT.sum(1))
    recorder.record("completion_length", batch.completion_lengths_N)
    if batch.prompt_lengths_N is not None:
        recorder.record("prompt_length", batch.prompt_lengths_N)
        recorder.record("length", batch.prompt_lengths_N + batch.completion_lengths_N)
    recorder.record("truncated", batch.truncated_N)
    recorder.record("off_policy_steps", batch.lags_NT, batch.loss_mask_NT)
    rewards_N, groups = prepared.shaped_rewards_N, group_rows(batch.group_index_N)
    recorder.total("groups", rewards_N.new_tensor(len(groups)))
    num_equal = sum(all_equal(rewards_N[rows]) for rows in groups)
    recorder.total("groups_without_variance", rewards_N.new_tensor(num_equal))
    recorder.record("trajectories", torch.ones_like(prepared.is_kept_N))
    recorder.record("trajectories_filtered", ~prepared.is_kept_N)
    recorder.record("tokens", batch.loss_mask_NT)
    return recorder.statistics()
