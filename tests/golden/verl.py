"""verl 0.9.1: core_algos, torch_functional and the rollout correction. KL and value loss here, the rest in the files beside."""

from typing import Any

import torch
from torch import Tensor

from learner.algorithms import kl, masks
from learner.algorithms.losses import values
from tests.golden import peer_parts, updates, verl_advantages, verl_policy, verl_rollout
from tests.golden.cases import Variant
from tests.golden.kl_controllers import adaptive_kl, fixed_kl
from tests.golden.through_objective import aggregated
from tests.golden.verl_policy import AGGREGATIONS, CLAMP, mean, refuse_nothing


def kl_penalty(v: Variant) -> dict[str, Any]:
    kind = v.option("kl_penalty")
    v.only("loss_for_grad", "sum(kl*mask)")
    given = {"other_logprobs_BT": v["ref_log_probs"], "loss_mask_BT": torch.ones_like(v.mask())}
    value = _kl_value(v["log_probs"], kind.removesuffix("+"), given)
    if kind.endswith("+"):
        value = peer_parts.straight_through(value, gradient_BT=kl.k2(v["log_probs"], **given))
    return {"kl": value, "loss": masks.masked_sum(value, mask_BT=v.mask())}


def _kl_value(policy_BT: Tensor, kind: str, given: dict[str, Any]) -> Tensor:
    if kind in ("k3", "low_var_kl"):
        return kl.k3(policy_BT, **given, log_ratio_clamp=CLAMP).clamp(-10, 10)
    return {"k1": kl.k1, "kl": kl.k1, "abs": peer_parts.absolute, "k2": kl.k2, "mse": kl.k2}[kind](policy_BT, **given)


def compute_rewards(v: Variant) -> dict[str, Any]:
    everything = torch.ones_like(v.mask())
    estimate = kl.k1(v["old_log_probs"], other_logprobs_BT=v["ref_log_probs"], loss_mask_BT=everything)
    return {"rewards": v["token_rewards"] - v.option("kl_ratio") * estimate}


def value_loss(v: Variant) -> dict[str, Any]:
    mask = v.mask()
    refuse_nothing(mask, "token-mean")
    result = values.value_clip(
        v["values"],
        old_values_BT=v["old_values"],
        returns_BT=v["returns"],
        loss_mask_BT=mask,
        clip_range=v.option("cliprange_value"),
    )
    return {
        "loss": aggregated(result.losses_BT, AGGREGATIONS["token-mean"], mask),
        "vf_clipfrac": mean(result.clipped_BT, mask),
    }


_LOSS = "verl.trainer.ppo.core_algos.compute_policy_loss_"
ADAPTERS = {
    f"{_LOSS}vanilla": verl_policy.vanilla,
    f"{_LOSS}dppo_tv": verl_policy.dppo_tv,
    f"{_LOSS}dppo_kl": verl_policy.dppo_kl,
    f"{_LOSS}gspo": verl_policy.gspo,
    f"{_LOSS}sapo": verl_policy.sapo,
    f"{_LOSS}gpg": verl_policy.gpg,
    f"{_LOSS}clip_cov": verl_policy.clip_cov,
    f"{_LOSS}kl_cov": verl_policy.kl_cov_with_abs,
    f"{_LOSS}geo_mean": verl_policy.geo_mean,
    f"{_LOSS}dro": verl_policy.dro,
    f"{_LOSS}cispo": verl_policy.cispo,
    "compute_policy_loss_bypass_mode": verl_rollout.bypass_mode,
    "agg_loss": verl_policy.agg_loss,
    "kl_penalty": kl_penalty,
    "compute_rewards": compute_rewards,
    "compute_value_loss": value_loss,
    "compute_gae_advantage_return": verl_advantages.gae_advantages,
    "verl_F.masked_mean": verl_advantages.masked_mean,
    "verl_F.masked_var": verl_advantages.masked_var,
    "verl_F.masked_whiten": verl_advantages.masked_whiten,
    "AdaptiveKLController.update": adaptive_kl,
    "FixedKLController.update": fixed_kl,
    "compute_grpo_outcome_advantage": verl_advantages.group_advantage(verl_advantages.grpo),
    "compute_grpo_vectorized_outcome_advantage": verl_advantages.group_advantage(verl_advantages.grpo),
    "compute_grpo_passk_outcome_advantage": verl_advantages.group_advantage(verl_advantages.passk),
    "compute_rloo_outcome_advantage": verl_advantages.group_advantage(verl_advantages.rloo),
    "compute_rloo_vectorized_outcome_advantage": verl_advantages.group_advantage(verl_advantages.rloo_vectorized),
    "compute_opo_outcome_advantage": verl_advantages.group_advantage(verl_advantages.opo),
    "compute_gpg_outcome_advantage": verl_advantages.group_advantage(verl_advantages.gpg),
    "compute_gdpo_outcome_advantage": verl_advantages.gdpo,
    "compute_reinforce_plus_plus_baseline_outcome_advantage": verl_advantages.whitened(verl_advantages.centred),
    "compute_reinforce_plus_plus_outcome_advantage": verl_advantages.reinforce_plus_plus,
    "compute_remax_outcome_advantage": verl_advantages.remax,
    "compute_optimal_token_baseline_advantage": verl_advantages.optimal_token_baseline,
    "compute_multi_turn_optimal_token_baseline_advantage": verl_advantages.optimal_token_baseline,
    "compute_rollout_correction_and_rejection_mask": verl_rollout.rollout_correction,
    "compute_rollout_rejection_mask": verl_rollout.rejection,
    "compute_offpolicy_metrics": verl_rollout.off_policy_metrics,
    "TrainingWorker.train_mini_batch": updates.verl,
}
