"""TRL 1.16.0: GRPOTrainer's loss, advantages, importance sampling, and its forward pass."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from learner.algorithms import advantages, aggregation, kl, losses, masks, ratios
from learner.algorithms.filters import high_entropy_tokens
from learner.algorithms.logprobs import entropies, token_logprobs
from learner.algorithms.sequence_losses import vespo_weights
from learner.algorithms.surrogates import TokenLosses
from tests.golden.cases import Unsupported, Variant
from tests.golden.models import load_model


def compute_loss(v: Variant) -> dict[str, Any]:
    if "prompt_ids" in v:
        return end_to_end_loss(v)
    return loss_of(
        v["log_probs"],
        config=v.config,
        mask=v.mask(),
        advantages_BT=_per_token(v["advantages"], v.mask()),
        old_BT=v["old_log_probs"] if v.option("old_per_token_logps", True) else v["log_probs"].detach(),
        reference_BT=v["ref_log_probs"],
        entropy_BT=v["entropy"],
        rollout_BT=v["rollout_log_probs"],
        weights_BT=v["importance_sampling_ratio"],
        num_tokens=max(float(v["num_items_in_batch"]), 1.0),
    )


def loss_of(
    policy_BT: Tensor,
    *,
    config: Mapping[str, Any],
    mask: Tensor,
    advantages_BT: Tensor,
    old_BT: Tensor,
    reference_BT: Tensor,
    entropy_BT: Tensor,
    rollout_BT: Tensor | None,
    weights_BT: Tensor | None,
    num_tokens: float,
) -> dict[str, Any]:
    given = {"advantages_BT": advantages_BT, "loss_mask_BT": mask}
    token, metrics = _policy_loss(policy_BT, config, given | {"proximal_logprobs_BT": old_BT}, weights_BT)
    per_token = token.losses_BT
    if config.get("top_entropy_quantile", 1.0) < 1:
        chosen = high_entropy_tokens(entropy_BT, loss_mask_NT=mask, share=config["top_entropy_quantile"])
        per_token = masks.masked(per_token, loss_mask_BT=chosen.gradient_NT)
    if config.get("off_policy_mask_threshold") is not None:
        sampled_BT = old_BT if rollout_BT is None else rollout_BT
        keep = ratios.opsm(
            policy_BT, rollout_logprobs_BT=sampled_BT, **given, delta=config["off_policy_mask_threshold"]
        )
        per_token = per_token * keep
    if config.get("use_vllm") and config.get("vllm_importance_sampling_correction") and config["loss_type"] != "vespo":
        per_token = per_token * weights_BT
    if config["beta"]:
        estimate = _kl(policy_BT, config, {"other_logprobs_BT": reference_BT, "loss_mask_BT": mask}, old_BT)
        per_token = per_token + config["beta"] * estimate
        unweighted = _kl(policy_BT, config, {"other_logprobs_BT": reference_BT, "loss_mask_BT": mask}, old_BT)
        metrics["metric.kl"] = masks.masked_mean(unweighted, loss_mask_BT=mask)
    loss = aggregation.aggregate(per_token, weights_BT=_weights(config, mask, num_tokens))
    metrics["metric.entropy"] = masks.masked_mean(entropy_BT, loss_mask_BT=mask)
    if config.get("entropy_coef"):
        metrics["metric.policy_loss"] = loss
        loss = loss - config["entropy_coef"] * aggregation.aggregate(
            entropy_BT, weights_BT=aggregation.token_mean(mask)
        )
    return metrics | {"loss": loss}


def _policy_loss(
    policy_BT: Tensor, config: Mapping[str, Any], given: dict[str, Tensor], weights_BT: Tensor | None
) -> tuple[TokenLosses, dict[str, Any]]:
    kind = config["loss_type"]
    old_BT, mask = given["proximal_logprobs_BT"], given["loss_mask_BT"]
    if kind == "cispo":
        token = losses.cispo(policy_BT, **given, epsilon_max=config["epsilon_high"])
        counted = token.clipped_high_BT & (given["advantages_BT"] > 0)
        return token, {"metric.cispo_clip_ratio": masks.masked_mean(counted.double(), loss_mask_BT=mask)}
    if kind == "sapo":
        taus = {"tau_positive": config["sapo_temperature_pos"], "tau_negative": config["sapo_temperature_neg"]}
        return TokenLosses(losses.sapo(policy_BT, **given, **taus)), {}
    if kind == "vespo":
        return _vespo(policy_BT, config, given, weights_BT)
    bounds = {
        "epsilon_low": config["epsilon_low"],
        "epsilon_high": config["epsilon_high"],
        "delta": config.get("delta"),
    }
    is_sequence = config["importance_sampling_level"] == "sequence"
    token = (losses.gspo if is_sequence else losses.ppo_clip)(policy_BT, **given, **bounds)
    ratio = masks.log_ratio(policy_BT, denominator_BT=old_BT, loss_mask_BT=mask)
    if is_sequence:
        ratio = masks.masked_mean(ratio, loss_mask_BT=mask, dim=1)[:, None]
    return token, _clip_ratios(ratio.exp(), given["advantages_BT"], mask, bounds, is_sequence=is_sequence)


def _clip_ratios(
    ratio: Tensor, A: Tensor, mask: Tensor, bounds: dict[str, Any], *, is_sequence: bool
) -> dict[str, Tensor]:
    """Counts by the sign of the advantage; under a sequence ratio the mean is over rows."""
    if is_sequence and bool((A[:, :1] != A)[mask].any()):
        return {}
    A, mask = (A[:, :1], torch.ones_like(A[:, :1], dtype=torch.bool)) if is_sequence else (A, mask)
    ratio = ratio if bounds["delta"] is None else ratio.clamp(max=bounds["delta"])
    low = (ratio < 1 - bounds["epsilon_low"]) & (A < 0)
    high = (ratio > 1 + bounds["epsilon_high"]) & (A > 0)
    return {
        f"metric.clip_ratio/{name}_mean": masks.masked_mean(which.double(), loss_mask_BT=mask)
        for name, which in (("low", low), ("high", high), ("region", low | high))
    }


def _vespo(
    policy_BT: Tensor, config: Mapping[str, Any], given: dict[str, Tensor], weights_BT: Tensor | None
) -> tuple[TokenLosses, dict[str, Any]]:
    """log μ is log π_old less the log of the importance ratio that the trainer was given."""
    old_BT, mask = given["proximal_logprobs_BT"], given["loss_mask_BT"]
    rollout_BT = old_BT if weights_BT is None else old_BT - weights_BT.log()
    inputs = {"rollout_logprobs_BT": rollout_BT, "advantages_BT": given["advantages_BT"], "loss_mask_BT": mask}
    shape = {
        f"{ours}_{sign}": config[f"vespo_{ours}_{sign[:3]}"]
        for ours in ("k", "lambda")
        for sign in ("positive", "negative")
    }
    phi = vespo_weights(policy_BT, **inputs, **shape)
    is_per_row = bool((given["advantages_BT"] == given["advantages_BT"][:, :1]).all())
    phi_mean = (
        torch.where(mask.any(1), masks.masked_mean(phi, loss_mask_BT=mask, dim=1), 1).mean()
        if is_per_row
        else masks.masked_mean(phi, loss_mask_BT=mask)
    )
    return TokenLosses(losses.vespo(policy_BT, **inputs, **shape)), {"metric.vespo/phi_seq_mean": phi_mean}


def _kl(policy_BT: Tensor, config: Mapping[str, Any], given: dict[str, Tensor], old_BT: Tensor) -> Tensor:
    if config.get("use_bias_correction_kl", True):
        return kl.unbiased(policy_BT, **given, proximal_logprobs_BT=old_BT, ratio_gradient=True)
    return kl.k3(policy_BT, **given)


def _weights(config: Mapping[str, Any], mask: Tensor, num_tokens: float) -> Tensor:
    kind = config["loss_type"]
    if kind in ("grpo", "sapo"):
        return aggregation.sequence_mean(mask, empty_rows="count")
    if kind == "bnpo":
        return aggregation.token_mean(mask)
    if kind == "dr_grpo":
        return aggregation.sequence_sum_over_length(mask, max_length=config["max_completion_length"])
    if kind == "luspo":
        return aggregation.sequence_sum_mean(mask, empty_rows="count")
    if kind in ("dapo", "cispo", "vespo"):
        # Tokens of the whole generation batch, of which these rows may be a part.
        return aggregation.sum(mask) / num_tokens
    raise Unsupported(f"loss_type {kind}")


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
        "log_probs": masks.masked(policy_BT, loss_mask_BT=mask),
        "entropy": masks.masked(entropy_BT, loss_mask_BT=mask),
    }


def end_to_end_loss(v: Variant) -> dict[str, Any]:
    policy_BT, entropy_BT, model = _forward(v)
    mask = v.mask("completion_mask")
    result = loss_of(
        policy_BT,
        config=v.config,
        mask=mask,
        advantages_BT=_per_token(v["advantages"], mask),
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


def group_advantages(v: Variant) -> dict[str, Any]:
    """Rewards of several functions, NaN where one returned None; groups are runs of num_generations rows."""
    rewards_NK, weights = v["rewards_per_func"], v.option("reward_weights")
    size = int(v["num_generations"])
    group_index_N = torch.arange(len(rewards_NK)) // size
    if v.option("multi_objective_aggregation") == "normalize_then_sum":
        if rewards_NK.isnan().any():
            raise Unsupported("components that are missing for some trajectories")
        result = advantages.gdpo(
            rewards_NK,
            group_index_N=group_index_N,
            component_weights=tuple(weights),
            epsilon=1e-4,
            zero_variance="rounding",
        )
        return {"advantages": result}
    # A trajectory without any reward is no part of its group, and gets no advantage.
    has_reward_N = ~rewards_NK.isnan().all(1)
    rewards_N = (rewards_NK * torch.tensor(weights)).nansum(1)[has_reward_N]
    group_index_N = group_index_N[has_reward_N]
    scale = v.option("scale_rewards")
    if scale == "group":
        result = advantages.over_groups(
            advantages.grpo, rewards_N, group_index_N=group_index_N, epsilon=1e-4, zero_variance="rounding"
        )
    elif scale == "batch":
        result = advantages.group_mean_batch_std(rewards_N, group_index_N=group_index_N, epsilon=1e-4)
    else:
        result = advantages.over_groups(advantages.mean_centered, rewards_N, group_index_N=group_index_N)
    advantages_N = result.new_zeros(len(rewards_NK)).masked_scatter(has_reward_N, result)
    return {"advantages": advantages_N, "metric.reward": rewards_N.mean()}


def importance_sampling_ratio(v: Variant) -> dict[str, Any]:
    """A token that the engine did not score counts as sampled by the learner's own policy."""
    old_BT, mask = v["old_log_probs"], v.mask()
    rollout_BT = torch.where(v["sampling_log_probs"].isnan(), old_BT, v["sampling_log_probs"])
    level, _, kind = v.option("mode").partition("_")
    low, high = v.option("clip_min") or 0.0, v.option("clip_max")
    given = {"rollout_logprobs_BT": rollout_BT, "loss_mask_BT": mask, "level": level}
    if kind == "truncate":
        weights = ratios.tis(old_BT, **given, floor=low, cap=high)
    else:
        weights = ratios.icepop(old_BT, **given, low=low, high=high)
    if level == "token":
        return {"importance_sampling_ratio": torch.where(mask, weights, torch.ones_like(weights))}
    return {"importance_sampling_ratio": weights.amax(1, keepdim=True)}


ADAPTERS = {
    "trl.GRPOTrainer._compute_loss": compute_loss,
    "GRPOTrainer._compute_loss": compute_loss,
    "GRPOTrainer._get_per_token_logps_and_entropies": forward,
    "GRPOTrainer._generate_and_score_completions -> advantages": group_advantages,
    "GRPOTrainer._generate_and_score_completions -> importance_sampling_ratio": importance_sampling_ratio,
}
