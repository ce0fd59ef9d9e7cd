"""The statistics of a micro-batch. Names and meanings: `statistics.QUANTITIES`. Shapes: B rows, T tokens."""

import torch
from torch import Tensor

from learner.algorithms.losses.surrogates import TokenLosses
from learner.algorithms.masks import masked
from learner.algorithms.objective.batch import Prepared
from learner.algorithms.objective.statistics import Recorder


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
    for suffix in ("low", "high", "dual"):
        clipped_BT = getattr(policy_losses, f"clipped_{suffix}_BT")
        if clipped_BT is not None:
            recorder.record(f"clip_fraction_{suffix}", clipped_BT, mask_BT)
    if policy_losses.clipped_low_BT is not None or policy_losses.clipped_high_BT is not None:
        recorder.record("clip_fraction", policy_losses.clipped_BT, mask_BT)
    recorder.record("correction_weight", corrections_BT, rows.gradient_mask_NT)
    recorder.record("correction_dropped", corrections_BT == 0, rows.gradient_mask_NT)
    recorder.record("filtered_tokens", ~rows.gradient_mask_NT, rows.sampled_mask_NT)
    recorder.record("advantage", rows.advantages_NT, mask_BT)
    recorder.record("policy_logprob", policy_BT, mask_BT)
    recorder.record("policy_logprob_positive", policy_BT, mask_BT & (rows.advantages_NT > 0))
    recorder.record("policy_logprob_negative", policy_BT, mask_BT & (rows.advantages_NT < 0))
    recorder.record("rollout_logprob", rows.rollout_logprobs_NT, mask_BT)
    if entropies_BT is not None:
        recorder.record("entropy", entropies_BT, mask_BT)
    if values_BT is not None and rows.returns_NT is not None and rows.values_NT is not None:
        recorder.record("value", values_BT, mask_BT)
        recorder.record("return", rows.returns_NT, mask_BT)
        recorder.record("value_error", rows.returns_NT - rows.values_NT, mask_BT)
    if value_losses is not None and value_losses.clipped_low_BT is not None:
        recorder.record("value_clip_fraction", value_losses.clipped_BT, mask_BT)
    _record_trajectories(recorder, rows)


def _record_ratios(recorder: Recorder, rows: Prepared, *, policy_BT: Tensor, proximal_BT: Tensor) -> None:
    mask_BT = rows.loss_mask_NT
    kept_BT = masked(policy_BT, loss_mask_BT=mask_BT).double()
    old_BT = kept_BT - masked(proximal_BT, loss_mask_BT=mask_BT)
    recorder.record("ratio", old_BT.exp(), mask_BT)
    recorder.record("ratio_outside", (old_BT.exp() - 1).abs() > 0.2, mask_BT)
    recorder.record("kl_old_k1", -old_BT, mask_BT)
    recorder.record("kl_old_k3", torch.expm1(old_BT) - old_BT, mask_BT)
    rollout_BT = kept_BT - masked(rows.rollout_logprobs_NT, loss_mask_BT=mask_BT)
    recorder.record("kl_rollout_k1", -rollout_BT, mask_BT)
    recorder.record("kl_rollout_k3", torch.expm1(rollout_BT) - rollout_BT, mask_BT)
    recorder.record("importance_weight", rollout_BT.exp(), mask_BT)
    newest_BT = mask_BT & (rows.lags_NT == rows.newest_lag)
    recorder.record("mismatch", rollout_BT.abs(), newest_BT)
    recorder.record("mismatch_off_policy_steps", rows.lags_NT, newest_BT)
    if rows.reference_logprobs_NT is not None:
        reference_BT = kept_BT - masked(rows.reference_logprobs_NT, loss_mask_BT=mask_BT)
        recorder.record("reference_logprob", rows.reference_logprobs_NT, mask_BT)
        recorder.record("kl_reference_k1", reference_BT, mask_BT)
        recorder.record("kl_reference_k3", torch.expm1(-reference_BT) + reference_BT, mask_BT)
        recorder.record("kl_reference_per_trajectory", reference_BT.sum(1), rows.is_kept_N)


def _record_trajectories(recorder: Recorder, rows: Prepared) -> None:
    recorder.record("reward", rows.rewards_N)
    recorder.record("shaped_reward", rows.shaped_rewards_N)
    recorder.record("completion_length", rows.completion_lengths_N)
    recorder.record("truncated", rows.truncated_N)
    recorder.record("off_policy_steps", rows.lags_NT, rows.sampled_mask_NT)
    recorder.record("groups", rows.leads_group_N)
    recorder.record("groups_without_variance", rows.leads_group_N & rows.zero_variance_N)
    recorder.record("trajectories", torch.ones_like(rows.is_kept_N))
    recorder.record("trajectories_filtered", ~rows.is_kept_N)
    recorder.record("tokens", rows.sampled_mask_NT)
