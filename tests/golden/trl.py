"""TRL 1.16.0: GRPOTrainer's loss, advantages, importance sampling, and its forward pass."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from learner.algorithms import masks
from learner.algorithms.advantages import batch, group
from learner.algorithms.corrections import importance
from learner.algorithms.groups import over_groups
from learner.algorithms.losses.sequence import vespo_weights
from tests.golden.cases import Uncompared, Unsupported, Variant
from tests.golden.logprobs import entropies, token_logprobs
from tests.golden.models import load_model
from tests.golden.through_objective import Step

_LOWEST_LOG_WEIGHT = math.log(1e-8)
_ROWS_OF_ONE = Uncompared("where completions have one token TRL counts masked ones too")


def compute_loss(v: Variant) -> dict[str, Any]:
    if "prompt_ids" in v:
        return end_to_end_loss(v)
    return loss_of(
        v,
        v["log_probs"],
        mask=v.mask(),
        advantages=v["advantages"],
        old_BT=v["old_log_probs"] if v.option("old_per_token_logps", True) else v["log_probs"].detach(),
        reference_BT=v["ref_log_probs"],
        entropy_BT=v["entropy"],
        rollout_BT=v["rollout_log_probs"],
        weights_BT=v["importance_sampling_ratio"],
        num_tokens=max(float(v["num_items_in_batch"]), 1.0),
    )


def loss_of(
    v: Variant,
    policy_BT: Tensor,
    *,
    mask: Tensor,
    advantages: Tensor,
    old_BT: Tensor,
    reference_BT: Tensor,
    entropy_BT: Tensor,
    rollout_BT: Tensor | None,
    weights_BT: Tensor | None,
    num_tokens: float,
) -> dict[str, Any]:
    v.only("use_adaptive_entropy", False)
    policy_loss, kind = _policy_loss(v), v.option("loss_type")
    sampled_BT = old_BT if rollout_BT is None else torch.where(rollout_BT.isnan(), policy_BT.detach(), rollout_BT)
    is_weighted = v.option("use_vllm") and v.option("vllm_importance_sampling_correction") and kind != "vespo"
    v.without_effect("use_vllm", "vllm_importance_sampling_correction")
    step = Step(
        policy_BT=policy_BT,
        old_BT=old_BT,
        advantages_BT=_per_token(advantages, mask),
        mask=mask,
        reference_BT=reference_BT if v.option("beta") else None,
        rollout_BT=sampled_BT,
        entropies_BT=entropy_BT.detach(),
    )
    algorithm = _algorithm(v, policy_loss, mask)
    on_top_BT = weights_BT if is_weighted else None
    if kind == "vespo":
        step, algorithm, on_top_BT = _for_vespo(step, algorithm, weights_BT)
    scale = 1 / num_tokens if kind in ("dapo", "cispo", "vespo") else 1.0
    v.without_effect("use_bias_correction_kl")
    if _kl_estimator(v) == "unbiased" and v.option("beta") and v.option("importance_sampling_level") == "sequence":
        raise Unsupported("parameter use_bias_correction_kl with one ratio per sequence")
    _refuse_cancellation(v, step)
    loss = scale * step.loss(algorithm, weights_BT=on_top_BT)
    metrics = _metrics(v, step, policy_loss, advantages=advantages)
    metrics["metric.entropy"] = masks.masked_mean(entropy_BT, mask_BT=mask)
    if v.option("_entropy_bonus_enabled", bool(v.option("entropy_coef", 0.0))):
        metrics["metric.policy_loss"] = loss
        acts_BT = step.chosen(algorithm.get("filters", ())).gradient_NT
        loss = loss - v.option("entropy_coef") * masks.masked_mean(entropy_BT, mask_BT=acts_BT)
    if mask.shape[1] == 1 and not mask.all():
        metrics = dict.fromkeys(metrics, _ROWS_OF_ONE)
    return metrics | {"loss": loss}


def _for_vespo(
    step: Step, algorithm: dict[str, Any], weights_BT: Tensor | None
) -> tuple[Step, dict[str, Any], Tensor | None]:
    """Its log μ is log π_old less the log of the importance ratio that the trainer was given; the mask of off-policy sequences looks at
    the log-probs that sampled, so where there is one it comes as a weight."""
    if weights_BT is not None and weights_BT.shape != step.mask.shape:
        raise Unsupported("one importance ratio per sequence with loss_type='vespo'")
    corrections = algorithm.pop("corrections", [])
    kept_BT = step.correction(corrections) if corrections else None
    sampled_BT = step.old_BT if weights_BT is None else step.old_BT - weights_BT.log()
    return replace(step, rollout_BT=sampled_BT), algorithm, kept_BT


def _policy_loss(v: Variant) -> dict[str, Any]:
    kind, level = v.option("loss_type"), v.option("importance_sampling_level")
    bounds = {
        "epsilon_low": v.option("epsilon_low"),
        "epsilon_high": v.option("epsilon_high"),
        "delta": v.option("delta"),
    }
    taus = {"tau_positive": v.option("sapo_temperature_pos"), "tau_negative": v.option("sapo_temperature_neg")}
    shape = {
        f"{ours}_{sign}": v.option(f"vespo_{ours}_{sign[:3]}")
        for ours in ("k", "lambda")
        for sign in ("positive", "negative")
    }
    if kind in ("cispo", "sapo") and level != "token":
        raise Unsupported(f"parameter importance_sampling_level={level!r} with loss_type={kind!r}")
    if kind == "cispo":
        return {"name": "cispo", "epsilon_max": v.option("epsilon_high")}
    if kind == "sapo":
        return {"name": "sapo", **taus}
    if kind == "vespo":
        return {"name": "vespo", **shape, "log_ratio_clamp": 20.0, "log_weight_min": _LOWEST_LOG_WEIGHT}
    return {"name": "gspo" if level == "sequence" else "ppo_clip", **bounds}


def _algorithm(v: Variant, policy_loss: dict[str, Any], mask: Tensor) -> dict[str, Any]:
    """As a run would configure it, save that a loss divided by a number of tokens it cannot know is a sum here."""
    kind, max_length = v.option("loss_type"), v.option("max_completion_length")
    counted = {"empty_rows": "count"}
    aggregation = {
        "grpo": {"name": "sequence_mean", **counted},
        "sapo": {"name": "sequence_mean", **counted},
        "bnpo": {"name": "token_mean"},
        "dr_grpo": {"name": "sequence_sum_over_length", "max_length": max_length, **counted},
        "luspo": {"name": "sequence_sum_mean", **counted},
    }.get(kind, {"name": "sum"})
    algorithm = {
        "policy_loss": policy_loss,
        "aggregation": aggregation,
    }
    if v.option("beta"):
        algorithm["kl"] = {"loss": {"coefficient": v.option("beta"), "estimator": _kl_estimator(v)}}
    if (share := v.option("top_entropy_quantile", 1.0)) < 1:
        if share <= 0:
            raise Unsupported(f"parameter top_entropy_quantile={share}: TRL keeps the highest token, we keep none")
        algorithm["filters"] = [{"name": "high_entropy_tokens", "share": share}]
    if (delta := v.option("off_policy_mask_threshold")) is not None:
        algorithm["corrections"] = [{"name": "opsm", "delta": delta}]
    return algorithm


def _refuse_cancellation(v: Variant, step: Step) -> None:
    """TRL multiplies a tiny ratio by a huge k3; the gradient is what is left of their difference."""
    if step.reference_BT is None or _kl_estimator(v) == "k3" or step.policy_BT.dtype == torch.float64:
        return
    gap_BT = masks.log_ratio(step.reference_BT, over_BT=step.policy_BT, mask_BT=step.mask)
    if gap_BT.abs().max() > 15:
        raise Unsupported(
            "the corrected KL cancels in TRL's float32: at a log-ratio of 19 its gradient is -4.0, the true one -6.99"
        )


def _kl_estimator(v: Variant) -> str:
    return "unbiased" if v.option("use_bias_correction_kl", True) else "k3"


def _metrics(v: Variant, step: Step, policy_loss: dict[str, Any], *, advantages: Tensor) -> dict[str, Any]:
    kind, mask, metrics = v.option("loss_type"), step.mask, {}
    if step.reference_BT is not None:
        estimate = step.kl(estimator=_kl_estimator(v))
        metrics["metric.kl"] = masks.masked_mean(estimate, mask_BT=mask)
    if kind == "cispo":
        counted = step.tokens(policy_loss).clipped_high_BT & (step.advantages_BT > 0)
        return metrics | {"metric.cispo_clip_ratio": masks.masked_mean(counted.double(), mask_BT=mask)}
    if kind == "vespo":
        return metrics | {"metric.vespo/phi_seq_mean": _phi_mean(step, policy_loss, advantages=advantages)}
    return metrics if kind == "sapo" else metrics | _clip_ratios(v, step, advantages=advantages)


def _phi_mean(step: Step, policy_loss: dict[str, Any], *, advantages: Tensor) -> Tensor:
    """Over rows where advantages are one per row, else over tokens. TRL gives a row with nothing unmasked the weight of ratio 1."""
    shape = {name: value for name, value in policy_loss.items() if name not in ("name", "log_ratio_clamp")}
    ratio_BT = masks.log_ratio(
        step.policy_BT,
        over_BT=step.rollout_BT,
        mask_BT=step.mask,
        clamp=policy_loss.get("log_ratio_clamp"),
    )
    phi = vespo_weights(ratio_BT, advantages_BT=step.advantages_BT, loss_mask_BT=step.mask, **shape)
    if advantages.dim() == 2:
        return masks.masked_mean(phi, mask_BT=step.mask)
    return torch.where(step.mask.any(1), masks.masked_mean(phi, mask_BT=step.mask, dim=1), 1).mean()


def _clip_ratios(v: Variant, step: Step, *, advantages: Tensor) -> dict[str, Any]:
    """Counts by the sign of the advantage; where ratio and advantage are one per row, the mean is over rows."""
    is_sequence, mask = v.option("importance_sampling_level") == "sequence", step.mask
    ratio = masks.log_ratio(step.policy_BT, over_BT=step.old_BT, mask_BT=mask)
    if is_sequence:
        ratio = masks.masked_mean(ratio, mask_BT=mask, dim=1)[:, None]
    ratio = ratio.exp() if v.option("delta") is None else ratio.exp().clamp(max=v.option("delta"))
    A = advantages[:, None] if advantages.dim() == 1 else advantages
    low = (ratio < 1 - v.option("epsilon_low")) & (A < 0)
    high = (ratio > 1 + v.option("epsilon_high")) & (A > 0)
    counted = torch.ones_like(low) if low.shape[1] == 1 else mask
    rows = counted.any(1)

    def mean(which: Tensor, *, dim: int | None = None) -> Tensor:
        return masks.masked_mean(which.double(), mask_BT=counted, dim=dim)

    named = (("low", low), ("high", high), ("region", low | high))
    result: dict[str, Any] = {f"metric.clip_ratio/{name}_mean": mean(which) for name, which in named}
    nothing = torch.tensor([torch.nan])
    result["metric.clip_ratio/low_min"] = (mean(low, dim=1)[rows] if rows.any() else nothing).min()
    result["metric.clip_ratio/high_max"] = (mean(high, dim=1)[rows] if rows.any() else nothing).max()
    return result


def _per_token(advantages_B: Tensor, mask: Tensor) -> Tensor:
    return advantages_B[:, None].expand(mask.shape) if advantages_B.dim() == 1 else advantages_B


def _forward(v: Variant) -> tuple[Tensor, Tensor, torch.nn.Module]:
    """Log-probs and entropies of the completions under the little model that lies beside the vectors."""
    model = load_model(v.root)
    tokens = torch.cat([v["prompt_ids"], v["completion_ids"]], 1)
    attention = torch.cat([v["prompt_mask"], v["completion_mask"]], 1)
    width = v["completion_ids"].shape[1]
    logits = model(input_ids=tokens, attention_mask=attention).logits[:, -width - 1 : -1]
    temperature = v.option("temperature", v.inputs.get("temperature", 1.0))
    policy_BT = token_logprobs(logits, token_ids_BT=v["completion_ids"], temperature=temperature)
    return policy_BT, entropies(logits, temperature=temperature), model


def forward(v: Variant) -> dict[str, Any]:
    policy_BT, entropy_BT, _ = _forward(v)
    mask = v.mask("completion_mask")
    return {
        "log_probs": masks.masked(policy_BT, mask_BT=mask),
        "entropy": masks.masked(entropy_BT, mask_BT=mask),
    }


def end_to_end_loss(v: Variant) -> dict[str, Any]:
    policy_BT, entropy_BT, model = _forward(v)
    mask = v.mask("completion_mask")
    result = loss_of(
        v,
        policy_BT,
        mask=mask,
        advantages=v["advantages"],
        old_BT=v["old_log_probs"],
        reference_BT=v["ref_log_probs"],
        entropy_BT=entropy_BT.detach(),
        rollout_BT=None,
        weights_BT=None,
        num_tokens=max(float(mask.sum()), 1.0),
    )
    result["loss"].backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return result | {
        "loss": result["loss"].detach(),
        "grad.lm_head": model.lm_head.weight.grad,
        "grad_norm.total": torch.stack([g.norm() for g in gradients]).norm(),
    }


_ZERO_STD = Uncompared(
    "counts spreads below 1e-8, where rounding decides; ours are `groups_without_variance`, by max == min"
)
_OF_COMPONENTS = Uncompared("of the weighted sum of normalised components; ours are of the reward")


def group_advantages(v: Variant) -> dict[str, Any]:
    """Rewards of several functions, NaN where one returned None; groups are runs of num_generations rows."""
    rewards_NK, weights = v["rewards_per_func"], v.option("reward_weights")
    size, scale = int(v["num_generations"]), v.option("scale_rewards")
    group_index_N = torch.arange(len(rewards_NK)) // size
    if v.option("multi_objective_aggregation") == "normalize_then_sum":
        names = tuple(map(str, range(len(weights))))
        result = batch.gdpo(
            rewards_NK,
            reward_component_names=names,
            group_index_N=group_index_N,
            component_weights=dict(zip(names, weights, strict=True)),
            epsilon=1e-4,
            zero_variance="rounding",
        )
        return {"advantages": result} | {name: _OF_COMPONENTS for name in v.wanted if name.startswith("metric.")}
    # A trajectory without any reward is no part of its group, and gets no advantage.
    has_reward_N = ~rewards_NK.isnan().all(1)
    rewards_N = (rewards_NK * torch.tensor(weights)).nansum(1)[has_reward_N]
    group_index_N = group_index_N[has_reward_N]
    if scale == "group":
        result = over_groups(group.grpo, rewards_N, group_index_N=group_index_N, epsilon=1e-4, zero_variance="rounding")
    elif scale == "batch":
        result = batch.group_mean_batch_std(rewards_N, group_index_N=group_index_N, epsilon=1e-4)
    else:
        result = over_groups(group.mean_centered, rewards_N, group_index_N=group_index_N)
    advantages_N = result.new_zeros(len(rewards_NK)).masked_scatter(has_reward_N, result)
    return {
        "advantages": advantages_N,
        "metric.reward": rewards_N.mean(),
        "metric.reward_std": rewards_N.std(),
        "metric.frac_reward_zero_std": _ZERO_STD,
    }


def importance_sampling_ratio(v: Variant) -> dict[str, Any]:
    """A token that the engine did not score counts as sampled by the learner's own policy."""
    old_BT, mask = v["old_log_probs"], v.mask()
    rollout_BT = torch.where(v["sampling_log_probs"].isnan(), old_BT, v["sampling_log_probs"])
    level, _, kind = v.option("mode").partition("_")
    low, high = v.option("clip_min") or 0.0, v.option("clip_max")
    given = {"rollout_logprobs_BT": rollout_BT, "loss_mask_BT": mask, "level": level}
    if kind == "truncate":
        weights = importance.tis(old_BT, **given, floor=low, cap=high)
    else:
        weights = importance.icepop(old_BT, **given, low=low, high=high)
    gap = (old_BT - v["sampling_log_probs"]).abs()[mask & ~v["sampling_log_probs"].isnan()]
    result = torch.where(mask, weights, torch.ones_like(weights)) if level == "token" else weights.amax(1, keepdim=True)
    counted = weights[mask] if level == "token" else result.flatten()
    return {
        "importance_sampling_ratio": result,
        "metric.sampling/sampling_logp_difference/mean": gap.mean(),
        "metric.sampling/sampling_logp_difference/max": gap.max(),
        "metric.sampling/importance_sampling_ratio/min": counted.min(),
        "metric.sampling/importance_sampling_ratio/mean": counted.mean(),
        "metric.sampling/importance_sampling_ratio/max": counted.max(),
    }


ADAPTERS = {
    "GRPOTrainer._compute_loss": compute_loss,
    "GRPOTrainer._get_per_token_logps_and_entropies": forward,
    "GRPOTrainer._generate_and_score_completions -> advantages": group_advantages,
    "GRPOTrainer._generate_and_score_completions -> importance_sampling_ratio": importance_sampling_ratio,
}
