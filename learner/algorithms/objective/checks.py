"""Refuses contradictions between parts of a configuration, before anything starts."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cluster.contracts.algorithm_config import AlgorithmConfig
from cluster.contracts.errors import ConfigError, DataError
from cluster.contracts.hiding import shown
from learner.algorithms.conditions import AtMost, LessThan
from learner.algorithms.objective.inert import has_no_policy_loss
from learner.algorithms.objective.invented import NUM_GROUPS, try_advantage, try_parts, try_selection
from learner.algorithms.objective.parts import Parts
from learner.algorithms.registry.variants import Variant


def refuse_contradictions(parts: Parts) -> None:
    """Raises ConfigError that names field, value and way out."""
    for check in (
        _refuse_unsupplied_tensors,
        _require_a_passport,
        _require_a_critic,
        _refuse_empty_ranges,
        _refuse_parameters_above_their_limit,
        _require_an_advantage_of_the_changed_reward,
        _require_another_teacher,
        _require_an_old_policy,
        _refuse_a_kl_summed_twice,
        _refuse_conflicts_with_streaming,
        _require_parts_shaped_before_the_whole,
    ):
        check(parts)


def _refuse_unsupplied_tensors(parts: Parts) -> None:
    for variant in parts.all():
        if missing := [name for name in variant.requires if name not in variant.may_ask_for]:
            raise ConfigError(
                f"{variant.field}={variant.plugin.name!r} asks for {', '.join(missing)}, which it cannot have; with its first parameter, "
                f"{variant.asks[0]}, it may ask for: {', '.join(sorted(variant.may_ask_for))}"
            )
        if "columns" in variant.asks and "column" not in variant.parameters:
            raise ConfigError(
                f"{variant.field}={variant.plugin.name!r} asks for columns, and has no parameter 'column' that names the one it reads; "
                "give it one"
            )


def _require_a_passport(parts: Parts) -> None:
    """`passport.json` names every function and holds all parameters, defaults included."""
    for variant in parts.all():
        if not hasattr(variant.function, "__qualname__"):
            raise ConfigError(
                f"{variant.field}={variant.plugin.name!r} is an object of class {type(variant.function).__name__}, whose state "
                "passport.json cannot hold; name a function, with the state as its parameters"
            )
        for name, value in variant.parameters.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{variant.field}.{name}={shown(value, name)} is of type {type(value).__name__}, which passport.json cannot hold; use "
                    "numbers, texts, lists and mappings as parameters and their defaults, and make all else inside the function"
                ) from error


def _require_a_critic(parts: Parts) -> None:
    for variant in parts.all():
        if parts.config.value is None and {"values_NT", "values_BT", "old_values_BT", "returns_BT"} & set(variant.asks):
            raise ConfigError(
                f"{variant.field}={variant.plugin.name!r} needs values, but no critic is configured; "
                "add a `value:` section, or use an advantage without a critic such as 'grpo'"
            )


def _refuse_empty_ranges(parts: Parts) -> None:
    for variant, name, upper in _limited(parts, LessThan):
        low, high = variant.parameters[name], variant.parameters[upper]
        if not low < high:
            raise ConfigError(
                f"{variant.field}.{name}={low!r} is not below {upper}={high!r}; they are the ends of a range: give a lower "
                f"{name}, or a higher {upper}"
            )


def _refuse_parameters_above_their_limit(parts: Parts) -> None:
    for variant, name, limit in _limited(parts, AtMost):
        value, most = variant.parameters[name], variant.parameters[limit]
        if value > most:
            raise ConfigError(
                f"{variant.field}.{name}={value!r} is more than {limit}={most!r}; give a lower {name}, or a higher {limit}"
            )


def _limited(parts: Parts, kind: type[LessThan | AtMost]) -> Iterator[tuple[Variant, str, str]]:
    """Variant, parameter and the other parameter of the variant that limits it."""
    for variant in parts.all():
        for name in variant.parameters:
            yield from ((variant, name, each.name) for each in variant.constraints(name) if isinstance(each, kind))


def _require_an_advantage_of_the_changed_reward(parts: Parts) -> None:
    changing = _changing_the_reward(parts.config)
    if changing and not {"rewards_G", "rewards_N", "token_rewards_NT"} & set(parts.advantage.asks):
        raise ConfigError(
            f"advantage={parts.advantage.plugin.name!r} reads the judge's components, not the reward that {changing} changes; "
            "let the judge return that change as a component, credit a KL to tokens (kl.reward.credit: to_go), or use an "
            "advantage of the reward"
        )


def refuse_negative_rewards(parts: Parts) -> None:
    """Raises ConfigError if a KL makes rewards of 0 negative and the advantage takes none of these. Not where shaping may raise them."""
    config, advantage = parts.config, parts.advantage
    changing = _changing_the_reward(config)
    if changing is None or config.reward_shaping or advantage.requires != ("rewards_G",):
        return
    try:
        advantage.with_given({"rewards_G": torch.tensor([1.0, -0.5])})
    except (ValueError, DataError) as error:
        raise ConfigError(f"{changing} makes rewards of 0 negative: {error}") from error


def _require_another_teacher(parts: Parts) -> None:
    config = parts.config
    if config.advantage.name != "none":
        return
    if changing := _changing_the_reward(config):
        raise ConfigError(
            f"{changing} changes the reward, and advantage='none' reads none; use kl.reward.credit=token, or an advantage of the reward"
        )
    if not (config.kl.reward or config.kl.loss or config.distillation or config.sft):
        raise ConfigError(
            "advantage='none' and nothing else to learn from; add a teacher (kl.reward: {coefficient: 1, credit: token}, or distillation, "
            "with reference.path), demonstrations (sft), or use an advantage of the reward such as 'grpo'"
        )


def _require_an_old_policy(parts: Parts) -> None:
    proximal = parts.config.proximal
    for variant in parts.corrections:
        if proximal == "rollout" and {"proximal_logprobs_BT", "proximal_logprobs_NT"} & set(variant.asks):
            raise ConfigError(
                f"{variant.field}={variant.plugin.name!r} weighs π_old against the rollout policy, but with proximal='rollout' they are "
                "the same; set proximal to 'recompute', or with buffer.max_off_policy_steps of 2 or more to 'approximate'"
            )
        if proximal != "recompute" and "proximal_logprobs_NT" in variant.asks:
            raise ConfigError(
                f"{variant.field}={variant.plugin.name!r} weighs π_old over the whole step before its updates, which "
                f"proximal={proximal!r} does not compute; set proximal to 'recompute', or use a correction such as 'tis'"
            )


def _refuse_a_kl_summed_twice(parts: Parts) -> None:
    penalty = parts.config.kl.reward
    if penalty is not None and penalty.credit != "trajectory" and "token_rewards_NT" in parts.advantage.asks:
        raise ConfigError(
            f"kl.reward.credit={penalty.credit!r} with advantage={parts.advantage.plugin.name!r}, which itself sums rewards over time, "
            "the KL per token included; leave kl.reward.credit out"
        )


def _refuse_conflicts_with_streaming(parts: Parts) -> None:
    """With streaming one ticket's trajectories are only a part of a group."""
    if parts.config.streaming is None:
        return
    if parts.advantage.asks != ("rewards_G",):
        raise ConfigError(
            f"algorithm.streaming with advantage={parts.advantage.plugin.name!r}: of earlier steps only rewards are kept, and this "
            "advantage needs more than one group's rewards alone; use one such as 'grpo' or 'rloo', or leave `streaming` out"
        )
    for variant in (*parts.filters, *parts.advantage_shaping):
        if {"rewards_G", "reward_components_GK", "group_index_N"} & set(variant.asks):
            raise ConfigError(
                f"{variant.field}={variant.plugin.name!r} with algorithm.streaming: it judges the rewards of one ticket, but the advantage "
                "compares with earlier steps too, so it would take groups that train for groups that do not; leave one of them out"
            )
    if selection := parts.config.selection:
        raise ConfigError(
            f"selection={selection.name!r} with algorithm.streaming: trajectories would be compared with the earlier returns of chosen "
            "trajectories only, not with the prompt's usual ones; leave one of them out"
        )


def _require_parts_shaped_before_the_whole(parts: Parts) -> None:
    """Shaping of a part replaces the part's weighted share of the reward, which no earlier step may have changed."""
    for place, step in enumerate(parts.reward_shaping):
        before = [each for each in parts.reward_shaping[:place] if each.part in (None, step.part)]
        if step.part is not None and before:
            raise ConfigError(
                f"{step.field}.part={step.part!r} comes after {before[0].field}={before[0].plugin.name!r}, which changed its share of the "
                "reward; shape a part once, before the whole reward"
            )


def _changing_the_reward(config: AlgorithmConfig) -> str | None:
    """The first setting that changes rewards before an advantage reads them."""
    if config.reward_shaping:
        return "reward_shaping"
    has_kl = config.kl.reward is not None and config.kl.reward.credit == "trajectory"
    return "kl.reward.credit='trajectory'" if has_kl else None


def refuse_unknown_sampler(parts: Parts) -> None:
    """Raises ConfigError for a part that needs log-probs of the policy that sampled, which imported trajectories lack."""
    config = parts.config
    asking = [each for each in parts.all() if {"rollout_logprobs_BT", "rollout_logprobs_NT"} & set(each.asks)]
    has_ratio = not has_no_policy_loss(parts) and parts.asks("proximal_logprobs_BT", "proximal_logprobs_NT")
    has_ratio = has_ratio and config.proximal in ("rollout", "approximate")
    for is_used, setting, way_out in (
        (has_ratio, f"algorithm.proximal={config.proximal!r}", "set it to 'recompute'"),
        (bool(parts.corrections), "algorithm.corrections", "leave it out"),
        (config.kl.rollout is not None, "algorithm.kl.rollout", "leave it out"),
        *((True, f"algorithm.{each.field}={each.plugin.name!r}", "choose another one") for each in asking),
    ):
        if is_used:
            raise ConfigError(
                f"{setting} compares with the policy that sampled, and these trajectories have no rollout_logprobs; {way_out}"
            )


def refuse_group_size(parts: Parts, *, trajectories_per_group: int, given: str) -> None:
    """Raises ConfigError for a group size from which nothing is learned: the advantage is always 0 or fails, a filter drops every group of
    one, or `streaming` adds no earlier return. Advantage and filters are tried on invented rewards.

    `given` names the size in the error.
    """
    if parts.config.advantage.name == "none":
        return
    named = f"{given} with advantage={parts.advantage.plugin.name!r}"
    if trajectories_per_group == 1:
        for chosen in parts.filters:
            # A filter that drops all pairs too needs other rewards, not larger groups.
            if chosen.asks == ("rewards_G",) and not _keeps_any(chosen, size=1) and _keeps_any(chosen, size=2):
                raise ConfigError(
                    f"{chosen.field}={chosen.plugin.name!r} with {given} drops every group: one reward does not "
                    "differ from itself; leave the filter out, or use 2 or more"
                )
    largest = trajectories_per_group
    if streaming := parts.config.streaming:
        if streaming.group_size <= trajectories_per_group:
            raise ConfigError(
                f"algorithm.streaming.group_size={streaming.group_size} with {given}: "
                "a ticket fills its group alone, and no earlier return joins it; give a larger size, or leave `streaming` out"
            )
        largest = streaming.group_size
    try:
        if largest > trajectories_per_group:  # a prompt has no earlier returns the first time
            _tried(parts.advantage, trajectories_per_group=trajectories_per_group)
        tried = _tried(parts.advantage, trajectories_per_group=largest)
    except (ValueError, DataError) as error:
        raise ConfigError(f"{named}: {error}") from error
    if parts.advantage.is_own:
        _refuse_not_finite(parts, size=largest, named=named)
    if largest == 1 and tried and not any(bool(torch.nan_to_num(each).any()) for each in tried):
        raise ConfigError(
            f"{named}: the advantage of a group of one is always 0, and nothing is learned; use 2 or more"
        )


def _refuse_not_finite(parts: Parts, *, size: int, named: str) -> None:
    """Raises ConfigError if the advantages of a group's rewards are not finite, which would end the run at such a group. Equal rewards are
    tried too, unless a filter may drop them."""
    if parts.advantage.requires != ("rewards_G",):
        return
    tried = {"rewards": torch.linspace(1.0, 0.0, size)}
    if not parts.filters:
        tried["equal rewards"] = torch.full((size,), 0.5)
    for what, rewards_G in tried.items():
        advantages_G = parts.advantage.with_given({"rewards_G": rewards_G})
        if not bool(advantages_G.isfinite().all()):
            pairs = f"{_listed(rewards_G)} become {_listed(advantages_G)}"
            raise ConfigError(
                f"{named}: advantages of {what} are not finite: {pairs}; return finite ones, such as 0 where rewards do not differ"
            )


def _listed(numbers_G: Tensor) -> str:
    return "[" + ", ".join(f"{number:.3g}" for number in numbers_G.tolist()) + "]"


def refuse_failing_parts(parts: Parts, *, trajectories_per_group: int) -> None:
    """Raises ConfigError for a user's function that fails on invented tensors. `refuse_group_size` tries advantages, `refuse_selection`
    selections."""
    try:
        try_parts(parts, group_size=trajectories_per_group)
    except DataError as error:
        raise ConfigError(str(error)) from error


def refuse_selection(parts: Parts, *, trajectories_per_group: int, num_candidates: int) -> None:
    """Raises ConfigError for a selection that cannot choose this many of the candidates. It is tried on invented tensors."""
    if parts.selection is None:
        return
    try:
        try_selection(parts.selection, group_size=trajectories_per_group, num_candidates=num_candidates)
    except ValueError as error:
        raise ConfigError(f"algorithm.selection={parts.selection.plugin.name!r}: {error}") from error
    except DataError as error:
        raise ConfigError(str(error)) from error


def _keeps_any(chosen: Variant, *, size: int) -> bool:
    """Whether a filter keeps any group of invented rewards."""
    groups = torch.combinations(torch.linspace(-1, 1, 21), size)
    try:
        return any(chosen.verdict(chosen.with_given({"rewards_G": rewards_G})) for rewards_G in groups)
    except DataError as error:
        raise ConfigError(str(error)) from error


def _tried(advantage: Variant, *, trajectories_per_group: int) -> list[Tensor]:
    """Advantages of invented rewards; empty if the advantage needs more than rewards. Raises DataError if a user's advantage fails."""
    size = trajectories_per_group
    if advantage.requires == ("rewards_G",):
        return [
            advantage.tensor(advantage.with_given({"rewards_G": rewards_G}), rewards_G.shape)
            for rewards_G in (torch.linspace(1.0, 0.0, size), torch.linspace(0.5, 3.0, size))
        ]
    if not {"rewards_N", "reward_components_NK", "reward_component_names", "group_index_N"}.issuperset(
        advantage.requires
    ):
        if advantage.is_own:
            try_advantage(advantage, group_size=size)
        return []
    rewards_N = torch.linspace(0.5, 3.0, NUM_GROUPS * size)
    supply: dict[str, Any] = {
        "rewards_N": rewards_N,
        "group_index_N": torch.arange(NUM_GROUPS).repeat_interleave(size),
    }
    if "reward_components_NK" not in advantage.requires:
        return [advantage.tensor(advantage.with_given(supply), rewards_N.shape)]
    supply["reward_component_names"] = tuple(advantage.parameters.get("component_weights") or ("reward",))
    supply["reward_components_NK"] = rewards_N[:, None].expand(-1, len(supply["reward_component_names"]))
    # Without weights only the judge knows the number of components: an error may just mean that one is the wrong number.
    with contextlib.suppress(ValueError, IndexError, RuntimeError):
        return [advantage.tensor(advantage.with_given(supply), rewards_N.shape)]
    return []
