"""The resolved mathematics of a run as JSON, for `passport.json`."""

from typing import Any

from learner.algorithms import kl
from learner.algorithms.objective.parts import Parts
from learner.algorithms.registry.variants import docstring_sections

_PROXIMAL = {
    "rollout": "π_old is the rollout's own log-probs (μ)",
    "recompute": "π_old is the learner's policy at the start of the step",
    "approximate": "log π_old = log μ + (1 − 1/lag)·(log π − log μ), lag in policy versions",
    "ewma": "π_old has the weights θ̄ of the start of the step; after each update θ̄ ← θ̄ + (θ − θ̄)/w, w ← 1 + decay·w, from θ̄ = θ, w = 1",
}


def formula(parts: Parts) -> dict[str, Any]:
    """For each part: its formula as text, its source, and every parameter in force."""
    config = parts.config
    passport: dict[str, Any] = {
        "advantage": parts.advantage.describe(),
        "streaming": config.streaming and config.streaming.model_dump(mode="json"),
        "policy_loss": parts.policy_loss.describe(),
        "aggregation": parts.aggregation.describe(),
        "reward_shaping": [part.describe() for part in parts.reward_shaping],
        "reward_placement": config.reward_placement,
        "advantage_shaping": [part.describe() for part in parts.advantage_shaping],
        "filters": [part.describe() for part in parts.filters],
        "selection": parts.selection and parts.selection.describe(),
        "corrections": [part.describe() for part in parts.corrections],
        "proximal": {"name": config.proximal, "formula": _PROXIMAL[config.proximal]}
        | ({"decay": config.proximal_decay} if config.clips_around_average else {}),
        "kl": _kl(parts),
        "router_aux_loss": {
            "formula": "coefficient·E·Σₑ fₑ·Pₑ, f of the update's recorded choices",
            "coefficient": config.router_aux_loss_coefficient,
        },
        "entropy": {"formula": "−coefficient·entropy", "coefficient": config.entropy_coefficient},
        "distillation": config.distillation
        and config.distillation.model_dump(mode="json") | {"formula": docstring_sections(kl.partition_kl)["Formula"]},
        "sft": config.sft and config.sft.model_dump(mode="json"),
        "value": None,
        "statistics": {"std_ddof": 0, "clip_fraction": "tokens whose loss a bound changed"},
    }
    if config.value is not None and parts.value_loss is not None and parts.value_aggregation is not None:
        own = config.value.model_dump(mode="json", exclude={"loss", "aggregation"})
        passport["value"] = own | {
            "loss": parts.value_loss.describe(),
            "aggregation": parts.value_aggregation.describe(),
        }
    passport["text"] = _text(passport, has_critic=config.value is not None)
    return passport


def _kl(parts: Parts) -> dict[str, Any]:
    return {
        name: term and term | {"formula": docstring_sections(kl.ESTIMATORS[term["estimator"]])["Formula"]}
        for name, term in parts.config.kl.model_dump(mode="json").items()
    }


def _text(passport: dict[str, Any], *, has_critic: bool) -> str:
    """One line: the loss that the optimizer minimises."""
    to_reference, in_reward, to_rollout = (passport["kl"][name] for name in ("loss", "reward", "rollout"))
    terms = [f"{passport['policy_loss']['name']}(A = {passport['advantage']['name']})"]
    terms += [f"× {correction['name']}" for correction in passport["corrections"]]
    if to_reference:
        terms.append(f"+ {to_reference['coefficient']}·{to_reference['estimator']}(π, π_ref)")
    if to_rollout:
        terms.append(f"+ {to_rollout['coefficient']}·{to_rollout['estimator']}(π, μ)")
    if distillation := passport["distillation"]:
        pair = "π, π_ref" if distillation["direction"] == "reverse" else "π_ref, π"
        terms.append(f"+ {distillation['coefficient']}·KL_top{distillation['top_k']}({pair})")
    if passport["entropy"]["coefficient"]:
        terms.append(f"− {passport['entropy']['coefficient']}·H(π)")
    line = f"{passport['aggregation']['name']}[{' '.join(terms)}]"
    if has_critic:
        line += f" + {passport['value']['coefficient']}·{passport['value']['aggregation']['name']}[{passport['value']['loss']['name']}]"
    if router := passport["router_aux_loss"]["coefficient"]:
        line += f" + {router}·E·Σₑ fₑ·Pₑ"
    if passport["sft"]:
        line += f" − {passport['sft']['coefficient']}·token_mean[log π(demonstrations)]"
    if in_reward:
        # Under `rollout` the two are one.
        acting = "μ" if passport["proximal"]["name"] in ("approximate", "ewma") else "π_old"
        before = {"trajectory": "r_t − ", "to_go": "A_t − Σ_{s≥t} ", "token": "A_t − "}[in_reward["credit"]]
        line += f", {before}{in_reward['coefficient']}·{in_reward['estimator']}({acting}, π_ref)"
    return line
