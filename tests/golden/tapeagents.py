"""TapeAgents 0.1.16: the RL step on the small Llama, advantages from a data set's rewards, masked means."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner.algorithms import advantages, aggregation, kl, losses, masks
from learner.algorithms.logprobs import entropies, token_logprobs
from tests.golden.cases import Unsupported, Variant
from tests.golden.models import load_model


def rl_step(*, default_aggregation: str, clamp: float | None) -> Callable[[Variant], dict[str, Any]]:
    """Policy loss less β times k3 to the reference; `rewards` in the place of advantages, and its positive part, by option."""

    def adapter(v: Variant) -> dict[str, Any]:
        model = load_model(v.root)
        logits = model(input_ids=v["input_ids"], attention_mask=v["attention_mask"]).logits[:, :-1]
        policy_BT = token_logprobs(logits, token_ids_BT=v["input_ids"][:, 1:])
        mask = (v["labels"] != -100)[:, 1:]
        old_BT, reference_BT = v["old_logprobs"][:, 1:], v["ref_logprobs"][:, 1:]
        advantages_BT, rewards_BT = v["advantages"][:, 1:], v["rewards"][:, 1:]
        weights_BT = advantages_BT if v.option("use_advantages", True) else rewards_BT
        is_relu = v.option("relu_log_p_weights", False)
        counted_BT = weights_BT.clamp(min=0) if is_relu else weights_BT
        if v.option("algo", "grpo") == "grpo":
            epsilon = v.option("epsilon", 0.2)
            per_token = losses.ppo_clip(
                policy_BT,
                proximal_logprobs_BT=old_BT,
                advantages_BT=counted_BT,
                loss_mask_BT=mask,
                epsilon_low=epsilon,
                epsilon_high=epsilon,
            ).losses_BT
        else:
            per_token = losses.reinforce(
                policy_BT,
                advantages_BT=weights_BT,
                loss_mask_BT=mask,
                positive_part=is_relu,
            )
        limit = v.option("clamp_log_ratio_ref_new_value", clamp)
        estimate = kl.k3(policy_BT, other_logprobs_BT=reference_BT, loss_mask_BT=mask, log_ratio_clamp=limit)
        per_token = per_token + v.option("kl_coef", 0.1) * estimate
        kind = v.option("aggregate_loss", default_aggregation)
        if kind == "mean" and not mask.any(1).all():
            raise Unsupported("a row with nothing unmasked: TapeAgents asserts on its NaN")
        weights = {
            "mean": aggregation.sequence_mean,
            "token_mean": aggregation.token_mean,
            "sum": aggregation.sequence_sum_mean,
        }[kind](mask)
        loss = aggregation.aggregate(per_token, weights_BT=weights)
        loss.backward()
        by_sign = {"positive": mask & (counted_BT > 0), "negative": mask & (counted_BT < 0)}
        split = {
            f"stat.mean_new_logprobs_{sign}_log_p_weights": _mean_where(policy_BT.detach(), where)
            for sign, where in by_sign.items()
            if where.any()
        }
        return (
            split
            | _statistics(policy_BT.detach(), old_BT, reference_BT, mask, estimate.detach())
            | {
                "loss": loss.detach(),
                "stat.loss": loss.detach(),
                "stat.advantage": masks.masked_mean(advantages_BT, loss_mask_BT=mask),
                "stat.reward": masks.masked_mean(rewards_BT, loss_mask_BT=mask),
                "stat.entropy": masks.masked_mean(entropies(logits.detach()), loss_mask_BT=mask),
                "grad.lm_head": model.lm_head.weight.grad,
                "grad_norm.total": torch.stack(
                    [p.grad.norm() for p in model.parameters() if p.grad is not None]
                ).norm(),
                "grad_norm.embed": model.get_input_embeddings().weight.grad.norm(),
            }
        )

    return adapter


def _mean_where(x: Tensor, where: Tensor) -> Tensor:
    return masks.masked_mean(x, loss_mask_BT=where)


def _statistics(
    policy_BT: Tensor, old_BT: Tensor, reference_BT: Tensor, mask: Tensor, kl_BT: Tensor
) -> dict[str, Tensor]:
    def ratio(a: Tensor, b: Tensor) -> Tensor:
        return masks.log_ratio(a, denominator_BT=b, loss_mask_BT=mask).exp()

    new_old = ratio(policy_BT, old_BT)
    return {
        "stat.mean_new_logprobs": _mean_where(policy_BT, mask),
        "stat.mean_old_logprobs": _mean_where(old_BT, mask),
        "stat.mean_ref_logprobs": _mean_where(reference_BT, mask),
        "stat.ratio_new_old": _mean_where(new_old, mask),
        "stat.ratio_ref_new": _mean_where(ratio(reference_BT, policy_BT), mask),
        "stat.ratio_ref_old": _mean_where(ratio(reference_BT, old_BT), mask),
        "stat.max_ratio_new_old": new_old[mask].max(),
        "stat.max_new_log_probs": policy_BT[mask].max(),
        "stat.kl": _mean_where(kl_BT, mask),
        "stat.max_kl": kl_BT[mask].max(),
        "stat.min_kl": kl_BT[mask].min(),
    }


def implicit_kl(v: Variant) -> dict[str, Any]:
    return {"reward": _less_kl(v)}


def _less_kl(v: Variant) -> Tensor:
    """r − β·Σ k3(π_old, π_ref) over the row."""
    lengths = v["lengths"].tolist()
    sums = []
    for old, reference in zip(v["old_logprobs"].split(lengths), v["ref_logprobs"].split(lengths), strict=True):
        everything = torch.ones_like(old, dtype=torch.bool)
        sums.append(kl.k3(old, other_logprobs_BT=reference, loss_mask_BT=everything).sum())
    return v["reward"] - v.option("reward_minus_kl_coef") * torch.stack(sums)


def dataset_advantages(v: Variant) -> dict[str, Any]:
    rewards_N = _less_kl(v) if v.option("reward_minus_kl_coef") else v["reward"]
    names = sorted(set(v["group_id"]))
    group_index_N = torch.tensor([names.index(name) for name in v["group_id"]])
    result_N = advantages.over_groups(
        advantages.grpo, rewards_N, group_index_N=group_index_N, epsilon=1e-4, zero_variance="rounding"
    )
    return {"advantages": result_N.repeat_interleave(v["lengths"]), "reward_column_after": v["reward"]}


def masked_mean(v: Variant) -> dict[str, Any]:
    if not v.mask().any(1).all():
        raise Unsupported("the mean of nothing: TapeAgents gives NaN, we give 0")
    return means(*_entropy(v))


def means(x: Tensor, mask: Tensor) -> dict[str, Any]:
    return {"all": masks.masked_mean(x, loss_mask_BT=mask), "row": masks.masked_mean(x, loss_mask_BT=mask, dim=1)}


def masked_sum(v: Variant) -> dict[str, Any]:
    entropy, mask = _entropy(v)
    return {
        "all": masks.masked_sum(entropy, loss_mask_BT=mask),
        "row": masks.masked_sum(entropy, loss_mask_BT=mask, dim=1),
    }


def _entropy(v: Variant) -> tuple[Tensor, Tensor]:
    if "nan" not in v.name:
        return v["entropy"], v.mask()
    if v.mask()[0, 0]:
        raise Unsupported("an unmasked NaN: TapeAgents 0.1.16 takes it for 0, we let it be seen")
    entropy = v["entropy"].clone()
    entropy[0, 0] = torch.nan
    return entropy, v.mask()


def average_statistics(v: Variant) -> dict[str, Any]:
    raise Unsupported("picks minimum and maximum by the metric's name; our statistics state it per quantity")


def prepare_fields(v: Variant) -> dict[str, Any]:
    raise Unsupported("lays out a data set's columns; our trajectories carry log-probs per completion token")


ADAPTERS = {
    "tapeagents.finetune.rl.rl_step": rl_step(default_aggregation="mean", clamp=10.0),
    "calculate_rewards_with_implicit_kl": implicit_kl,
    "update_rewards_and_advantages": dataset_advantages,
    "masked_mean": masked_mean,
    "masked_sum": masked_sum,
    "get_avg_rl_stats": average_statistics,
    "prepare_rl_fields": prepare_fields,
}
