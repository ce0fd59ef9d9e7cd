"""verl's advantages, and the masked statistics that they whiten with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner.algorithms import masks
from learner.algorithms.advantages import batch, group
from learner.algorithms.advantages.returns import cumulative_returns, gae_scan
from learner.algorithms.groups import over_groups
from tests.golden import peer_parts
from tests.golden.cases import Variant


def _masked_whiten(x: Tensor, mask: Tensor, *, center: bool = True) -> Tensor:
    return peer_parts.whiten_padding_too(x, loss_mask_NT=mask, center=center)


def gae_advantages(v: Variant) -> dict[str, Any]:
    given = {"gamma": v.option("gamma"), "lambda_": v.option("lam"), "holes": "skip"}
    result = gae_scan(v["token_rewards"], values_NT=v["values"], loss_mask_NT=v.mask(), **given)
    return {"advantages": _masked_whiten(result, v.mask()), "returns": result + v["values"]}


def masked_mean(v: Variant) -> dict[str, Any]:
    return {
        "mean": masks.masked_mean(v["entropy"], mask_BT=v.mask()),
        "mean_axis1": masks.masked_mean(v["entropy"], mask_BT=v.mask(), dim=1),
    }


def masked_var(v: Variant) -> dict[str, Any]:
    v.only("unbiased", [True, False])
    return {
        "unbiased": peer_parts.masked_var(v["entropy"], loss_mask_BT=v.mask(), ddof=1),
        "biased": peer_parts.masked_var(v["entropy"], loss_mask_BT=v.mask(), ddof=0),
    }


def masked_whiten(v: Variant) -> dict[str, Any]:
    v.only("shift_mean", [True, False])
    return {
        "shift": _masked_whiten(v["entropy"], v.mask()),
        "noshift": _masked_whiten(v["entropy"], v.mask(), center=False),
    }


def group_advantage(compute: Callable[..., Tensor]) -> Callable[[Variant], dict[str, Any]]:
    """Around an advantage per trajectory: verl sums rewards over the row, and copies the advantage to every token."""

    def adapter(v: Variant) -> dict[str, Any]:
        rewards, groups = v["token_rewards"].sum(1), torch.tensor(v["group_index"])
        per_token = compute(v, rewards, groups)[:, None] * v.mask()
        return {"advantages": per_token, "returns": per_token}

    return adapter


def grpo(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    epsilon = v.option("epsilon", 1e-6)
    if not v.option("norm_adv_by_std_in_grpo", True):
        return over_groups(group.mean_centered, rewards, group_index_N=groups, singleton="raw")
    settings = {"epsilon": epsilon, "singleton": "raw", "zero_variance": "rounding"}
    return over_groups(group.grpo, rewards, group_index_N=groups, **settings)


def passk(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return over_groups(group.pass_at_k, rewards, group_index_N=groups, normalise=True)


def rloo(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return over_groups(group.rloo, rewards, group_index_N=groups, singleton="raw")


def rloo_vectorized(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return over_groups(group.rloo, rewards, group_index_N=groups, singleton="zero")


def opo(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return batch.opo(rewards, loss_mask_NT=v.mask(), group_index_N=groups)


def gpg(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return batch.gpg(rewards, group_index_N=groups)


def whitened(compute: Callable[..., Tensor]) -> Callable[[Variant], dict[str, Any]]:
    """An advantage per trajectory, copied to the tokens and whitened over them."""

    def adapter(v: Variant) -> dict[str, Any]:
        rewards, groups = v["token_rewards"].sum(1), torch.tensor(v["group_index"])
        per_token = compute(v, rewards, groups)[:, None] * v.mask()
        result = masks.masked(_masked_whiten(per_token, v.mask()), mask_BT=v.mask())
        return {"advantages": result, "returns": result}

    return adapter


def centred(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return over_groups(group.mean_centered, rewards, group_index_N=groups, singleton="raw")


def reinforce_plus_plus(v: Variant) -> dict[str, Any]:
    returns = cumulative_returns(v["token_rewards"], loss_mask_NT=v.mask(), gamma=v.option("gamma"))
    result = masks.masked(_masked_whiten(returns, v.mask()), mask_BT=v.mask())
    return {"advantages": result, "returns": returns}


def remax(v: Variant) -> dict[str, Any]:
    returns = cumulative_returns(v["token_rewards"], loss_mask_NT=v.mask())
    result = peer_parts.remax(returns, greedy_rewards_N=v["reward_baselines"], loss_mask_NT=v.mask())
    return {"advantages": result, "returns": returns}


def optimal_token_baseline(v: Variant) -> dict[str, Any]:
    returns = cumulative_returns(v["token_rewards"], loss_mask_NT=v.mask())
    result = peer_parts.optimal_token_baseline(
        returns,
        logprobs_NT=v["old_log_probs"],
        sum_squared_probs_NT=v["sum_pi_squared"],
        loss_mask_NT=v.mask(),
        group_index_N=torch.tensor(v["group_index"]),
    )
    return {"advantages": result, "returns": returns}


def gdpo(v: Variant) -> dict[str, Any]:
    v.only("note", "fallback single reward")
    return whitened(grpo)(v)
