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
from learner.algorithms.conditions import InertWith
from learner.algorithms.objective.parts import Parts
from learner.algorithms.registry.variants import Variant

_READ_AS: dict[str, tuple[tuple[str, ...], str]] = {
    "reward_placement": (("token_rewards_NT",), "rewards per token"),
    "advantage_shaping": (("advantages_BT", "advantages_NT"), "advantages"),
    "proximal": (("proximal_logprobs_BT", "proximal_logprobs_NT", "covariances_BT"), "the log-probs of π_old"),
}
"""Fields that change tensors of other parts: the names of these tensors, and a description."""

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


def refuse_inert(parts: Parts, *, updates_per_step: int = 1) -> None:
    """Raises ConfigError that names field, value and way out for the first option without effect."""
    _refuse_unread(parts)
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
                if in_force == condition.value:
                    raise ConfigError(
                        f"{shown} changes nothing while {other}={_said(condition.value)}; leave it at {default!r}, or change the other"
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
        if value == AlgorithmConfig.model_fields[field].default or _reads(parts, tensors, besides=field):
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
    if not _reads(parts, ("values_NT", "values_BT", "old_values_BT", "returns_BT"), besides="value.loss"):
        raise ConfigError(
            f"value changes nothing: advantage={parts.advantage.plugin.name!r} and the other parts do not read the critic's values; leave "
            "value out, or use an advantage such as 'gae'"
        )


def _reads(parts: Parts, tensors: tuple[str, ...], *, besides: str = "") -> bool:
    """Whether a part of any other field than `besides` reads one of these tensors."""
    config = parts.config
    asked = {name for variant in parts.all() if variant.field.partition("[")[0] != besides for name in variant.asks}
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
    if isinstance(value, tuple):
        return str([each.name if isinstance(each, Plugin) else each for each in value])
    return repr(value)
