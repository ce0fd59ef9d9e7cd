"""OpenRLHF 0.11.2: models/loss.py, models/utils.py, experience_maker and length_penalty."""

from typing import Any

import torch
from torch import Tensor

from learner.algorithms import kl, masks
from learner.algorithms.advantages import group
from learner.algorithms.advantages.returns import gae_scan, return_scan
from learner.algorithms.batch_rules import shaping
from learner.algorithms.groups import over_groups
from learner.algorithms.losses.values import value_clip
from learner.algorithms.objective.token_rewards import place_rewards
from tests.golden import logprobs, peer_parts
from tests.golden.cases import Unsupported, Variant
from tests.golden.kl_controllers import adaptive_kl
from tests.golden.through_objective import Step, aggregated

CLAMP = 20.0


def _refuse_nothing(mask: Tensor) -> None:
    if not mask.any():
        raise Unsupported("the loss of nothing: OpenRLHF gives NaN, we give 0")


def _scaled(v: Variant, mask: Tensor, *, is_token_level: bool) -> tuple[dict[str, Any], float]:
    """The aggregation, and what its result is multiplied with: numbers of the whole step that a rank is told."""
    tokens, rows, ranks = v.option("batch_num_tokens"), v.option("global_batch_size"), v.option("dp_size", 1)
    if is_token_level:
        return ({"name": "sum"}, ranks / tokens) if tokens else ({"name": "token_mean"}, ranks)
    share = float(mask.any(1).sum()) / rows if rows else 1.0
    return {"name": "sequence_mean"}, ranks * share


def policy_loss(v: Variant) -> dict[str, Any]:
    mask, policy_BT, old_BT = v.mask(), v["log_probs"], v["old_log_probs"]
    _refuse_nothing(mask)
    is_gspo = v.only("policy_loss_type", "ppo", "gspo") == "gspo"
    corrections, bounds = _corrections(v), _bounds(v)
    is_token_level = v.option("token_level_loss", True) and not is_gspo
    aggregation, scale = _scaled(v, mask, is_token_level=is_token_level)
    given = {"policy_BT": policy_BT, "advantages_BT": v["advantages"], "mask": mask}
    if is_gspo:
        # With a correction on, the rollout's log-probs take the place of the old ones in the ratio, and nothing is filtered.
        step = Step(**given, old_BT=v["rollout_log_probs"] if corrections else old_BT)
        corrections, policy = [], {"name": "gspo", **bounds}
    else:
        step = Step(**given, old_BT=old_BT, rollout_BT=v["rollout_log_probs"] if corrections else None)
        policy = {"name": "ppo_clip", **bounds, "log_ratio_clamp": CLAMP}
    algorithm = {"policy_loss": policy, "aggregation": aggregation, "corrections": corrections}
    ratio = masks.log_ratio(policy_BT, over_BT=old_BT, mask_BT=mask)
    result = {
        "loss": step.loss(algorithm) * scale,
        "clip_ratio": masks.masked_mean(step.tokens(policy).clipped_BT.double(), mask_BT=mask),
        "ppo_kl": masks.masked_mean(-ratio, mask_BT=mask),
    }
    return result | (_filtering(v, mask) if corrections else {})


def _bounds(v: Variant) -> dict[str, Any]:
    low, high = v.option("clip_eps_low", 0.2), v.option("clip_eps_high", 0.2)
    return {"epsilon_low": low, "epsilon_high": high, "dual_clip": v.option("dual_clip")}


def _corrections(v: Variant) -> list[dict[str, Any]]:
    """As config names them; none where the correction is off."""
    v.without_effect("is_correction_mode", "is_correction_gating", "is_correction_threshold")
    if v.only("is_correction_level", "off", "token", "seq") == "off":
        return []
    low, high = v.option("is_correction_threshold", (0.5, 5.0))
    if v.only("is_correction_mode", "mask", "clip") == "clip":
        return [{"name": "tis", "floor": low, "cap": high, "level": _level(v)}]
    return [{"name": "decoupled"}, _gate(v)]


def _level(v: Variant) -> str:
    return "token" if v.option("is_correction_level") == "token" else "geometric"


def _gate(v: Variant) -> dict[str, Any]:
    """Keeps what lies inside the threshold."""
    low, high = v.option("is_correction_threshold", (0.5, 5.0))
    gating = v.only("is_correction_gating", "ratio", "binary_kl", "tv")
    if gating == "ratio":
        return {"name": "sequence_mask", "low": low, "high": high, "level": _level(v)}
    level = "token" if v.option("is_correction_level") == "token" else "mean"
    return {"name": "rejection", "low": low, "high": high, "estimator": gating, "level": level}


def _filtering(v: Variant, mask: Tensor) -> dict[str, Any]:
    """The share of tokens, or of rows, outside the threshold; a row with nothing unmasked counts as outside."""
    old_BT, rollout_BT = v["old_log_probs"], v["rollout_log_probs"]
    step = Step(policy_BT=old_BT, old_BT=old_BT, advantages_BT=old_BT, mask=mask, rollout_BT=rollout_BT)
    outside = step.correction([_gate(v)]) == 0
    is_token = v.option("is_correction_level") == "token"
    gap = masks.log_ratio(rollout_BT, over_BT=old_BT, mask_BT=mask)
    return {
        "vllm_kl": masks.masked_mean(gap, mask_BT=mask),
        "is_filter_ratio": masks.masked_mean(outside.double(), mask_BT=mask)
        if is_token
        else outside.all(1).double().mean(),
    }


def value_loss(v: Variant) -> dict[str, Any]:
    mask = v.mask()
    _refuse_nothing(mask)
    token = value_clip(
        v["values"],
        old_values_BT=v["old_values"],
        returns_BT=v["returns"],
        loss_mask_BT=mask,
        clip_range=v.option("clip_eps"),
    )
    aggregation, scale = _scaled(v, mask, is_token_level=v.option("token_level_loss", True))
    return {"loss": aggregated(token.losses_BT, aggregation, mask) * scale}


def approx_kl(v: Variant) -> dict[str, Any]:
    """Clamps k1, k2 and k3 alike, and does not mask."""
    v.only("loss_for_grad", "sum(kl*mask)")
    old_name = v.option("log_probs_old")
    everything = torch.ones_like(v.mask())
    given = {"other_logprobs_BT": v["ref_log_probs"], "loss_mask_BT": everything}
    # Beyond a log-ratio of 20 all estimates are beyond 10, and clamped.
    estimator = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}[v.option("kl_estimator")]
    estimate = estimator(v["log_probs"], **given, log_ratio_clamp=CLAMP).clamp(-10, 10)
    if v.option("unbiased_gradient"):
        old_BT = v["log_probs"].detach() if old_name is None else v[old_name.removeprefix("in.")]
        ratio = masks.log_ratio(v["log_probs"].detach(), over_BT=old_BT, mask_BT=everything)
        gradient = ratio.exp().clamp(max=10) * kl.k2(v["log_probs"], **given)
        # Summed in the peer's order: at huge ratios what rounding leaves of value + gradient − gradient is not the value.
        estimate = estimate.detach() + gradient - gradient.detach()
    return {"kl": estimate, "loss": masks.masked_sum(estimate, mask_BT=v.mask())}


def compute_reward(v: Variant) -> dict[str, Any]:
    everything = torch.ones_like(v.mask())
    v.only("kl", "k1(log_probs, ref_log_probs)")
    estimate = kl.k1(v["log_probs"], other_logprobs_BT=v["ref_log_probs"], loss_mask_BT=everything).clamp(-10, 10)
    return {
        "reward": reward_less_kl(v["scores"], estimate, v.mask(), v.option("kl_coef"), v.option("reward_clip_range"))
    }


def reward_less_kl(
    rewards_N: Tensor, kl_NT: Tensor, mask: Tensor, coefficient: float, clip_range: Any = None
) -> Tensor:
    """A negative coefficient is none; a row with nothing unmasked gets its reward in the last column."""
    if clip_range:
        rewards_N = shaping.reward_clip(rewards_N, low=clip_range[0], high=clip_range[1])
    reach = mask | (~mask.any(1, keepdim=True))
    return place_rewards(rewards_N, loss_mask_NT=reach) - max(coefficient, 0.0) * kl_NT


def masked_mean(v: Variant) -> dict[str, Any]:
    if not v.mask().any(1).all():
        raise Unsupported("the mean of nothing: OpenRLHF gives NaN, we give 0")
    return {
        "all": masks.masked_mean(v["entropy"], mask_BT=v.mask()),
        "row": masks.masked_mean(v["entropy"], mask_BT=v.mask(), dim=1),
    }


def masked_normalize(v: Variant) -> dict[str, Any]:
    """Row by row, over its own tokens."""
    v.only("dim", 1)
    rows = zip(masks.masked(v["entropy"], mask_BT=v.mask()), v.mask(), strict=True)
    if not v.mask().any(1).all():
        raise Unsupported("the mean of nothing: OpenRLHF gives NaN, we give 0")
    settings = {"ddof": 0, "epsilon_mode": "clamp", "zero_variance": "rounding"}
    return {"out": torch.stack([shaping.whiten(x, loss_mask_NT=mask, **settings) for x, mask in rows])}


def gae_through_holes(v: Variant, token_rewards: Tensor, mask: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """Holes discount, and the scan's state is left standing in them; returns count no value there."""
    given = {"gamma": gamma, "lambda_": v.option("lambd"), "holes": "discount"}
    result = gae_scan(token_rewards, values_NT=v["values"], loss_mask_NT=mask, **given)
    return result, result + masks.masked(v["values"], mask_BT=mask)


def gae_advantages(v: Variant) -> dict[str, Any]:
    result, returns = gae_through_holes(v, v["token_rewards"], v.mask(), gamma=v.option("gamma"))
    return {"advantages": result, "returns": returns}


def returns_of(v: Variant) -> dict[str, Any]:
    result = return_scan(v["token_rewards"], loss_mask_NT=v.mask(), gamma=v.option("gamma"), holes="discount")
    return {"returns": result}


def experience_advantages(v: Variant) -> dict[str, Any]:
    """Rewards shaped in their groups, KL taken off, discounted, whitened over all tokens of the batch."""
    estimator, mask, rewards_N = v.option("estimator"), v.mask(), v["rewards"]
    v.without_effect("gamma", "lambd", "no_std_norm")
    group_index_N = torch.arange(len(rewards_N)) // v["n_samples_per_prompt"]
    spread_N = over_groups(lambda r: r.std().expand(len(r)), rewards_N, group_index_N=group_index_N)
    if estimator == "flash_reinforce":
        rewards_N = group.mean_centered(rewards_N)
    elif estimator == "rloo":
        rewards_N = over_groups(group.rloo, rewards_N, group_index_N=group_index_N)
    elif estimator in ("reinforce_baseline", "dr_grpo"):
        rewards_N = over_groups(group.mean_centered, rewards_N, group_index_N=group_index_N)
    elif estimator == "group_norm":
        rewards_N = over_groups(
            group.grpo, rewards_N, group_index_N=group_index_N, epsilon=1e-9, zero_variance="rounding"
        )
    token_rewards = reward_less_kl(rewards_N, v["kl"], mask, v.option("kl_coef"), v.option("reward_clip_range"))
    if estimator == "gae":
        result, returns = gae_through_holes(v, token_rewards, mask, gamma=v.option("gamma"))
    else:
        # Any other estimator runs with gamma 1, whatever is configured.
        gamma = v.option("gamma") if estimator == "reinforce" else 1.0
        result = returns = return_scan(token_rewards, loss_mask_NT=mask, gamma=gamma, holes="discount")
    if estimator in ("gae", "reinforce", "reinforce_baseline"):
        scale = not v.option("no_std_norm")
        result = peer_parts.whiten_padding_too(result, loss_mask_NT=mask, scale=scale, ddof=0, epsilon_mode="clamp")
    return {
        "advantages": result,
        "returns": returns,
        "return_sum": token_rewards.sum(1),
        "group_reward_std": spread_N,
    }


def overlong_penalty(v: Variant) -> dict[str, Any]:
    before = v["rewards"]
    after = shaping.overlong_penalty(
        before,
        completion_lengths_G=v["response_length"],
        max_length=v.option("max_new_tokens"),
        cache=v.option("overlong_buffer_len"),
        penalty=v.option("overlong_penalty_factor"),
    )
    return {"rewards": after, "n_penalized": (after != before).sum()}


def stop_properly_penalty(v: Variant) -> dict[str, Any]:
    truncated = v["truncated"].bool()
    return {
        "rewards": shaping.truncation_penalty(v["rewards"], truncated_G=truncated, coefficient=v.option("coef")),
        "n_truncated": truncated.sum(),
    }


def log_probs_from_logits(v: Variant) -> dict[str, Any]:
    return {
        "log_probs": logprobs.token_logprobs(v["logits"], token_ids_BT=v["labels"], temperature=v.option("temperature"))
    }


def compute_entropy(v: Variant) -> dict[str, Any]:
    return {"entropy": logprobs.entropies(v["logits"])}


ADAPTERS = {
    "PolicyLoss": policy_loss,
    "ValueLoss": value_loss,
    "compute_approx_kl": approx_kl,
    "compute_reward": compute_reward,
    "masked_mean": masked_mean,
    "masked_normalize": masked_normalize,
    "RemoteExperienceMaker.get_advantages_and_returns": gae_advantages,
    "RemoteExperienceMaker.get_cumulative_returns": returns_of,
    "RemoteExperienceMaker.compute_advantages_and_returns": experience_advantages,
    "AdaptiveKLController.update": adaptive_kl,
    "apply_overlong_penalty": overlong_penalty,
    "apply_stop_properly_penalty": stop_properly_penalty,
    "log_probs_from_logits": log_probs_from_logits,
    "compute_entropy": compute_entropy,
}
