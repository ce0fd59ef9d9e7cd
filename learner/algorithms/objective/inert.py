"""Refuses options that cannot change the loss under the rest of a configuration: a user who sets one expects an effect.

For fields this follows from the tensors that variants ask for: a placement of rewards per token has no effect on an advantage that does
not ask for them. Parameters of variants state their conditions themselves (`learner.algorithms.conditions`).
"""

import inspect
from collections.abc import Iterator
from typing import Any

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError
from cluster.contracts.plugins import Plugin
from learner.algorithms.batch_rules.filters import high_entropy_tokens, zero_variance
from learner.algorithms.batch_rules.shaping import group_weights
from learner.algorithms.conditions import InertWith
from learner.algorithms.objective.invented import is_zero_without_advantages
from learner.algorithms.objective.parts import Parts
from learner.algorithms.registry.variants import Variant

_READ_AS: dict[str, tuple[tuple[str, ...], str]] = {
    "reward_placement": (("token_rewards_NT",), "rewards per token"),
    "advantage_shaping": (("advantages_BT", "advantages_NT"), "advantages"),
    "proximal": (("proximal_logprobs_BT", "proximal_logprobs_NT", "covariances_BT"), "the log-probs of π_old"),
}
"""Fields that change tensors of other parts: the names of these tensors, and a description."""

_NO_POLICY_LOSS = "changes nothing: with advantage='none' and without kl.reward the policy loss is 0"

_RATIO_BOUNDS = frozenset(
    {
        "epsilon_low", "epsilon_high", "epsilon_min", "epsilon_max", "dual_clip", "delta", "log_ratio_clamp", "log_ratio_max",
        "log_clip_low", "log_clip_high", "clip_range",
    }
)  # fmt: skip
"""Parameters of losses that bound how far policy or value may move from the start of the step."""

_ACTING_AWAY_FROM_ONE = frozenset(
    {"dro.beta", "kl_cov.cov_share", "kl_cov.kl_coefficient", "sapo.tau_negative", "sapo.tau_positive"}
)
"""Parameters of losses, as `variant.parameter`, that change no gradient where ρ = 1."""


def refuse_inert(parts: Parts, *, updates_per_step: int = 1, max_lag: int | None = None) -> None:
    """Raises ConfigError that names field, value and way out for the first option without effect. `max_lag`: as of
    `Objective.from_config`."""
    _refuse_unread(parts)
    _refuse_streaming_of_rewards_that_no_advantage_reads(parts)
    _refuse_without_a_policy_loss(parts)
    _refuse_an_approximation_of_the_rollout_policy(parts, max_lag=max_lag)
    _refuse_treating_groups_that_a_filter_drops(parts)
    _refuse_an_unread_critic(parts)
    decay = parts.config.proximal_decay
    if not parts.config.clips_around_average and decay != AlgorithmConfig.model_fields["proximal_decay"].default:
        raise ConfigError(
            f"proximal_decay={decay} changes nothing while proximal={parts.config.proximal!r}; leave it out, or set that to 'ewma'"
        )
    every_steps = parts.config.monitor.reference_kl
    if every_steps not in (None, 1) and parts.learn_from_reference:
        raise ConfigError(
            f"monitor.reference_kl={every_steps} changes nothing: the loss needs the reference at every step; leave it out"
        )
    for variant in parts.all():
        for name, default, conditions in _set_away_from_default(variant):
            shown = f"{variant.field}.{name}={variant.plugin.params[name]!r}"
            for condition in conditions:
                is_own = condition.name in variant.parameters
                other = f"{variant.field}.{condition.name}" if is_own else condition.name
                in_force = variant.parameters[condition.name] if is_own else getattr(parts.config, condition.name)
                acting = _emptying_rows(parts) if other == "filters" else in_force
                if acting == condition.value:
                    raise ConfigError(
                        f"{shown} changes nothing while {other}={_said(in_force)}; leave it at {default!r}, or change the other"
                    )
            if (
                updates_per_step == 1
                and _starts_at_the_policy(variant, parts.config)
                and waits_for_ratios(variant.plugin, name)
            ):
                raise ConfigError(
                    f"{shown} can never act: a step of one update trains the policy that it compares with; "
                    "set learner.mini_batches or learner.epochs above 1, or leave it out"
                )


def _refuse_unread(parts: Parts) -> None:
    config = parts.config
    for field, (tensors, meaning) in _READ_AS.items():
        value = getattr(config, field)
        if value == AlgorithmConfig.model_fields[field].default or _reads(parts, tensors, besides=(field,)):
            continue
        chosen = (parts.advantage, parts.policy_loss, *parts.filters, *parts.corrections)
        named = ", ".join(f"{variant.field}={variant.plugin.name!r}" for variant in chosen)
        raise ConfigError(
            f"{field}={_said(value)} changes nothing: {named} do not ask for {meaning}; leave {field} out"
        )


def _refuse_an_unread_critic(parts: Parts) -> None:
    """A head on the policy's hidden states trains the policy all the same, and a user's own advantage may return returns for the critic."""
    value = parts.config.value
    if value is None or value.backbone == "shared" or parts.advantage.is_own:
        return
    if not _reads(parts, ("values_NT", "values_BT", "old_values_BT", "returns_BT"), besides=("value.loss",)):
        raise ConfigError(
            f"value changes nothing: advantage={parts.advantage.plugin.name!r} and the other parts do not read the critic's values; leave "
            "value out, or use an advantage such as 'gae'"
        )


def _refuse_streaming_of_rewards_that_no_advantage_reads(parts: Parts) -> None:
    if parts.config.streaming is not None and parts.config.advantage.name == "none":
        raise ConfigError("streaming changes nothing: advantage='none' reads no rewards; leave streaming out")


def has_no_policy_loss(parts: Parts) -> bool:
    """Whether advantages are 0, and the policy loss with them. Not where a user's own part may change that."""
    config = parts.config
    if config.advantage.name != "none" or config.kl.reward is not None or any(map(_lifts_0, parts.advantage_shaping)):
        return False
    return is_zero_without_advantages(parts.policy_loss)


def _lifts_0(step: Variant) -> bool:
    """Whether a step of advantage_shaping makes other advantages of 0: a user's may, and a clip to a range without 0 does."""
    return step.is_own or not step.parameters.get("low", 0) <= 0 <= step.parameters.get("high", 0)


def _refuse_without_a_policy_loss(parts: Parts) -> None:
    if not has_no_policy_loss(parts):
        return
    for field in ("policy_loss", "corrections", "proximal", "advantage_shaping"):
        value, default = getattr(parts.config, field), AlgorithmConfig.model_fields[field].default
        tensors, _ = _READ_AS.get(field, ((), ""))
        if value != default and not _reads(parts, tensors, besides=(field, "policy_loss", "corrections")):
            raise ConfigError(f"{field}={_said(value)} {_NO_POLICY_LOSS}; leave {field} at {_said(default)}")
    for chosen in parts.filters:
        if chosen.function is high_entropy_tokens:
            raise ConfigError(f"{chosen.field}={chosen.plugin.name!r} {_NO_POLICY_LOSS}; leave it out")


def _refuse_an_approximation_of_the_rollout_policy(parts: Parts, *, max_lag: int | None) -> None:
    """Up to a lag of 1 the approximation of π_old is μ. Losses of covariances rank tokens by the policy that begins the step instead."""
    if parts.config.proximal != "approximate" or max_lag is None or max_lag > 1 or parts.asks("covariances_BT"):
        return
    raise ConfigError(
        f"proximal='approximate' changes nothing while buffer.max_off_policy_steps={max_lag}: of tokens at most one version old it takes "
        "μ for π_old; set proximal to 'recompute', or max_off_policy_steps to 2 or more"
    )


def _refuse_treating_groups_that_a_filter_drops(parts: Parts) -> None:
    """Not where shaping over the batch may make rewards equal, which the filter sees before."""
    dropping = next((each for each in parts.filters if each.function is zero_variance), None)
    if dropping is None or not all(step.is_of_a_group for step in parts.reward_shaping):
        return
    treating = [
        f"{each.field}={each.plugin.name!r}" for each in parts.advantage_shaping if each.function is group_weights
    ]
    kl = parts.config.kl.reward
    if "rewards_G" in parts.advantage.asks and (kl is None or kl.credit != "trajectory"):
        how = None if parts.advantage.is_own else parts.advantage.parameters.get("zero_variance")
        treating += [f"advantage.zero_variance={how!r}"] if how == "rounding" else []
    if treating:
        raise ConfigError(
            f"{treating[0]} changes nothing: it treats groups whose rewards are all equal, which {dropping.field}='zero_variance' "
            "drops; leave one of them out"
        )


def _emptying_rows(parts: Parts) -> tuple[Plugin, ...]:
    """Filters that may leave a trajectory without tokens in the denominator. The cluster replaces groups that filters of a group drop."""
    filters = [each for each in parts.filters if not each.is_of_a_group]
    return tuple(each.plugin for each in filters if each.parameters.get("denominator") != "all")


def _reads(parts: Parts, tensors: tuple[str, ...], *, besides: tuple[str, ...]) -> bool:
    """Whether a part of any other field than `besides` reads one of these tensors."""
    config = parts.config
    asked = {name for each in parts.all() if each.field.partition("[")[0] not in besides for name in each.asks}
    if config.value is not None:
        asked |= {"token_rewards_NT"}  # the returns that the critic learns
    if config.kl.reward is not None and config.proximal == "recompute":
        asked |= {"proximal_logprobs_BT"}
    return not asked.isdisjoint(tensors)


def _set_away_from_default(variant: Variant) -> Iterator[tuple[str, Any, list[InertWith]]]:
    """Name, default and conditions of each parameter that config set to another value."""
    signature = inspect.signature(variant.function)
    for name, value in variant.plugin.params.items():
        default = signature.parameters[name].default if name in signature.parameters else inspect.Parameter.empty
        if default is not inspect.Parameter.empty and value != default:
            yield name, default, [each for each in variant.constraints(name) if isinstance(each, InertWith)]


def _starts_at_the_policy(variant: Variant, config: AlgorithmConfig) -> bool:
    """The first update of a step compares the policy, or the values, with themselves."""
    if "old_values_BT" in variant.asks:
        return True
    return "proximal_logprobs_BT" in variant.asks and variant.field == "policy_loss" and config.proximal == "recompute"


def waits_for_ratios(plugin: Plugin, name: str) -> bool:
    """Whether this parameter of a loss changes no gradient before the policy, or the values, have moved. A bound of None does not count."""
    value = plugin.params[name]
    if name not in _RATIO_BOUNDS or value is None:
        return f"{plugin.name}.{name}" in _ACTING_AWAY_FROM_ONE
    if name == "epsilon_min":
        return value <= 1
    return value >= (1 if name in ("epsilon_max", "dual_clip", "delta") else 0)  # else it leaves out ρ = 1 itself


def _said(value: Any) -> str:
    """As a run file says it."""
    if isinstance(value, Plugin):
        return repr({"name": value.name} | value.params if value.params else value.name)
    if isinstance(value, tuple):
        return str([each.name if isinstance(each, Plugin) else each for each in value])
    return repr(value)
