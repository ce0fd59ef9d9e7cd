"""verl's correction for what the rollout engine computed: weights, rejection, metrics, and the loss that takes them."""

import math
from typing import Any

from torch import Tensor

from learner.algorithms import masks
from learner.algorithms.corrections import importance, masking
from tests.golden import mismatch
from tests.golden.cases import Uncompared, Variant
from tests.golden.through_objective import Step
from tests.golden.verl_policy import AGGREGATIONS, CLAMP, EPSILON, mean, refuse_nothing

_LOG_LINE = "a log line of verl's; a run reports `correction_weight` and `correction_dropped` instead"


def _log_lines(v: Variant, got: dict[str, Any]) -> dict[str, Any]:
    """verl's counts of its weights and rejections; what we have too is in `got`."""
    names = (name for name in v.wanted if name.partition(".")[2].startswith(("rollout_is_", "rollout_rs_")))
    return {name: Uncompared(_LOG_LINE) for name in names} | got


def _bounds(text: Any) -> tuple[float | None, float]:
    low, _, high = str(text).rpartition("_")
    return (float(low) if low else None), float(high)


def _importance_weights(
    policy_BT: Tensor, rollout_BT: Tensor, mask: Tensor, v: Variant, *, default_level: str | None
) -> Tensor | None:
    """None where they are switched off; the other settings then have no effect."""
    is_normalised, threshold = v.option("rollout_is_batch_normalize", False), v.option("rollout_is_threshold", 2.0)
    level = v.option("rollout_is", default_level)
    if level is None or threshold is None:
        return None
    low, high = _bounds(threshold)
    given = {"rollout_logprobs_BT": rollout_BT, "loss_mask_BT": mask, "level": level, "log_ratio_clamp": CLAMP}
    if low is None:
        weights = importance.tis(policy_BT, **given, cap=high)
    else:
        weights = importance.icepop(policy_BT, **given, low=low, high=high)
    if is_normalised:
        weights = importance.with_mean_1(weights, loss_mask_NT=mask, level=level, epsilon=EPSILON)
    return weights


def _rejection_mask(policy_BT: Tensor, rollout_BT: Tensor, mask: Tensor, kinds: str, thresholds: Any) -> Tensor:
    """`token_k1,seq_mean_k3` and its like: all must pass, by a threshold each or one for all."""
    names = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    given = [each.strip() for each in str(thresholds).split(",")]
    given = given * len(names) if len(given) == 1 else given
    kept = mask
    for kind, threshold in zip(names, given, strict=True):
        kept = kept & _kept_by(kind, threshold, policy_BT, rollout_BT, mask)
    return kept


def _kept_by(kind: str, threshold: str, policy_BT: Tensor, rollout_BT: Tensor, mask: Tensor) -> Tensor:
    """Bounds of k1 are on ratios, those of k2 and k3 on the divergence."""
    low, high = _bounds(threshold)
    level, _, estimator = kind.removeprefix("seq_").rpartition("_")
    if estimator == "k1":
        low = math.log(low) if low is not None else -math.log(high)
        high = math.log(high)
    kept = masking.rejection(
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
    mask, policy_BT, rollout_BT = v.mask(), v["old_log_probs"], v["rollout_log_probs"]
    weights = _importance_weights(policy_BT, rollout_BT, mask, v, default_level=None)
    kept, threshold = mask, v.option("rollout_rs_threshold")
    if v.option("rollout_rs"):
        kept = _rejection_mask(policy_BT, rollout_BT, mask, v.option("rollout_rs"), threshold)
    got = {f"metric.{name}": value for name, value in _off_policy(policy_BT, rollout_BT, mask).items()}
    got["mask"] = kept.to(policy_BT.dtype)
    return _log_lines(v, got if weights is None else got | {"is_weights": weights})


def rejection(v: Variant) -> dict[str, Any]:
    mask = v.mask()
    kept = _rejection_mask(
        v["old_log_probs"], v["rollout_log_probs"], mask, v.option("rollout_rs"), v.option("threshold")
    )
    fraction = mean(1 - kept.double(), mask)
    return _log_lines(v, {"mask": kept.double(), "metric.rollout_rs_masked_fraction": fraction})


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
    everything, policy_BT, rollout_BT = v.mask(), v["log_probs"], v["rollout_log_probs"]
    mask, advantages_BT, threshold = everything, v["advantages"], v.option("rollout_rs_threshold")
    if v.option("rollout_rs"):
        kinds = v.option("rollout_rs")
        mask = _rejection_mask(policy_BT.detach(), rollout_BT, everything, kinds, threshold)
    refuse_nothing(mask, "token-mean")
    is_reinforce = v.option("loss_type", "ppo_clip") == "reinforce"
    ratio = masks.log_ratio(policy_BT, over_BT=rollout_BT, mask_BT=mask, clamp=None if is_reinforce else CLAMP)
    result = {"m.ppo_kl": mean(-ratio, mask)}
    result |= {f"m.{name}": value for name, value in _off_policy(policy_BT, rollout_BT, everything).items()}
    # The function's own default is none, that of its section in verl's configuration is not.
    weights = _importance_weights(policy_BT, rollout_BT, everything, v, default_level="sequence")
    clipped = {"name": "ppo_clip", "dual_clip": 3.0, "log_ratio_clamp": CLAMP}
    policy_loss = {"name": "reinforce"} if is_reinforce else clipped
    step = Step(policy_BT=policy_BT, old_BT=rollout_BT, advantages_BT=advantages_BT, mask=mask)
    algorithm = {"policy_loss": policy_loss, "aggregation": AGGREGATIONS["token-mean"]}
    result["loss"] = step.loss(algorithm, weights_BT=weights if is_reinforce else None)
    token = step.tokens(policy_loss)
    if not is_reinforce:
        result |= {
            "m.pg_clipfrac": mean(token.clipped_BT, mask),
            "m.pg_clipfrac_lower": mean(token.clipped_dual_BT, mask),
        }
    return _log_lines(v, result)
