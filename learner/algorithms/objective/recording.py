"""The loss's numbers of each token, and the statistics made of them. Names and meanings of these: `statistics.QUANTITIES`.

Shapes: N trajectories of the step, B rows of a micro-batch, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.algorithms.groups import all_equal, group_rows
from learner.algorithms.losses.surrogates import TokenLosses, unclipped_surrogate
from learner.algorithms.masks import expm1_minus, masked
from learner.algorithms.objective.batch import Prepared
from learner.algorithms.objective.statistics import Recorder, Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSeen:
    """Tensors that the loss of a micro-batch computes anyway. Only `columns` takes time."""

    rows: Prepared
    policy_BT: Tensor
    proximal_BT: Tensor
    has_own_proximal: bool
    """False if π_old is the policy that sampled, or the present one."""
    corrections_BT: Tensor
    losses: TokenLosses
    entropies_BT: Tensor | None

    @property
    def clipped_BT(self) -> Tensor | None:
        """bool; None if the loss has neither a lower nor an upper bound. Tokens with advantage 0 do not count: no bound changes their
        loss."""
        if self.losses.clipped_low_BT is None and self.losses.clipped_high_BT is None:
            return None
        return self.losses.clipped_BT & (self.rows.advantages_NT != 0)

    @torch.no_grad()
    def columns(self) -> dict[str, Tensor]:
        """[B, T] by column of the record of learning; absent columns are left out. Arbitrary where the loss mask is false."""
        nothing_BT = torch.zeros_like(self.corrections_BT)
        found = {
            "policy_logprobs": self.policy_BT,
            "proximal_logprobs": self.proximal_BT if self.has_own_proximal else None,
            "advantages": self.rows.advantages_NT,
            "weights": torch.where(self.rows.gradient_mask_NT, self.corrections_BT, nothing_BT),
            "clipped": self.clipped_BT,
            "entropies": self.entropies_BT,
        }
        return {name: x_BT for name, x_BT in found.items() if x_BT is not None}


@torch.no_grad()
def record(
    recorder: Recorder,
    seen: TokensSeen,
    *,
    values_BT: Tensor | None,
    value_losses: TokenLosses | None,
    losses: dict[str, Tensor],
) -> None:
    """Records the statistics of a micro-batch. `losses`: its terms, by quantity."""
    rows, mask_BT = seen.rows, seen.rows.loss_mask_NT
    for name, loss in losses.items():
        recorder.total(name, loss)
    _record_ratios(recorder, seen)
    has_loss_BT = rows.advantages_NT != 0
    for suffix in ("low", "high", "dual", "covariance"):
        clipped_BT = getattr(seen.losses, f"clipped_{suffix}_BT")
        if clipped_BT is not None:
            recorder.record(f"clip_fraction_{suffix}", clipped_BT & has_loss_BT, mask_BT)
    if (clipped_BT := seen.clipped_BT) is not None:
        recorder.record("clip_fraction", clipped_BT, mask_BT)
    recorder.record("correction_weight", seen.corrections_BT, rows.gradient_mask_NT)
    recorder.record("correction_dropped", seen.corrections_BT == 0, rows.gradient_mask_NT)
    recorder.record("bounded_surrogate", -seen.losses.losses_BT, mask_BT)
    recorder.record("policy_logprob", seen.policy_BT, mask_BT)
    recorder.record("policy_logprob_positive", seen.policy_BT, mask_BT & (rows.advantages_NT > 0))
    recorder.record("policy_logprob_negative", seen.policy_BT, mask_BT & (rows.advantages_NT < 0))
    if seen.entropies_BT is not None:
        recorder.record("entropy", seen.entropies_BT, mask_BT)
    if values_BT is not None:
        recorder.record("value", values_BT, mask_BT)
    if value_losses is not None and value_losses.clipped_low_BT is not None:
        recorder.record("value_clip_fraction", value_losses.clipped_BT, mask_BT)


def _record_ratios(recorder: Recorder, seen: TokensSeen) -> None:
    rows, mask_BT = seen.rows, seen.rows.loss_mask_NT
    kept_BT = masked(seen.policy_BT, mask_BT=mask_BT).double()
    old_BT = kept_BT - masked(seen.proximal_BT, mask_BT=mask_BT)
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
    if rows.begins_step and rows.first_logprobs_NT is None:
        _record_mismatch(recorder, rows, rollout_BT)
    if rows.batch.reference_logprobs_NT is not None:
        mask_BT = mask_BT & ~rows.batch.reference_logprobs_NT.isnan()
        reference_BT = kept_BT - masked(rows.batch.reference_logprobs_NT, mask_BT=mask_BT)
        recorder.record("ratio_reference", (-reference_BT).exp(), mask_BT)
        recorder.record("ratio_reference_old", (old_BT - reference_BT).exp(), mask_BT)
        recorder.record("kl_reference_k1", reference_BT, mask_BT)
        recorder.record("kl_reference_k3", expm1_minus(-reference_BT), mask_BT)
        recorder.record("kl_reference_per_trajectory", reference_BT.sum(1), mask_BT.any(1))


def _record_mismatch(recorder: Recorder, rows: Prepared, ratios_NT: Tensor) -> None:
    """`ratios_NT`: log π/μ, with π the policy at the start of the step."""
    newest_NT = rows.loss_mask_NT & (rows.batch.lags_NT == rows.newest_lag)
    recorder.record("mismatch", ratios_NT.abs(), newest_NT)
    recorder.record("mismatch_off_policy_steps", rows.batch.lags_NT, newest_NT)


def of_the_batch(prepared: Prepared) -> Statistics:
    """Statistics of the step's batch, which no update changes."""
    batch, mask_NT, recorder = prepared.batch, prepared.loss_mask_NT, Recorder(prepared.loss_mask_NT.device)
    recorder.record("filtered_tokens", ~prepared.gradient_mask_NT, batch.loss_mask_NT)
    recorder.record("advantage", prepared.advantages_NT, mask_NT)
    recorder.record("rollout_logprob", batch.rollout_logprobs_NT, mask_NT)
    if prepared.first_logprobs_NT is not None:
        _record_mismatch(recorder, prepared, prepared.first_logprobs_NT - batch.rollout_logprobs_NT)
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
