"""OpenRLHF 0.11.2: models/loss.py, models/utils.py, experience_maker and length_penalty."""

from typing import Any

import torch
from torch import Tensor

from learner.algorithms import advantages, aggregation, kl, logprobs, losses, masks, ratios, shaping
from learner.algorithms.controllers import AdaptiveKl
from learner.algorithms.returns import cumulative_returns, gae, place_rewards
from learner.algorithms.values import value_clip
from tests.golden.cases import Unsupported, Variant

CLAMP = 20.0


def _aggregate(losses_BT: Tensor, mask: Tensor, *, is_token_level: bool) -> Tensor:
    weights = aggregation.token_mean(mask) if is_token_level else aggregation.sequence_mean(mask)
    return aggregation.aggregate(losses_BT, weights_BT=weights)


def policy_loss(v: Variant) -> dict[str, Any]:
    mask, policy_BT, old_BT = v.mask(), v["log_probs"], v["old_log_probs"]
    if not mask.any():
        raise Unsupported("the loss of nothing: OpenRLHF gives NaN, we give 0")
    is_token_level = v.option("token_level_loss", True)
    is_gspo = v.option("policy_loss_type", "ppo") == "gspo"
    has_correction = v.option("is_correction_level") is not None
    given = {"advantages_BT": v["advantages"], "loss_mask_BT": mask}
    bounds = {"epsilon_low": v.option("clip_eps_low", 0.2), "epsilon_high": v.option("clip_eps_high", 0.2)}
    bounds["dual_clip"] = v.option("dual_clip")
    if is_gspo:
        # With a correction on, the rollout's log-probs take the place of the old ones in the ratio, and nothing is filtered.
        base_BT = v["rollout_log_probs"] if has_correction else old_BT
        token = losses.gspo(policy_BT, proximal_logprobs_BT=base_BT, **given, **bounds)
        is_token_level = False
    else:
        token = losses.ppo_clip(policy_BT, proximal_logprobs_BT=old_BT, **given, **bounds, log_ratio_clamp=CLAMP)
    per_token, result = token.losses_BT, {}
    if has_correction and not is_gspo:
        weights = _correction(v, mask)
        per_token = per_token * weights
        gap = masks.log_ratio(v["rollout_log_probs"], denominator_BT=old_BT, loss_mask_BT=mask)
        result["vllm_kl"] = masks.masked_mean(gap, loss_mask_BT=mask)
    ratio = masks.log_ratio(policy_BT, denominator_BT=old_BT, loss_mask_BT=mask)
    if v.option("batch_num_tokens"):
        total = aggregation.aggregate(per_token, weights_BT=aggregation.sum(mask))
        return {"loss": total / v.option("batch_num_tokens") * v.option("dp_size")}
    if v.option("global_batch_size"):
        rows = mask.any(1).sum()
        mean = _aggregate(per_token, mask, is_token_level=False)
        return {"loss": mean * rows / v.option("global_batch_size") * v.option("dp_size")}
    return result | {
        "loss": _aggregate(per_token, mask, is_token_level=is_token_level),
        "clip_ratio": masks.masked_mean(token.clipped_BT.double(), loss_mask_BT=mask),
        "ppo_kl": masks.masked_mean(-ratio, loss_mask_BT=mask),
    }


def _correction(v: Variant, mask: Tensor) -> Tensor:
    given = {"rollout_logprobs_BT": v["rollout_log_probs"], "loss_mask_BT": mask}
    low, high = v.option("is_correction_threshold", (0.5, 5.0))
    is_token = v.option("is_correction_level") == "token"
    if v.option("is_correction_mode", "mask") == "clip":
        return ratios.tis(v["old_log_probs"], **given, floor=low, cap=high, level="token" if is_token else "geometric")
    gating = v.option("is_correction_gating", "ratio")
    if gating == "ratio":
        kept = ratios.sequence_mask(
            v["old_log_probs"], **given, low=low, high=high, level="token" if is_token else "geometric"
        )
    else:
        level = "token" if is_token else "mean"
        kept = ratios.rejection(v["old_log_probs"], **given, low=low, high=high, estimator=gating, level=level)
    return ratios.decoupled(v["old_log_probs"], **given) * kept


def value_loss(v: Variant) -> dict[str, Any]:
    mask = v.mask()
    if not mask.any():
        raise Unsupported("the loss of nothing: OpenRLHF gives NaN, we give 0")
    token = value_clip(
        v["values"],
        old_values_BT=v["old_values"],
        returns_BT=v["returns"],
        loss_mask_BT=mask,
        clip_range=v.option("clip_eps"),
    )
    return {"loss": _aggregate(token.losses_BT, mask, is_token_level=v.option("token_level_loss"))}


def approx_kl(v: Variant) -> dict[str, Any]:
    """Clamps k1, k2 and k3 alike, and does not mask."""
    everything = torch.ones_like(v.mask())
    given = {"other_logprobs_BT": v["ref_log_probs"], "loss_mask_BT": everything}
    # Beyond a log-ratio of 20 all estimates are beyond 10, and cut.
    estimator = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}[v.option("kl_estimator")]
    estimate = estimator(v["log_probs"], **given, log_ratio_clamp=CLAMP).clamp(-10, 10)
    if v.option("unbiased_gradient"):
        old_BT = v[v.option("log_probs_old").removeprefix("in.")]
        ratio = (
            masks.log_ratio(v["log_probs"].detach(), denominator_BT=old_BT, loss_mask_BT=everything).exp().clamp(max=10)
        )
        gradient = ratio * kl.k2(v["log_probs"], **given)
        # Summed in the peer's order: at huge ratios what rounding leaves of value + gradient − gradient is not the value.
        estimate = estimate.detach() + gradient - gradient.detach()
    return {"kl": estimate, "loss": masks.masked_sum(estimate, loss_mask_BT=v.mask())}


def compute_reward(v: Variant) -> dict[str, Any]:
    everything = torch.ones_like(v.mask())
    estimate = kl.k1(v["log_probs"], other_logprobs_BT=v["ref_log_probs"], loss_mask_BT=everything).clamp(-10, 10)
    return {"reward": _reward(v["scores"], estimate, v.mask(), v.option("kl_coef"), v.option("reward_clip_range"))}


def _reward(rewards_N: Tensor, kl_NT: Tensor, mask: Tensor, coefficient: float, clip_range: Any) -> Tensor:
    """A negative coefficient is none; a row with nothing unmasked gets its reward in the last column."""
    if clip_range:
        rewards_N = shaping.reward_clip(rewards_N, low=clip_range[0], high=clip_range[1])
    reach = mask | (~mask.any(1, keepdim=True))
    return place_rewards(rewards_N, loss_mask_NT=reach) - max(coefficient, 0.0) * kl_NT


def masked_mean(v: Variant) -> dict[str, Any]:
    if not v.mask().any(1).all():
        raise Unsupported("the mean of nothing: OpenRLHF gives NaN, we give 0")
    return {
        "all": masks.masked_mean(v["entropy"], loss_mask_BT=v.mask()),
        "row": masks.masked_mean(v["entropy"], loss_mask_BT=v.mask(), dim=1),
    }


def masked_normalize(v: Variant) -> dict[str, Any]:
    """Row by row, over its own tokens."""
    rows = zip(masks.masked(v["entropy"], loss_mask_BT=v.mask()), v.mask(), strict=True)
    if not v.mask().any(1).all():
        raise Unsupported("the mean of nothing: OpenRLHF gives NaN, we give 0")
    settings = {"ddof": 0, "epsilon_mode": "clamp", "zero_variance": "rounding", "outside": "zero"}
    return {"out": torch.stack([masks.whiten(x, loss_mask_BT=mask, **settings) for x, mask in rows])}


def gae_advantages(v: Variant) -> dict[str, Any]:
    result, _ = gae(
        v["token_rewards"],
        values_NT=v["values"],
        loss_mask_NT=v.mask(),
        gamma=v.option("gamma"),
        lambda_=v.option("lambd"),
        holes="discount",
        outside="carry",
    )
    return {"advantages": result, "returns": result + masks.masked(v["values"], loss_mask_BT=v.mask())}


def returns_of(v: Variant) -> dict[str, Any]:
    result = cumulative_returns(
        v["token_rewards"], loss_mask_NT=v.mask(), gamma=v.option("gamma"), holes="discount", outside="carry"
    )
    return {"returns": result}


def experience_advantages(v: Variant) -> dict[str, Any]:
    """Rewards shaped in their groups, KL taken off, discounted, whitened over all tokens of the batch."""
    estimator, mask, rewards_N = v.option("estimator"), v.mask(), v["rewards"]
    group_index_N = torch.arange(len(rewards_N)) // v["n_samples_per_prompt"]
    spread_N = advantages.over_groups(lambda r: r.std().expand(len(r)), rewards_N, group_index_N=group_index_N)
    if estimator == "flash_reinforce":
        rewards_N = advantages.mean_centered(rewards_N)
    elif estimator == "rloo":
        rewards_N = advantages.over_groups(advantages.rloo, rewards_N, group_index_N=group_index_N)
    elif estimator in ("reinforce_baseline", "dr_grpo"):
        rewards_N = advantages.over_groups(advantages.mean_centered, rewards_N, group_index_N=group_index_N)
    elif estimator == "group_norm":
        rewards_N = advantages.over_groups(
            advantages.grpo, rewards_N, group_index_N=group_index_N, epsilon=1e-9, zero_variance="rounding"
        )
    token_rewards = _reward(rewards_N, v["kl"], mask, v.option("kl_coef"), v.option("reward_clip_range"))
    if estimator == "gae":
        result, _ = gae(
            token_rewards,
            values_NT=v["values"],
            loss_mask_NT=mask,
            gamma=v.option("gamma"),
            lambda_=v.option("lambd"),
            holes="discount",
            outside="carry",
        )
        returns = result + masks.masked(v["values"], loss_mask_BT=mask)
    else:
        # Any other estimator runs with gamma 1, whatever is configured.
        gamma = v.option("gamma") if estimator == "reinforce" else 1.0
        result = returns = cumulative_returns(
            token_rewards, loss_mask_NT=mask, gamma=gamma, holes="discount", outside="carry"
        )
    if estimator in ("gae", "reinforce", "reinforce_baseline"):
        result = masks.whiten(
            result,
            loss_mask_BT=mask,
            scale=not v.option("no_std_norm"),
            ddof=0,
            epsilon=1e-8,
            epsilon_mode="clamp",
            zero_variance="rounding",
            outside="whiten",
        )
    return {"advantages": result, "returns": returns, "group_reward_std": spread_N}


def kl_controller(v: Variant) -> dict[str, Any]:
    controller = AdaptiveKl(coefficient=v.option("init"), target=v.option("target"), horizon=v.option("horizon"))
    observed = []
    for measured in v["kl_sequence"].tolist():
        controller = controller.observe(measured, num_trajectories=v.option("n_steps"))
        observed.append(controller.coefficient)
    return {"values": torch.tensor(observed, dtype=torch.float64)}


def overlong_penalty(v: Variant) -> dict[str, Any]:
    before = v["rewards"]
    after = shaping.overlong_penalty(
        before,
        completion_lengths_N=v["response_length"],
        max_length=v.option("max_new_tokens"),
        cache=v.option("overlong_buffer_len"),
        penalty=v.option("overlong_penalty_factor"),
    )
    return {"rewards": after, "n_penalized": (after != before).sum()}


def stop_properly_penalty(v: Variant) -> dict[str, Any]:
    truncated = v["truncated"].bool()
    return {
        "rewards": shaping.truncation_penalty(v["rewards"], truncated_N=truncated, coefficient=v.option("coef")),
        "n_truncated": truncated.sum(),
    }


def log_probs_from_logits(v: Variant) -> dict[str, Any]:
    return {
        "log_probs": logprobs.token_logprobs(v["logits"], token_ids_BT=v["labels"], temperature=v.option("temperature"))
    }


def compute_entropy(v: Variant) -> dict[str, Any]:
    return {"entropy": logprobs.entropies(v["logits"])}


ADAPTERS = {
    "openrlhf.models.loss.PolicyLoss": policy_loss,
    "PolicyLoss": policy_loss,
    "openrlhf.models.loss.ValueLoss": value_loss,
    "compute_approx_kl": approx_kl,
    "compute_reward": compute_reward,
    "masked_mean": masked_mean,
    "masked_normalize": masked_normalize,
    "RemoteExperienceMaker.get_advantages_and_returns": gae_advantages,
    "RemoteExperienceMaker.get_cumulative_returns": returns_of,
    "RemoteExperienceMaker.compute_advantages_and_returns": experience_advantages,
    "AdaptiveKLController.update": kl_controller,
    "apply_overlong_penalty": overlong_penalty,
    "apply_stop_properly_penalty": stop_properly_penalty,
    "log_probs_from_logits": log_probs_from_logits,
    "compute_entropy": compute_entropy,
}
