"""TapeAgents 0.1.16: the RL step on the small Llama, advantages from a data set's rewards, masked means."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from learner.algorithms import kl, masks
from learner.algorithms.advantages import group
from learner.algorithms.groups import over_groups
from tests.golden.cases import Uncompared, Unsupported, Variant
from tests.golden.logprobs import entropies, token_logprobs
from tests.golden.models import load_model
from tests.golden.through_objective import Step


def rl_step(*, default_aggregation: str, clamp: float | None) -> Callable[[Variant], dict[str, Any]]:
    """Policy loss less β times k3 to the reference; `rewards` in the place of advantages, and its positive part, by option."""

    def adapter(v: Variant) -> dict[str, Any]:
        model = load_model(v.root)
        logits = model(input_ids=v["input_ids"], attention_mask=v["attention_mask"]).logits[:, :-1]
        policy_BT = token_logprobs(logits, token_ids_BT=v["input_ids"][:, 1:])
        mask = (v["labels"] != -100)[:, 1:]
        advantages_BT, rewards_BT = v["advantages"][:, 1:], v["rewards"][:, 1:]
        weights_BT = advantages_BT if v.option("use_advantages", True) else rewards_BT
        is_relu = v.option("relu_log_p_weights", False)
        counted_BT = weights_BT.clamp(min=0) if is_relu else weights_BT
        # REINFORCE takes the positive part itself, which is here seen to be the same.
        is_grpo = v.only("algo", "grpo", "reinforce") == "grpo"
        step = Step(
            policy_BT=policy_BT,
            old_BT=v["old_logprobs"][:, 1:],
            advantages_BT=counted_BT if is_grpo else weights_BT,
            mask=mask,
            reference_BT=v["ref_logprobs"][:, 1:],
        )
        epsilon = v.option("epsilon", 0.2)
        clipped = {"name": "ppo_clip", "epsilon_low": epsilon, "epsilon_high": epsilon}
        limit = v.option("clamp_log_ratio_ref_new_value", clamp)
        kind = v.option("aggregate_loss", default_aggregation)
        if kind == "mean" and not mask.any(1).all():
            raise Unsupported("a row with nothing unmasked: TapeAgents asserts on its NaN")
        algorithm: dict[str, Any] = {
            "policy_loss": clipped if is_grpo else {"name": "reinforce", "positive_part": is_relu},
            "aggregation": {
                "name": {"mean": "sequence_mean", "token_mean": "token_mean", "sum": "sequence_sum_mean"}[kind]
            }
            | ({"empty_rows": "count"} if kind == "sum" else {}),
        }
        if coefficient := v.option("kl_coef", 0.1):
            algorithm["kl"] = {"loss": {"coefficient": coefficient, "estimator": "k3", "log_ratio_clamp": limit}}
        loss = step.loss(algorithm)
        loss.backward()
        gradients = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        of_weights = {"advantage": advantages_BT, "reward": rewards_BT, "entropy": entropies(logits.detach())}
        return (
            {f"stat.{name}": masks.masked_mean(x, mask_BT=mask) for name, x in of_weights.items()}
            | _extremes(mask, advantage=advantages_BT, reward=rewards_BT)
            | _by_sign(policy_BT.detach(), counted_BT, mask)
            | _statistics(replace(step, policy_BT=policy_BT.detach()), clamp=limit)
            | _surrogates(replace(step, policy_BT=policy_BT.detach()), epsilon=epsilon if is_grpo else None)
            | {f"stat.{name}": loss.detach() for name in ("loss", "max_loss", "min_loss")}
            | {
                "loss": loss.detach(),
                "stat.num_nans": torch.zeros(()),
                "grad.lm_head": model.lm_head.weight.grad,
                "grad_norm.total": torch.stack(gradients).norm(),
                "grad_norm.embed": model.get_input_embeddings().weight.grad.norm(),
            }
        )

    return adapter


def _extremes(mask: Tensor, **quantities: Tensor) -> dict[str, Tensor]:
    highest = {f"stat.max_{name}": x[mask].max() for name, x in quantities.items()}
    return highest | {f"stat.min_{name}": x[mask].min() for name, x in quantities.items()}


def _by_sign(policy_BT: Tensor, weights_BT: Tensor, mask: Tensor) -> dict[str, Any]:
    """Mean log-probs where weights have a sign; 0 where none has, masked ones included."""
    found: dict[str, Any] = {}
    for sign, where in (("positive", weights_BT > 0), ("negative", weights_BT < 0)):
        is_lost = bool(where.any()) and not bool((where & mask).any())
        mean = masks.masked_mean(policy_BT, mask_BT=where & mask)
        found[f"stat.mean_new_logprobs_{sign}_log_p_weights"] = (
            Uncompared("the mean of nothing: TapeAgents gives NaN, a run reports none") if is_lost else mean
        )
    return found


def _statistics(step: Step, *, clamp: float | None) -> dict[str, Tensor]:
    mask = step.mask

    def mean(x: Tensor) -> Tensor:
        return masks.masked_mean(x, mask_BT=mask)

    def ratio(a: Tensor, b: Tensor) -> Tensor:
        return masks.log_ratio(a, over_BT=b, mask_BT=mask).exp()

    new_old, estimate = ratio(step.policy_BT, step.old_BT), step.kl(log_ratio_clamp=clamp)
    held = (step.reference_BT - step.policy_BT).abs() > (torch.inf if clamp is None else clamp)
    return {
        "stat.mean_new_logprobs": mean(step.policy_BT),
        "stat.mean_old_logprobs": mean(step.old_BT),
        "stat.mean_ref_logprobs": mean(step.reference_BT),
        "stat.ratio_new_old": mean(new_old),
        "stat.ratio_ref_new": mean(ratio(step.reference_BT, step.policy_BT)),
        "stat.ratio_ref_old": mean(ratio(step.reference_BT, step.old_BT)),
        "stat.max_ratio_new_old": new_old[mask].max(),
        "stat.max_new_log_probs": step.policy_BT[mask].max(),
        "stat.kl": mean(estimate),
        "stat.clamp_log_ratio_ref_new_indicators": mean(held.double()),
        **_extremes(mask, kl=estimate),
    }


def _surrogates(step: Step, *, epsilon: float | None) -> dict[str, Tensor]:
    """Means of ρA and of clip(ρ)A, which are 0 for REINFORCE."""
    if epsilon is None:
        return {"stat.surr1": torch.zeros(()), "stat.surr2": torch.zeros(())}
    bounds = {"epsilon_low": epsilon, "epsilon_high": epsilon}
    plain = step.tokens({"name": "importance_sampling"}).losses_BT
    clipped = step.tokens({"name": "clipped_ratio", **bounds}).losses_BT
    return {
        "stat.surr1": masks.masked_mean(-plain, mask_BT=step.mask),
        "stat.surr2": masks.masked_mean(-clipped, mask_BT=step.mask),
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
    result_N = over_groups(group.grpo, rewards_N, group_index_N=group_index_N, epsilon=1e-4, zero_variance="rounding")
    return {"advantages": result_N.repeat_interleave(v["lengths"]), "reward_column_after": v["reward"]}


def masked_mean(v: Variant) -> dict[str, Any]:
    if not v.mask().any(1).all():
        raise Unsupported("the mean of nothing: TapeAgents gives NaN, we give 0")
    if has_nan(v) and v.mask()[0, 0]:
        raise Unsupported("an unmasked NaN: TapeAgents 0.1.16 takes it for 0, we let it be seen")
    return means(entropy_of(v), v.mask())


def has_nan(v: Variant) -> bool:
    return v.only("note", None, "entropy[0,0]=NaN") is not None


def entropy_of(v: Variant) -> Tensor:
    entropy = v["entropy"].clone()
    entropy[0, 0] = torch.nan if has_nan(v) else entropy[0, 0]
    return entropy


def means(x: Tensor, mask: Tensor) -> dict[str, Any]:
    return {"all": masks.masked_mean(x, mask_BT=mask), "row": masks.masked_mean(x, mask_BT=mask, dim=1)}


def masked_sum(v: Variant) -> dict[str, Any]:
    entropy, mask = entropy_of(v), v.mask()
    return {
        "all": masks.masked_sum(entropy, mask_BT=mask),
        "row": masks.masked_sum(entropy, mask_BT=mask, dim=1),
    }


def average_statistics(v: Variant) -> dict[str, Any]:
    raise Unsupported("picks minimum and maximum by the metric's name; our statistics state it per quantity")


def prepare_fields(v: Variant) -> dict[str, Any]:
    raise Unsupported("lays out a data set's columns; our trajectories carry log-probs per completion token")


ADAPTERS = {
    "rl_step": rl_step(default_aggregation="mean", clamp=10.0),
    "calculate_rewards_with_implicit_kl": implicit_kl,
    "update_rewards_and_advantages": dataset_advantages,
    "masked_mean": masked_mean,
    "masked_sum": masked_sum,
    "get_avg_rl_stats": average_statistics,
    "prepare_rl_fields": prepare_fields,
}
