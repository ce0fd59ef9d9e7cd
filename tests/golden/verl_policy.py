"""verl's aggregations and policy losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner.algorithms import masks
from learner.algorithms.losses import covariance
from tests.golden.cases import Unsupported, Variant
from tests.golden.through_objective import Step, aggregated

CLAMP = 20.0
EPSILON = 1e-8
"""Added to token counts by masked_mean."""


AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"name": "token_mean"},
    "token-sum": {"name": "sum"},
    "seq-mean-token-sum": {"name": "sequence_sum_mean"},
    "seq-mean-token-sum-norm": {"name": "sequence_sum_over_length", "empty_rows": "exclude"},
    "seq-mean-token-mean": {"name": "sequence_mean", "epsilon": EPSILON},
}


def _aggregation(mode: str, mask: Tensor, *, loss_scale_factor: float | None = None) -> dict[str, Any]:
    if mode != "seq-mean-token-sum-norm":
        return AGGREGATIONS[mode]
    return AGGREGATIONS[mode] | {"max_length": loss_scale_factor or mask.shape[1]}


def refuse_nothing(mask: Tensor, mode: str) -> None:
    if not mask.any() and mode != "token-sum":
        raise Unsupported("the loss of nothing: verl gives NaN, we give 0")


def agg_loss(v: Variant) -> dict[str, Any]:
    """With numbers of the whole step a rank's share is scaled by them: verl's ranks average their gradients, ours add."""
    v.only("loss_mat", "in.entropy")
    v.only("loss_mask", "in.mask as float")
    mode, mask, entropy = v.option("loss_agg_mode"), v.mask(), v["entropy"]
    is_by_token, scale = mode in ("token-mean", "token-sum"), v.option("dp_size", 1)
    v.without_effect("global_batch_size" if is_by_token else "batch_num_tokens")
    if mode != "seq-mean-token-sum-norm":
        v.without_effect("loss_scale_factor")
    if mode == "token-sum":
        v.without_effect("batch_num_tokens")
    elif is_by_token and v.option("batch_num_tokens"):
        return {"loss": aggregated(entropy, {"name": "sum"}, mask) / v.option("batch_num_tokens") * scale}
    elif not is_by_token and v.option("global_batch_size"):
        scale = scale * mask.any(1).sum() / v.option("global_batch_size")
    refuse_nothing(mask, mode)
    weights = _aggregation(mode, mask, loss_scale_factor=v.option("loss_scale_factor"))
    return {"loss": aggregated(entropy, weights, mask) * scale}


def mean(x_BT: Tensor, mask: Tensor) -> Tensor:
    x_BT = x_BT.double() if x_BT.dtype == torch.bool else x_BT
    return masks.masked_mean(x_BT, mask_BT=mask, epsilon=EPSILON)


CLIP_SETTINGS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


def _epsilons(v: Variant) -> tuple[float, float]:
    """clip_ratio counts only where the two-sided settings are set to null: both default to 0.2."""
    config = v.option("actor_config")
    low, high = config.get("clip_ratio_low", 0.2), config.get("clip_ratio_high", 0.2)
    both = config.get("clip_ratio", 0.2)
    return both if low is None else low, both if high is None else high


def _weights(v: Variant) -> Tensor | None:
    name = v.option("rollout_is_weights")
    return v[name.removeprefix("in.")] if name else None


def policy(
    default_mode: str, *, fixed_mode: bool = False, clamp: float | None = None
) -> Callable[[Callable[[Variant], dict[str, Any]]], Callable[[Variant], dict[str, Any]]]:
    """Around the config of one of our losses: verl's importance weights, aggregation and log lines."""

    def wrap(loss_of: Callable[[Variant], dict[str, Any]]) -> Callable[[Variant], dict[str, Any]]:
        def adapter(v: Variant) -> dict[str, Any]:
            mask, policy_BT, old_BT, advantages_BT = v.mask(), v["log_probs"], v["old_log_probs"], v["advantages"]
            mode = v.option("kwargs", {}).get("loss_agg_mode", default_mode)
            mode = default_mode if fixed_mode else mode
            # Every loss takes them, few use all.
            v.without_effect(*CLIP_SETTINGS, section="actor_config")
            refuse_nothing(mask, mode)
            policy_loss, weights = loss_of(v), _weights(v)
            step = Step(policy_BT=policy_BT, old_BT=old_BT, advantages_BT=advantages_BT, mask=mask)
            token = step.tokens(policy_loss)
            algorithm = {"policy_loss": policy_loss, "aggregation": _aggregation(mode, mask)}
            loss = step.loss(algorithm, weights_BT=weights)
            ratio = masks.log_ratio(policy_BT, over_BT=old_BT, mask_BT=mask, clamp=clamp)
            dual = torch.zeros_like(mask) if token.clipped_dual_BT is None else token.clipped_dual_BT
            # verl's clip_cov counts the tokens of its own choice alone.
            held = token.clipped_BT if token.clipped_covariance_BT is None else token.clipped_covariance_BT
            return {
                "loss": loss,
                "pg_clipfrac": mean(held, mask),
                "pg_clipfrac_lower": mean(dual, mask),
                "ppo_kl": mean(-ratio, mask),
            }

        return adapter

    return wrap


def _clip(v: Variant) -> dict[str, float]:
    low, high = _epsilons(v)
    return {"epsilon_low": low, "epsilon_high": high}


@policy("token-mean", clamp=CLAMP)
def vanilla(v: Variant) -> dict[str, Any]:
    dual = v.option("actor_config").get("clip_ratio_c", 3.0)
    return {"name": "ppo_clip", **_clip(v), "dual_clip": dual, "log_ratio_clamp": CLAMP}


def _dppo(v: Variant, divergence: str) -> dict[str, Any]:
    low, high = _epsilons(v)
    cap = v.option("actor_config").get("clip_ratio_c", 3.0)
    region = {"divergence": divergence, "threshold_low": low, "threshold_high": high}
    return {"name": "dppo", **region, "ratio_cap": cap, "log_ratio_clamp": CLAMP, "score_function": True}


@policy("token-mean", clamp=CLAMP)
def dppo_tv(v: Variant) -> dict[str, Any]:
    return _dppo(v, "tv")


@policy("token-mean", clamp=CLAMP)
def dppo_kl(v: Variant) -> dict[str, Any]:
    return _dppo(v, "kl")


@policy("seq-mean-token-mean")
def gspo(v: Variant) -> dict[str, Any]:
    return {"name": "gspo_token", **_clip(v), "log_ratio_max": 10.0}


@policy("seq-mean-token-mean", fixed_mode=True, clamp=CLAMP)
def sapo(v: Variant) -> dict[str, Any]:
    config = v.option("actor_config")
    taus = {"tau_positive": config.get("tau_pos", 1.0), "tau_negative": config.get("tau_neg", 1.05)}
    return {"name": "sapo", **taus, "log_ratio_clamp": CLAMP}


@policy("token-mean")
def gpg(v: Variant) -> dict[str, Any]:
    return {"name": "reinforce"}


@policy("token-mean")
def clip_cov(v: Variant) -> dict[str, Any]:
    config = v.option("actor_config")
    bounds = {"cov_low": config.get("clip_cov_lb", 1.0), "cov_high": config.get("clip_cov_ub", 5.0)}
    share = config.get("clip_cov_ratio", 0.0002)
    mask = v.mask()
    found = covariance.covariances(v["log_probs"].detach(), advantages_NT=v["advantages"], loss_mask_NT=mask)
    covariances_M = found[mask]
    candidates = (covariances_M > bounds["cov_low"]) & (covariances_M < bounds["cov_high"])
    if max(int(share * len(covariances_M)), 1) < int(candidates.sum()):
        raise Unsupported("verl draws some of the candidates at random; we take those of largest covariance")
    return {"name": "clip_cov", **_clip(v), **bounds, "cov_share": share}


@policy("token-mean")
def kl_cov(v: Variant) -> dict[str, Any]:
    config = v.option("actor_config")
    share, coefficient = config.get("kl_cov_ratio", 0.0002), config.get("ppo_kl_coef", 1.0)
    if len(v["advantages"][v.mask()].unique()) == 1:
        raise Unsupported("equal advantages: rounding chooses verl's tokens, we choose none")
    return {"name": "kl_cov", "cov_share": share, "kl_coefficient": coefficient}


def kl_cov_with_abs(v: Variant) -> dict[str, Any]:
    """Its ppo_kl is of the absolute log-ratio."""
    ratio = masks.log_ratio(v["log_probs"], over_BT=v["old_log_probs"], mask_BT=v.mask())
    return kl_cov(v) | {"ppo_kl": mean(ratio.abs(), v.mask())}


@policy("token-mean")
def dro(v: Variant) -> dict[str, Any]:
    return {"name": "dro", "beta": v.option("actor_config")["dro_beta"]}


@policy("token-mean", clamp=CLAMP)
def cispo(v: Variant) -> dict[str, Any]:
    low, high = _epsilons(v)
    return {"name": "cispo", "epsilon_min": 1 - low, "epsilon_max": 1 + high, "log_ratio_clamp": CLAMP}


def geo_mean(v: Variant) -> dict[str, Any]:
    """Counts ratios outside the range by the sign of the advantage, held or not; importance weights enter as their geometric mean."""
    low, high = _epsilons(v)
    v.without_effect("clip_ratio_c", section="actor_config")
    v.without_effect("loss_agg_mode", section="kwargs")
    mask, A = v.mask(), v["advantages"]
    bounds = {"log_clip_low": low, "log_clip_high": high, "length_epsilon": EPSILON}
    step = Step(policy_BT=v["log_probs"], old_BT=v["old_log_probs"], advantages_BT=A, mask=mask)
    token = step.tokens({"name": "gmpo", **bounds})
    weights = _weights(v)
    row_weights = 1 if weights is None else _row_mean((weights + 1e-10).log(), mask).exp()
    ratio = masks.log_ratio(v["log_probs"], over_BT=v["old_log_probs"], mask_BT=mask)
    outside = (ratio > high) | (ratio < -low)
    return {
        "loss": aggregated(token.losses_BT * row_weights, {"name": "sequence_mean", "empty_rows": "count"}, mask),
        "pg_clipfrac": mean(outside & (A > 0), mask),
        "pg_clipfrac_lower": mean(outside & (A < 0), mask),
        "ppo_kl": mean(-ratio, mask),
    }


def _row_mean(x_BT: Tensor, mask: Tensor) -> Tensor:
    return masks.masked_mean(x_BT, mask_BT=mask, dim=1, epsilon=EPSILON)[:, None]
