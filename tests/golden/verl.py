"""verl 0.9.1: core_algos, torch_functional and the rollout correction."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner.algorithms import advantages, aggregation, baselines, kl, losses, masks, mismatch, ratios, values
from learner.algorithms.controllers import AdaptiveKl, FixedKl
from learner.algorithms.returns import cumulative_returns, gae
from learner.algorithms.surrogates import TokenLosses
from tests.golden.cases import Unsupported, Variant

CLAMP = 20.0
EPSILON = 1e-8
"""Added to token counts by masked_mean."""


def aggregate(losses_BT: Tensor, mask: Tensor, mode: str, *, loss_scale_factor: float | None = None) -> Tensor:
    if not mask.any() and mode != "token-sum":
        raise Unsupported("the loss of nothing: verl gives NaN, we give 0")
    width = mask.shape[1]
    weights = {
        "token-mean": lambda: aggregation.token_mean(mask),
        "token-sum": lambda: aggregation.sum(mask),
        "seq-mean-token-sum": lambda: aggregation.sequence_sum_mean(mask),
        "seq-mean-token-sum-norm": lambda: aggregation.sequence_sum_over_length(
            mask, max_length=loss_scale_factor or width, empty_rows="exclude"
        ),
        "seq-mean-token-mean": lambda: aggregation.sequence_mean(mask, epsilon=EPSILON),
    }[mode]()
    return aggregation.aggregate(losses_BT, weights_BT=weights)


def _mean(x_BT: Tensor, mask: Tensor) -> Tensor:
    x_BT = x_BT.double() if x_BT.dtype == torch.bool else x_BT
    return masks.masked_mean(x_BT, loss_mask_BT=mask, epsilon=EPSILON)


def agg_loss(v: Variant) -> dict[str, Any]:
    mode, mask = v.option("loss_agg_mode"), v.mask()
    if v.option("batch_num_tokens"):
        total = aggregation.aggregate(v["entropy"], weights_BT=aggregation.sum(mask))
        return {"loss": total / v.option("batch_num_tokens") * v.option("dp_size")}
    if v.option("global_batch_size"):
        rows = mask.any(1).sum()
        return {
            "loss": aggregate(v["entropy"], mask, mode) * rows / v.option("global_batch_size") * v.option("dp_size")
        }
    return {"loss": aggregate(v["entropy"], mask, mode, loss_scale_factor=v.option("loss_scale_factor"))}


def _epsilons(v: Variant) -> tuple[float, float]:
    """clip_ratio counts only where the two-sided settings are set to null: both default to 0.2."""
    config = v.option("actor_config")
    low, high = config.get("clip_ratio_low", 0.2), config.get("clip_ratio_high", 0.2)
    both = config.get("clip_ratio", 0.2)
    return both if low is None else low, both if high is None else high


def policy(
    default_mode: str, *, fixed_mode: bool = False, clamp: float | None = None
) -> Callable[[Callable[[Variant, dict[str, Any]], Tensor | TokenLosses]], Callable[[Variant], dict[str, Any]]]:
    """Around one of our losses: verl's importance weights, aggregation and log lines."""

    def wrap(compute: Callable[[Variant, dict[str, Any]], Tensor | TokenLosses]) -> Callable[[Variant], dict[str, Any]]:
        def adapter(v: Variant) -> dict[str, Any]:
            mask = v.mask()
            given = {"proximal_logprobs_BT": v["old_log_probs"], "advantages_BT": v["advantages"], "loss_mask_BT": mask}
            result = compute(v, given)
            token = result if isinstance(result, TokenLosses) else TokenLosses(result)
            weights = v["is_weights"] if v.option("rollout_is_weights") else 1
            mode = default_mode if fixed_mode else v.option("kwargs").get("loss_agg_mode", default_mode)
            ratio = masks.log_ratio(v["log_probs"], denominator_BT=v["old_log_probs"], loss_mask_BT=mask, clamp=clamp)
            dual = torch.zeros_like(mask) if token.clipped_dual_BT is None else token.clipped_dual_BT
            return {
                "loss": aggregate(token.losses_BT * weights, mask, mode),
                "pg_clipfrac": _mean(token.clipped_BT, mask),
                "pg_clipfrac_lower": _mean(dual, mask),
                "ppo_kl": _mean(-ratio, mask),
            }

        return adapter

    return wrap


@policy("token-mean", clamp=CLAMP)
def vanilla(v: Variant, given: dict[str, Any]) -> TokenLosses:
    low, high = _epsilons(v)
    dual = v.option("actor_config").get("clip_ratio_c", 3.0)
    return losses.ppo_clip(
        v["log_probs"], **given, epsilon_low=low, epsilon_high=high, dual_clip=dual, log_ratio_clamp=CLAMP
    )


def _dppo(v: Variant, given: dict[str, Any], divergence: str) -> TokenLosses:
    low, high = _epsilons(v)
    given = {name: tensor for name, tensor in given.items() if name != "proximal_logprobs_BT"}
    return losses.dppo(
        v["log_probs"],
        rollout_logprobs_BT=v["old_log_probs"],
        **given,
        divergence=divergence,
        threshold_low=low,
        threshold_high=high,
        ratio_cap=v.option("actor_config").get("clip_ratio_c", 3.0),
        log_ratio_clamp=CLAMP,
        score_function=True,
    )


@policy("token-mean", clamp=CLAMP)
def dppo_tv(v: Variant, given: dict[str, Any]) -> TokenLosses:
    return _dppo(v, given, "tv")


@policy("token-mean", clamp=CLAMP)
def dppo_kl(v: Variant, given: dict[str, Any]) -> TokenLosses:
    return _dppo(v, given, "kl")


@policy("seq-mean-token-mean")
def gspo(v: Variant, given: dict[str, Any]) -> TokenLosses:
    low, high = _epsilons(v)
    return losses.gspo_token(v["log_probs"], **given, epsilon_low=low, epsilon_high=high, log_ratio_max=10.0)


@policy("seq-mean-token-mean", fixed_mode=True, clamp=CLAMP)
def sapo(v: Variant, given: dict[str, Any]) -> Tensor:
    config = v.option("actor_config")
    taus = {"tau_positive": config.get("tau_pos", 1.0), "tau_negative": config.get("tau_neg", 1.05)}
    return losses.sapo(v["log_probs"], **given, **taus, log_ratio_clamp=CLAMP)


@policy("token-mean")
def gpg(v: Variant, given: dict[str, Any]) -> Tensor:
    return losses.reinforce(v["log_probs"], advantages_BT=v["advantages"], loss_mask_BT=v.mask())


def _covariances(v: Variant) -> dict[str, Tensor]:
    mask = v.mask()
    cov = losses.covariances(v["log_probs"].detach(), advantages_NT=v["advantages"], loss_mask_NT=mask)
    return {"covariances_BT": cov, "batch_covariances_M": cov[mask]}


@policy("token-mean")
def clip_cov(v: Variant, given: dict[str, Any]) -> TokenLosses:
    config = v.option("actor_config")
    low, high = _epsilons(v)
    bounds = {"cov_low": config.get("clip_cov_lb", 1.0), "cov_high": config.get("clip_cov_ub", 5.0)}
    share = config.get("clip_cov_ratio", 0.0002)
    return losses.clip_cov(
        v["log_probs"], **given, **_covariances(v), **bounds, cov_share=share, epsilon_low=low, epsilon_high=high
    )


@policy("token-mean")
def kl_cov(v: Variant, given: dict[str, Any]) -> Tensor:
    config = v.option("actor_config")
    settings = {"cov_share": config.get("kl_cov_ratio", 0.0002), "kl_coefficient": config.get("ppo_kl_coef", 1.0)}
    return losses.kl_cov(v["log_probs"], **given, **_covariances(v), **settings)


def kl_cov_with_abs(v: Variant) -> dict[str, Any]:
    """Its ppo_kl is of the absolute log-ratio."""
    ratio = masks.log_ratio(v["log_probs"], denominator_BT=v["old_log_probs"], loss_mask_BT=v.mask())
    return kl_cov(v) | {"ppo_kl": _mean(ratio.abs(), v.mask())}


@policy("token-mean")
def dro(v: Variant, given: dict[str, Any]) -> Tensor:
    return losses.dro(v["log_probs"], **given, beta=v.option("actor_config")["dro_beta"])


@policy("token-mean", clamp=CLAMP)
def cispo(v: Variant, given: dict[str, Any]) -> TokenLosses:
    low, high = _epsilons(v)
    return losses.cispo(v["log_probs"], **given, epsilon_min=1 - low, epsilon_max=1 + high, log_ratio_clamp=CLAMP)


def geo_mean(v: Variant) -> dict[str, Any]:
    """Counts ratios outside the range by the sign of the advantage, held or not; importance weights enter as their geometric mean."""
    low, high = _epsilons(v)
    mask, A = v.mask(), v["advantages"]
    token = losses.gmpo(
        v["log_probs"],
        proximal_logprobs_BT=v["old_log_probs"],
        advantages_BT=A,
        loss_mask_BT=mask,
        log_clip_low=low,
        log_clip_high=high,
        length_epsilon=EPSILON,
    )
    weights = torch.ones(len(mask), 1, dtype=A.dtype)
    if v.option("rollout_is_weights"):
        weights = _row_mean((v["is_weights"] + 1e-10).log(), mask).exp()
    ratio = masks.log_ratio(v["log_probs"], denominator_BT=v["old_log_probs"], loss_mask_BT=mask)
    outside = (ratio > high) | (ratio < -low)
    return {
        "loss": aggregation.aggregate(
            token.losses_BT * weights, weights_BT=aggregation.sequence_mean(mask, empty_rows="count")
        ),
        "pg_clipfrac": _mean(outside & (A > 0), mask),
        "pg_clipfrac_lower": _mean(outside & (A < 0), mask),
        "ppo_kl": _mean(-ratio, mask),
    }


def _row_mean(x_BT: Tensor, mask: Tensor) -> Tensor:
    return masks.masked_mean(x_BT, loss_mask_BT=mask, dim=1, epsilon=EPSILON)[:, None]


def kl_penalty(v: Variant) -> dict[str, Any]:
    kind = v.option("kl_penalty")
    given = {"other_logprobs_BT": v["ref_log_probs"], "loss_mask_BT": torch.ones_like(v.mask())}
    value = _kl_value(v["log_probs"], kind.removesuffix("+"), given)
    if kind.endswith("+"):
        value = kl.straight_through(value, gradient_BT=kl.k2(v["log_probs"], **given))
    return {"kl": value, "loss": masks.masked_sum(value, loss_mask_BT=v.mask())}


def _kl_value(policy_BT: Tensor, kind: str, given: dict[str, Any]) -> Tensor:
    if kind in ("k3", "low_var_kl"):
        return kl.k3(policy_BT, **given, log_ratio_clamp=CLAMP).clamp(-10, 10)
    return {"k1": kl.k1, "kl": kl.k1, "abs": kl.absolute, "k2": kl.k2, "mse": kl.k2}[kind](policy_BT, **given)


def compute_rewards(v: Variant) -> dict[str, Any]:
    everything = torch.ones_like(v.mask())
    estimate = kl.k1(v["old_log_probs"], other_logprobs_BT=v["ref_log_probs"], loss_mask_BT=everything)
    return {"rewards": v["token_rewards"] - v.option("kl_ratio") * estimate}


def value_loss(v: Variant) -> dict[str, Any]:
    mask = v.mask()
    result = values.value_clip(
        v["values"],
        old_values_BT=v["old_values"],
        returns_BT=v["returns"],
        loss_mask_BT=mask,
        clip_range=v.option("cliprange_value"),
    )
    return {
        "loss": aggregate(result.losses_BT, mask, "token-mean"),
        "vf_clipfrac": _mean(result.clipped_BT, mask),
    }


def _masked_whiten(x: Tensor, mask: Tensor, *, center: bool = True) -> Tensor:
    return masks.whiten(x, loss_mask_BT=mask, center=center, zero_variance="rounding", outside="whiten")


def gae_advantages(v: Variant) -> dict[str, Any]:
    result, returns = gae(
        v["token_rewards"],
        values_NT=v["values"],
        loss_mask_NT=v.mask(),
        gamma=v.option("gamma"),
        lambda_=v.option("lam"),
        outside="carry",
    )
    return {"advantages": _masked_whiten(result, v.mask()), "returns": returns}


def masked_mean(v: Variant) -> dict[str, Any]:
    return {
        "mean": masks.masked_mean(v["entropy"], loss_mask_BT=v.mask()),
        "mean_axis1": masks.masked_mean(v["entropy"], loss_mask_BT=v.mask(), dim=1),
    }


def masked_var(v: Variant) -> dict[str, Any]:
    return {
        "unbiased": masks.masked_var(v["entropy"], loss_mask_BT=v.mask(), ddof=1),
        "biased": masks.masked_var(v["entropy"], loss_mask_BT=v.mask(), ddof=0),
    }


def masked_whiten(v: Variant) -> dict[str, Any]:
    return {
        "shift": _masked_whiten(v["entropy"], v.mask()),
        "noshift": _masked_whiten(v["entropy"], v.mask(), center=False),
    }


def adaptive_kl(v: Variant) -> dict[str, Any]:
    controller = AdaptiveKl(coefficient=v.option("init"), target=v.option("target"), horizon=v.option("horizon"))
    observed = []
    for measured in v["kl_sequence"].tolist():
        controller = controller.observe(measured, num_trajectories=v.option("n_steps"))
        observed.append(controller.coefficient)
    return {"values": torch.tensor(observed, dtype=torch.float64)}


def fixed_kl(v: Variant) -> dict[str, Any]:
    coefficient = FixedKl(coefficient=v.option("init")).observe(1.0, num_trajectories=1).coefficient
    return {"values": torch.full_like(v["kl_sequence"], coefficient)}


def group_advantage(compute: Callable[..., Tensor]) -> Callable[[Variant], dict[str, Any]]:
    """Around an advantage per trajectory: verl sums rewards over the row, and copies the advantage to every token."""

    def adapter(v: Variant) -> dict[str, Any]:
        rewards, groups = v["token_rewards"].sum(1), torch.tensor(v["group_index"])
        per_token = compute(v, rewards, groups)[:, None] * v.mask()
        return {"advantages": per_token, "returns": per_token}

    return adapter


def _grpo(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    if not v.option("norm_adv_by_std_in_grpo", True):
        return advantages.over_groups(advantages.mean_centered, rewards, group_index_N=groups, singleton="raw")
    epsilon = v.option("epsilon", 1e-6)
    settings = {"epsilon": epsilon, "singleton": "raw", "zero_variance": "rounding"}
    return advantages.over_groups(advantages.grpo, rewards, group_index_N=groups, **settings)


def _passk(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return advantages.over_groups(advantages.pass_at_k, rewards, group_index_N=groups, normalise=True)


def _rloo(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return advantages.over_groups(advantages.rloo, rewards, group_index_N=groups, singleton="raw")


def _rloo_vectorized(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return advantages.over_groups(advantages.rloo, rewards, group_index_N=groups, singleton="zero")


def _opo(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return advantages.opo(rewards, loss_mask_NT=v.mask(), group_index_N=groups)


def _gpg(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return advantages.gpg(rewards, group_index_N=groups)


def whitened(compute: Callable[..., Tensor], *, singleton: str = "raw") -> Callable[[Variant], dict[str, Any]]:
    """An advantage per trajectory, copied to the tokens and whitened over them."""

    def adapter(v: Variant) -> dict[str, Any]:
        rewards, groups = v["token_rewards"].sum(1), torch.tensor(v["group_index"])
        per_token = compute(v, rewards, groups)[:, None] * v.mask()
        result = masks.masked(_masked_whiten(per_token, v.mask()), loss_mask_BT=v.mask())
        return {"advantages": result, "returns": result}

    return adapter


def _centred(v: Variant, rewards: Tensor, groups: Tensor) -> Tensor:
    return advantages.over_groups(advantages.mean_centered, rewards, group_index_N=groups, singleton="raw")


def reinforce_plus_plus(v: Variant) -> dict[str, Any]:
    returns = cumulative_returns(v["token_rewards"], loss_mask_NT=v.mask(), gamma=v.option("gamma"))
    result = masks.masked(_masked_whiten(returns, v.mask()), loss_mask_BT=v.mask())
    return {"advantages": result, "returns": returns}


def remax(v: Variant) -> dict[str, Any]:
    returns = cumulative_returns(v["token_rewards"], loss_mask_NT=v.mask())
    result = baselines.remax(returns, greedy_rewards_N=v["reward_baselines"], loss_mask_NT=v.mask())
    return {"advantages": result, "returns": returns}


def optimal_token_baseline(v: Variant) -> dict[str, Any]:
    returns = cumulative_returns(v["token_rewards"], loss_mask_NT=v.mask())
    result = baselines.optimal_token_baseline(
        returns,
        logprobs_NT=v["old_log_probs"],
        sum_squared_probs_NT=v["sum_pi_squared"],
        loss_mask_NT=v.mask(),
        group_index_N=torch.tensor(v["group_index"]),
    )
    return {"advantages": result, "returns": returns}


def _bounds(text: Any) -> tuple[float | None, float]:
    low, _, high = str(text).rpartition("_")
    return (float(low) if low else None), float(high)


def _importance_weights(policy_BT: Tensor, rollout_BT: Tensor, mask: Tensor, v: Variant) -> Tensor:
    low, high = _bounds(v.option("rollout_is_threshold", 2.0))
    given = {
        "rollout_logprobs_BT": rollout_BT,
        "loss_mask_BT": mask,
        "level": v.option("rollout_is", "sequence"),
        "log_ratio_clamp": CLAMP,
    }
    if low is None:
        weights = ratios.tis(policy_BT, **given, cap=high)
    else:
        weights = ratios.icepop(policy_BT, **given, low=low, high=high)
    if v.option("rollout_is_batch_normalize", False):
        weights = ratios.normalise_weights(
            weights, loss_mask_BT=mask, level=v.option("rollout_is", "sequence"), epsilon=EPSILON
        )
    return weights


def _rejection_mask(policy_BT: Tensor, rollout_BT: Tensor, mask: Tensor, kind: str, threshold: Any) -> Tensor:
    """`seq_mean_k1` and its like. Bounds of k1 are on ratios, those of k2 and k3 on the divergence."""
    low, high = _bounds(threshold)
    level, _, estimator = kind.removeprefix("seq_").rpartition("_")
    if estimator == "k1":
        low = math.log(low) if low is not None else -math.log(high)
        high = math.log(high)
    kept = ratios.rejection(
        policy_BT,
        rollout_logprobs_BT=rollout_BT,
        loss_mask_BT=mask,
        low=-math.inf if low is None else low,
        high=high,
        estimator=estimator,
        level=level,
        log_ratio_clamp=CLAMP,
    )
    return kept > 0


def rollout_correction(v: Variant) -> dict[str, Any]:
    mask = v.mask()
    if not mask.any():
        raise Unsupported("nothing unmasked")
    weights = _importance_weights(v["old_log_probs"], v["rollout_log_probs"], mask, v)
    metrics = _off_policy(v["old_log_probs"], v["rollout_log_probs"], mask)
    return {"is_weights": weights, "mask": mask.to(weights.dtype)} | {
        f"metric.{name}": value for name, value in metrics.items()
    }


def rejection(v: Variant) -> dict[str, Any]:
    mask = v.mask()
    kept = _rejection_mask(
        v["old_log_probs"], v["rollout_log_probs"], mask, v.option("rollout_rs"), v.option("threshold")
    )
    return {
        "mask": kept.double(),
        "metric.rollout_rs_masked_fraction": _mean(1 - kept.double(), mask),
    }


def _off_policy(policy_BT: Tensor, rollout_BT: Tensor, mask: Tensor) -> dict[str, Tensor]:
    found = mismatch.off_policy_metrics(
        policy_BT, rollout_logprobs_BT=rollout_BT, loss_mask_BT=mask, epsilon=EPSILON, empty_rows="count"
    )
    theirs = {
        "training_ppl": "learner_perplexity",
        "training_log_ppl": "learner_log_perplexity",
        "kl": "k1",
        "k3_kl": "k3",
        "rollout_ppl": "rollout_perplexity",
        "rollout_log_ppl": "rollout_log_perplexity",
        "log_ppl_diff": "log_perplexity_gap",
        "log_ppl_abs_diff": "log_perplexity_gap_abs",
        "log_ppl_diff_max": "log_perplexity_gap_max",
        "log_ppl_diff_min": "log_perplexity_gap_min",
        "ppl_ratio": "perplexity_ratio",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_sequence",
    }
    return {name: found[ours] for name, ours in theirs.items()}


def off_policy_metrics(v: Variant) -> dict[str, Any]:
    return _off_policy(v["old_log_probs"], v["rollout_log_probs"], v.mask())


def bypass_mode(v: Variant) -> dict[str, Any]:
    """The rollout's log-probs stand for π_old; rejection shrinks the mask, and with it the denominator."""
    mask, policy_BT, rollout_BT = v.mask(), v["log_probs"], v["rollout_log_probs"]
    if v.option("rollout_rs"):
        mask = mask & _rejection_mask(
            policy_BT.detach(), rollout_BT, mask, v.option("rollout_rs"), v.option("rollout_rs_threshold")
        )
    given = {"advantages_BT": v["advantages"], "loss_mask_BT": mask}
    if not mask.any():
        raise Unsupported("the loss of nothing: verl gives NaN, we give 0")
    is_reinforce = v.option("loss_type") == "reinforce"
    clamp = None if is_reinforce else CLAMP
    ratio = masks.log_ratio(policy_BT, denominator_BT=rollout_BT, loss_mask_BT=mask, clamp=clamp)
    result = {"m.ppo_kl": _mean(-ratio, mask)}
    result |= {f"m.{name}": value for name, value in _off_policy(policy_BT, rollout_BT, v.mask()).items()}
    if is_reinforce:
        per_token = losses.reinforce(policy_BT, **given) * _importance_weights(policy_BT, rollout_BT, v.mask(), v)
        return result | {"loss": aggregate(per_token, mask, "token-mean")}
    token = losses.ppo_clip(policy_BT, proximal_logprobs_BT=rollout_BT, **given, dual_clip=3.0, log_ratio_clamp=CLAMP)
    return result | {
        "loss": aggregate(token.losses_BT, mask, "token-mean"),
        "m.pg_clipfrac": _mean(token.clipped_BT, mask),
        "m.pg_clipfrac_lower": _mean(token.clipped_dual_BT, mask),
    }


_LOSS = "verl.trainer.ppo.core_algos.compute_policy_loss_"
ADAPTERS = {
    f"{_LOSS}vanilla": vanilla,
    f"{_LOSS}dppo_tv": dppo_tv,
    f"{_LOSS}dppo_kl": dppo_kl,
    f"{_LOSS}gspo": gspo,
    f"{_LOSS}sapo": sapo,
    f"{_LOSS}gpg": gpg,
    f"{_LOSS}clip_cov": clip_cov,
    f"{_LOSS}kl_cov": kl_cov_with_abs,
    f"{_LOSS}geo_mean": geo_mean,
    f"{_LOSS}dro": dro,
    f"{_LOSS}cispo": cispo,
    "compute_policy_loss_bypass_mode": bypass_mode,
    "agg_loss": agg_loss,
    "kl_penalty": kl_penalty,
    "compute_rewards": compute_rewards,
    "compute_value_loss": value_loss,
    "compute_gae_advantage_return": gae_advantages,
    "verl_F.masked_mean": masked_mean,
    "verl_F.masked_var": masked_var,
    "verl_F.masked_whiten": masked_whiten,
    "AdaptiveKLController.update": adaptive_kl,
    "FixedKLController.update": fixed_kl,
    "compute_grpo_outcome_advantage": group_advantage(_grpo),
    "compute_grpo_vectorized_outcome_advantage": group_advantage(_grpo),
    "compute_grpo_passk_outcome_advantage": group_advantage(_passk),
    "compute_rloo_outcome_advantage": group_advantage(_rloo),
    "compute_rloo_vectorized_outcome_advantage": group_advantage(_rloo_vectorized),
    "compute_opo_outcome_advantage": group_advantage(_opo),
    "compute_gpg_outcome_advantage": group_advantage(_gpg),
    "compute_gdpo_outcome_advantage": whitened(_grpo),
    "compute_reinforce_plus_plus_baseline_outcome_advantage": whitened(_centred),
    "compute_reinforce_plus_plus_outcome_advantage": reinforce_plus_plus,
    "compute_remax_outcome_advantage": remax,
    "compute_optimal_token_baseline_advantage": optimal_token_baseline,
    "compute_multi_turn_optimal_token_baseline_advantage": optimal_token_baseline,
    "compute_rollout_correction_and_rejection_mask": rollout_correction,
    "compute_rollout_rejection_mask": rejection,
    "compute_offpolicy_metrics": off_policy_metrics,
}
