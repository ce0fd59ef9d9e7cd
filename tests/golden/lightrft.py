"""LightRFT at commit 30bc53d: losses, models/utils, experience makers and advantage calculators."""

from typing import Any

import torch
from torch import Tensor

from learner.algorithms import kl, masks
from learner.algorithms.advantages import group
from learner.algorithms.advantages.returns import gae_scan, return_scan
from learner.algorithms.batch_rules import filters, shaping
from learner.algorithms.groups import over_groups
from learner.algorithms.losses.values import value_clip
from learner.algorithms.moments import RunningMoments
from tests.golden import peer_parts
from tests.golden.cases import Uncompared, Unsupported, Variant
from tests.golden.kl_controllers import adaptive_kl, fixed_kl
from tests.golden.openrlhf import gae_advantages, gae_through_holes, returns_of, reward_less_kl
from tests.golden.through_objective import Step, advantages_by_objective, advantages_less_kl, aggregated

_AGGREGATION = {"name": "sequence_mean"}


def _refuse_empty_rows(mask: Tensor) -> None:
    if not mask.any(1).all():
        raise Unsupported("a row with nothing unmasked: LightRFT gives NaN, we leave the row out")


def _mask(v: Variant) -> Tensor:
    """Everything where the function is called without its mask."""
    return v.mask() if v.only("action_mask", "in.mask", None) else torch.ones_like(v.mask())


def policy_loss(v: Variant) -> dict[str, Any]:
    mask, epsilon = _mask(v), v.option("clip_eps")
    _refuse_empty_rows(mask)
    bounds = {"epsilon_low": epsilon, "epsilon_high": epsilon}
    is_cpg = v.option("use_cpg_loss", False)
    policy = {"name": "cpgd", **bounds, "offset": "old_logprob"} if is_cpg else {"name": "ppo_clip", **bounds}
    algorithm: dict[str, Any] = {"policy_loss": policy, "aggregation": _AGGREGATION}
    if (share := v.option("high_entropy_ratio")) is not None and share > 0:
        algorithm["filters"] = [_high_entropy(share)]
    step = Step(
        policy_BT=v["log_probs"],
        old_BT=v["old_log_probs"],
        advantages_BT=v["advantages"],
        mask=mask,
        entropies_BT=v["entropy"],
    )
    return {"loss": step.loss(algorithm)}


def _high_entropy(share: float) -> dict[str, Any]:
    return {"name": "high_entropy_tokens", "share": share, "over": "sequence", "denominator": "kept"}


def high_entropy_mask(v: Variant) -> dict[str, Any]:
    mask, share = v.mask(), v.option("ratio")
    if share <= 0:
        return {"mask": mask}
    settings = {name: value for name, value in _high_entropy(share).items() if name != "name"}
    return {"mask": filters.high_entropy_tokens(v["entropy"], loss_mask_NT=mask, **settings).gradient_NT}


def value_loss(v: Variant) -> dict[str, Any]:
    _refuse_empty_rows(v.mask())
    token = value_clip(
        v["values"],
        old_values_BT=v["old_values"],
        returns_BT=v["returns"],
        loss_mask_BT=v.mask(),
        clip_range=v.option("clip_eps"),
    )
    return {"loss": aggregated(token.losses_BT, _AGGREGATION, v.mask())}


def approx_kl(v: Variant) -> dict[str, Any]:
    mask = _mask(v)
    v.only("loss_for_grad", "kl.sum()")
    estimator = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}[v.option("kl_estimator")]
    estimate = estimator(v["log_probs"], other_logprobs_BT=v["ref_log_probs"], loss_mask_BT=mask)
    return {"kl": estimate, "loss": estimate.sum()}


def compute_reward(v: Variant) -> dict[str, Any]:
    """Called without a mask, the score stands on the column that the row's length names (for length 0 the last), whatever is there."""
    mask, clip_range = v.mask(), v.option("reward_clip_range")
    reach, lengths = mask, v.option("num_actions")
    if v.only("action_mask", "in.mask", None) is None:
        last_N = (torch.tensor(lengths) - 1) % mask.shape[1]
        reach = torch.arange(mask.shape[1]) <= last_N[:, None]
    v.only("kl", "k1 masked")
    estimate = kl.k1(v["log_probs"], other_logprobs_BT=v["ref_log_probs"], loss_mask_BT=mask)
    return {"reward": reward_less_kl(v["scores"], estimate, reach, v.option("kl_coef"), clip_range)}


def masked_mean(v: Variant) -> dict[str, Any]:
    if not v.mask().any(1).all():
        raise Unsupported("the mean of nothing: LightRFT gives NaN, we give 0")
    return {
        "all": masks.masked_mean(v["entropy"], mask_BT=v.mask()),
        "row": masks.masked_mean(v["entropy"], mask_BT=v.mask(), dim=1),
        "nomask": v["entropy"].mean(1),
    }


def gae_calculator(v: Variant) -> dict[str, Any]:
    result, returns = gae_through_holes(v, v["token_rewards"], v.mask(), gamma=v.option("gamma"))
    counted = Uncompared(
        "counted after clipping, so always 0; a run's advantages are reported with minimum and maximum"
    )
    return {"advantages": _norm_and_clip(result, v.mask(), v), "returns": returns, "clip_frac": counted}


def _norm_and_clip(result: Tensor, mask: Tensor, v: Variant, *, may_norm: bool = True) -> Tensor:
    if v.option("advantages_norm") and may_norm:
        result = _whiten_by_std(result, mask)
    if v.option("advantage_clip"):
        result = shaping.advantage_clip(result, low=-v.option("advantage_clip"), high=v.option("advantage_clip"))
    return result


def _whiten_by_std(x: Tensor, mask: Tensor) -> Tensor:
    return peer_parts.whiten_padding_too(x, loss_mask_NT=mask, epsilon_mode="after")


def _whiten_cross_batch(x: Tensor, mask: Tensor, v: Variant) -> Tensor:
    """Population variance, held at 1e-8, over the tokens of all experiences; padding is shifted and scaled too."""
    scale = not v.option("no_advantage_std_norm", False)
    return peer_parts.whiten_padding_too(x, loss_mask_NT=mask, scale=scale, ddof=0, epsilon_mode="clamp")


def cross_batch(v: Variant) -> dict[str, Any]:
    v.only("split", "first ceil(B/2) rows / rest")
    v.without_effect("no_advantage_std_norm")
    if v.option("estimator") not in ("gae", "reinforce", "reinforce_baseline"):
        return {"advantages": v["advantages"]}
    return {"advantages": _whiten_cross_batch(v["advantages"], v.mask(), v)}


def _shaped(rewards_N: Tensor, v: Variant, *, epsilon: float) -> Tensor:
    """Rewards of a prompt's samples, normalised the estimator's way. A group of one divides 0 by 0 there."""
    estimator, size = v.option("advantage_estimator"), v.option("n_samples_per_prompt")
    group_index_N = torch.arange(len(rewards_N)) // size
    if size == 1 and estimator in ("group_norm", "grpo", "rloo"):
        raise Unsupported("a group of one: LightRFT gives NaN, we give 0 or an error")
    if estimator == "rloo":
        return over_groups(group.rloo, rewards_N, group_index_N=group_index_N)
    if estimator == "reinforce_baseline":
        return over_groups(group.mean_centered, rewards_N, group_index_N=group_index_N)
    if estimator in ("group_norm", "grpo"):
        return over_groups(
            group.grpo, rewards_N, group_index_N=group_index_N, epsilon=epsilon, zero_variance="rounding"
        )
    return rewards_N


def process_experiences(v: Variant) -> dict[str, Any]:
    return {"rewards": _shaped(v["rewards"], v, epsilon=1e-8)}


def preprocess_rewards(v: Variant) -> dict[str, Any]:
    return {"rewards": _shaped(v["rewards"], v, epsilon=1e-9)}


def _gamma(v: Variant) -> float:
    """Only reinforce, and what is built on it, discounts."""
    return 1.0 if v.option("advantage_estimator") == "reinforce_baseline" else v.option("gamma")


def full(v: Variant) -> dict[str, Any]:
    """Shaping, KL, returns, whitening inside each experience, clipping, whitening across experiences."""
    estimator, mask = v.option("advantage_estimator"), v.mask()
    v.without_effect("gamma", "lambd", "advantages_norm", "advantage_clip")
    if estimator == "cpgd":
        raise Unsupported(
            "LightRFT's CPGD advantages are 0 by a defect: it sums the batch's rewards; ours is advantage `cpgd`"
        )
    token_rewards = reward_less_kl(_shaped(v["rewards"], v, epsilon=1e-9), v["kl"], mask, v.option("kl_coef"))
    if estimator == "gae":
        before, returns = gae_through_holes(v, token_rewards, mask, gamma=v.option("gamma"))
    else:
        returns = return_scan(token_rewards, loss_mask_NT=mask, gamma=_gamma(v), holes="discount")
        before = torch.where(mask, _by_objective(v, mask, otherwise=returns), returns)
    parts = zip(_split(before, v), _split(mask, v), strict=True)
    may_norm = estimator not in ("group_norm", "grpo")
    before = torch.cat([_norm_and_clip(part, part_mask, v, may_norm=may_norm) for part, part_mask in parts])
    whitens = estimator in ("gae", "reinforce", "reinforce_baseline")
    after = _whiten_cross_batch(before, mask, v) if whitens else before
    return {"advantages_pre_xbatch": before, "advantages": after, "returns": returns}


_BY_GROUP = {
    "rloo": "rloo",
    "reinforce_baseline": "mean_centered",
    "group_norm": {"name": "grpo", "epsilon": 1e-9, "zero_variance": "rounding"},
}


def _by_objective(v: Variant, mask: Tensor, *, otherwise: Tensor) -> Tensor:
    """A run's advantages with the KL credited `to_go`, where a run takes these rows and this coefficient."""
    advantage, size = _BY_GROUP.get(v.option("advantage_estimator")), v.option("n_samples_per_prompt")
    if advantage is None or _gamma(v) != 1.0 or v.option("kl_coef") <= 0 or not mask.any(1).all():
        return otherwise
    kl_terms = {"reward": {"coefficient": v.option("kl_coef"), "estimator": "k1", "credit": "to_go"}}
    found = advantages_less_kl(
        {"advantage": advantage, "kl": kl_terms},
        rewards_N=v["rewards"],
        group_index_N=torch.arange(len(mask)) // size,
        kl_NT=v["kl"],
        mask=mask,
    )
    return found.to(otherwise.dtype)


def _split(x: Tensor, v: Variant) -> tuple[Tensor, ...]:
    return x.chunk(int(v["n_experiences"]))


def fast_path(v: Variant) -> dict[str, Any]:
    """The fast experience maker. Gamma reaches the first experience only; dynamic sampling drops groups without variance."""
    estimator, mask, rewards_N = v.option("advantage_estimator"), v.mask(), v["rewards"]
    v.without_effect("overlong_buffer_len", "overlong_buffer_penalty_factor", "reward_running_norm_minus_mean")
    v.without_effect("gamma", "lambd", "advantages_norm", "advantage_clip", "no_advantage_std_norm")
    v.without_effect("micro_train_batch_size", "dynamic_sampling")
    if v.option("overlong_buffer"):
        rewards_N = shaping.overlong_penalty(
            rewards_N,
            completion_lengths_G=mask.sum(1),
            max_length=mask.shape[1],
            cache=v.option("overlong_buffer_len"),
            penalty=v.option("overlong_buffer_penalty_factor"),
        )
    shaped_N = _shaped(rewards_N, v, epsilon=1e-9)
    scored_N = _running_norm(shaped_N, v) if v.option("reward_running_norm") else shaped_N
    if v.option("reward_clip"):
        scored_N = shaping.reward_clip(scored_N, low=-v.option("reward_clip"), high=v.option("reward_clip"))
    token_rewards = reward_less_kl(scored_N, v["kl"], mask, v.option("kl_coef"))
    kept = mask
    if v.option("dynamic_sampling") and estimator == "group_norm":
        if v.option("micro_train_batch_size") != v.option("n_samples_per_prompt"):
            raise Unsupported("dynamic sampling that looks at rows of another group: ours is filter `zero_variance`")
        group_index_N = torch.arange(len(rewards_N)) // v.option("n_samples_per_prompt")
        varies_N = over_groups(
            lambda rewards_G: torch.full_like(rewards_G, filters.zero_variance(rewards_G)),
            rewards_N,
            group_index_N=group_index_N,
        )
        kept = mask & (varies_N > 0)[:, None]
    gammas = [_gamma(v)] + [1.0] * (int(v["n_experiences"]) - 1)
    before, returns = _returns_by_experience(v, token_rewards, kept, gammas=gammas)
    may_norm = estimator not in ("group_norm", "grpo")
    if may_norm:
        parts = zip(_split(before, v), _split(mask, v), strict=True)
        before = torch.cat([_norm_and_clip(part, part_mask, v) for part, part_mask in parts])
    whitens = estimator in ("gae", "reinforce", "reinforce_baseline")
    return {
        "shaped_rewards": shaped_N,
        "advantages": _whiten_cross_batch(before, mask, v) if whitens else before,
        "returns": returns,
        "return_info": token_rewards.sum(1),
        "mask_after": kept,
    }


def _running_norm(rewards_N: Tensor, v: Variant) -> Tensor:
    moments, scaled = RunningMoments(), []
    for part in _split(rewards_N, v):
        moments = moments.update(part)
        if moments.var == 0:
            raise Unsupported("a running std without variance so far: LightRFT divides by 1e-12, we by 1")
        centred = part - moments.mean if v.option("reward_running_norm_minus_mean") else part
        scaled.append((centred / moments.std).to(part.dtype))
    return torch.cat(scaled)


def _returns_by_experience(
    v: Variant, token_rewards: Tensor, mask: Tensor, *, gammas: list[float]
) -> tuple[Tensor, Tensor]:
    results, returns = [], []
    pieces = zip(_split(token_rewards, v), _split(mask, v), _split(v["values"], v), gammas, strict=True)
    for rewards, part_mask, values, gamma in pieces:
        if v.option("advantage_estimator") == "gae":
            given = {"gamma": gamma, "lambda_": v.option("lambd"), "holes": "discount"}
            result = gae_scan(rewards, values_NT=values, loss_mask_NT=part_mask, **given)
            returns.append(result + masks.masked(values, mask_BT=part_mask))
        else:
            result = return_scan(rewards, loss_mask_NT=part_mask, gamma=gamma, holes="discount")
            returns.append(result)
        results.append(result)
    return torch.cat(results), torch.cat(returns)


def clip_filter_weights(v: Variant) -> dict[str, Any]:
    """By what they do to advantages of 1, through an objective."""
    rewards = v["rewards"]
    num, size = rewards.shape
    cap, constant = v.option("clip_filter_like_weight_clip_eps"), v.option("lamda")
    weights = advantages_by_objective(
        {
            "advantage": "token_rewards",
            "advantage_shaping": [{"name": "group_weights", "cap": cap, "constant_weight": constant}],
        },
        rewards_N=rewards.flatten(),
        group_index_N=torch.arange(num).repeat_interleave(size),
    )
    return {"weights": weights.view(rewards.shape)}


def cpgd_advantages(v: Variant) -> dict[str, Any]:
    """Rewards per token, summed over the row; the whole batch is one group."""
    rewards_N, kind = v["reward"].sum(-1), v.option("weight_factor")
    if rewards_N.dim() == 0:
        raise Unsupported("1-D rewards are summed over the batch by a defect, which leaves 0")
    if kind == "clip_filter_like_weight":
        raise Unsupported("weights of a batch that is not made of groups")
    if kind == "STD_weight":
        result = group.cpgd(rewards_N, center="normalised")
    else:
        result = group.cpgd(rewards_N, center="mean")
    per_token = result[:, None] * v.mask()
    return {"advantages": per_token, "returns": per_token}


def running_moments(v: Variant) -> dict[str, Any]:
    moments, rows = RunningMoments(), []
    for name in sorted(name for name in v.inputs if name.startswith("x")):
        moments, own = moments.update(v[name]), v[name].double()
        own_std = own.std().item() if len(own) > 1 else 0.0
        rows.append([own.mean().item(), own_std, moments.mean, moments.std, moments.var, moments.count])
    return {"batch_mean,batch_std,mean,std,var,count": torch.tensor(rows, dtype=torch.float64)}


def not_a_computation(v: Variant) -> dict[str, Any]:
    raise Unsupported("records how arguments are passed, not a computation")


ADAPTERS = {
    "PolicyLoss": policy_loss,
    "ValueLoss": value_loss,
    "create_high_entropy_mask": high_entropy_mask,
    "compute_approx_kl": approx_kl,
    "compute_reward": compute_reward,
    "masked_mean": masked_mean,
    "NaiveExperienceMaker.get_advantages_and_returns": gae_advantages,
    "GAECalculator.get_advantages_and_returns": gae_calculator,
    "NaiveExperienceMaker.get_cumulative_returns": returns_of,
    "normalize_advantages_cross_batch": cross_batch,
    "NaiveExperienceMaker.process_experiences": process_experiences,
    "get_advantage_calculator(est).preprocess_rewards": preprocess_rewards,
    "calculator.preprocess_rewards -> compute_reward -> calculator.compute -> normalize_advantages_cross_batch": full,
    "FastExperienceMaker._process_experiences + _compute_advantages_and_returns": fast_path,
    "clip_filter_like_weight_func": clip_filter_weights,
    "CPGDCalculator._get_cpgd_advantages_returns": cpgd_advantages,
    "trainer.utils.get_cpgd_advantages_returns": cpgd_advantages,
    "AdaptiveKLController.update": adaptive_kl,
    "FixedKLController.update": fixed_kl,
    "RunningMoments.update": running_moments,
    "NaiveExperienceMaker.make_experience": not_a_computation,
}
